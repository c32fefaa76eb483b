"""What 161 allreduces of ResNet-50's gradients add to a step of TensorFlow, beside PyTorch.

    python benchmarks/tf_overhead.py                     # 2 ranks, and 1 for scale
    python benchmarks/tf_overhead.py --share 0           # tensors of 1 element: the cost of a call
    python benchmarks/tf_overhead.py --threads 0         # TensorFlow may compute on all cores

A step makes 161 tensors and hands them to somebody else, with or without a reduction between the
two. A rank has one thread that computes. In TensorFlow a step is one `tf.function`, and reductions
run by compiled operations or by Python's; in PyTorch they are as the optimizer's hooks start them.
What they add is the step with them less the step without, of the same framework in the same round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from jobs import run_ranks
from measuring import (
    Spread,
    agreed,
    interleave,
    make_parser,
    say,
    table,
    write,
)
from resnet50 import SIZES

import hvdlite.numpy as hvd
from hvdlite.common.gradients.buckets import ReductionConfig, Scaling
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.plain.compression import NoneCompressor

NATIVE, PYTHON, TORCH = "TensorFlow, compiled operations", "TensorFlow, Python", "PyTorch"
ALONE = {NATIVE: "TensorFlow alone", PYTHON: "TensorFlow alone", TORCH: "PyTorch alone"}
SETTING = "HVDLITE_TF_NATIVE"

Step = Callable[[], object]


def shapes(share: float) -> list[int]:
    """Elements of every tensor."""
    return [max(1, int(share * size)) for size in SIZES]


@contextmanager
def operations(setting: str) -> Iterator[None]:
    """Graphs that are built within this run collectives in this way."""
    before = os.environ.get(SETTING)
    os.environ[SETTING] = setting
    try:
        yield
    finally:
        os.environ.pop(SETTING)
        if before is not None:
            os.environ[SETTING] = before


def tensorflow_steps(sizes: list[int], threads: int = 1) -> dict[str, Step]:
    """Return the steps by name; each leaves its results in the same variables."""
    import tensorflow as tf

    from hvdlite.tf.gradient_exchange import reduce_gradients  # what every tape and optimizer calls

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    sources = [tf.Variable(tf.ones([size]), name=f"source{size}") for size in sizes]
    results = [tf.Variable(tf.zeros([size]), name=f"result{size}") for size in sizes]
    factor = tf.Variable(1.0)
    names = [f"tf.{number}" for number in range(len(sizes))]

    reduction = ReductionConfig(NoneCompressor, Scaling(hvd.Sum), False, hvd.global_process_set)
    segments = SegmentPlan(reduction, grouped=False)

    def build(reduce: bool) -> Step:
        @tf.function(autograph=False)
        def step() -> None:
            gradients = [source * factor for source in sources]
            if reduce:
                gradients = reduce_gradients(gradients, names, reduction, segments)
            for result, gradient in zip(results, gradients, strict=True):
                result.assign(gradient)

        step()
        wanted = hvd.size() if reduce else 1
        assert agreed(all(bool(np.all(each.numpy() == wanted)) for each in results))
        return step

    with operations("on"):
        compiled = build(True)
    with operations("off"):
        python = build(True)
    return {ALONE[NATIVE]: build(False), NATIVE: compiled, PYTHON: python}


def torch_steps(sizes: list[int]) -> dict[str, Step]:
    """Return the steps by name."""
    import torch

    import hvdlite.torch as hvd_torch

    torch.set_num_threads(1)
    sources = [torch.ones(size) for size in sizes]
    factor = torch.tensor(1.0)
    results: list[Any] = []

    def alone() -> None:
        results[:] = [source * factor for source in sources]

    def reduced() -> None:
        handles, made = [], []
        for number, source in enumerate(sources):
            made.append(source * factor)
            handles.append(hvd_torch.allreduce_async_(made[-1], name=f"torch.{number}", op=hvd.Sum))
        for handle in handles:
            hvd_torch.synchronize(handle)
        results[:] = made

    reduced()
    assert agreed(all(bool((each == hvd.size()).all()) for each in results))
    return {ALONE[TORCH]: alone, TORCH: reduced}


def measure(seconds: float, share: float, threads: int) -> list[dict[str, Any]]:
    """Run one rank; return its records."""
    hvd.init()
    sizes = shapes(share)
    say(f"{hvd.size()} ranks, {len(sizes)} tensors of {sum(sizes)} elements in all")
    steps = {**tensorflow_steps(sizes, threads), **torch_steps(sizes)}
    if hvd.size() == 1:
        steps = {name: steps[name] for name in ALONE.values()}
    for step in steps.values():
        step()
    took = interleave(steps, seconds)
    return [record(name, took) for name in took]


def record(name: str, took: dict[str, list[float]]) -> dict[str, Any]:
    """Return the figures of one step, and what it adds to the step without reductions."""
    own: dict[str, Any] = {"ranks": hvd.size(), "entry": name, "rounds": len(took[name])}
    own["seconds"] = asdict(Spread.quartiles(took[name]))
    if name in ALONE:
        pairs = zip(took[name], took[ALONE[name]], strict=True)
        own["added"] = asdict(Spread.quartiles([reduced - alone for reduced, alone in pairs]))
    return own


def show(records: list[dict[str, Any]]) -> str:
    """Return the records as a table."""
    base = {each["ranks"]: each["added"]["median"] for each in records if each["entry"] == TORCH}
    rows = []
    for each in records:
        cells = [str(each["ranks"]), each["entry"], str(Spread(**each["seconds"])), "", ""]
        if "added" in each:
            added = Spread(**each["added"])
            cells[3:] = str(added), f"{added.median / base[each['ranks']]:.2f}"
        rows.append(cells)
    return table(["ranks", "step", "takes (quartiles)", "reductions add", "PyTorch is 1"], rows)


def main() -> None:
    parser = make_parser("What 161 allreduces add to a step.", "tf_overhead", [1, 2])
    parser.add_argument("--seconds", type=float, default=60, help="of measuring, per job")
    parser.add_argument("--share", type=float, default=1, help="size of the tensors")
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow; 0 is one per core")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    for ranks in args.ranks:
        records += run_ranks(measure, ranks, args.seconds, args.share, args.threads)
    print(show(records))
    write(args.json, records)


if __name__ == "__main__":
    main()
