"""Memory and time of long trainings and of large models.

    python benchmarks/memory.py many             # 10,000 steps of 1,000 gradients
    python benchmarks/memory.py large            # a step of a model with 2 GiB of gradients

"many" prints how many bytes the resident memory of a rank grows in a step (the slope of a line
through samples after a tenth of the steps, by least squares), and the time of a step in the
first and the last fifth. "large" prints how much memory a rank has taken at most beside its
gradients, in the first steps: backward alone, reduced, and as views. Pages that ranks share count
in each of them. Needs twice the gradients as free memory for each rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jobs import run_ranks
from measuring import duration

SAMPLES = 200
WIDTH = 4096  # of a layer of the large model: 64 MiB of float32
MIB = 2**20


def memory(field: str) -> int:
    """Return a size of this process in bytes, such as "VmRSS" or "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def many(steps: int, tensors: int) -> dict[str, float]:
    """Return the slope of memory, and what steps take in the beginning and in the end."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(torch.ones(8, 8) for _ in range(tensors))
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    sizes, took = [], []
    for step in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.stack([each.sum() for each in model]).sum().backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
        if step >= steps // 10 and step % max(steps // SAMPLES, 1) == 0:
            sizes.append((step, memory("VmRSS")))
    slope = float(np.polyfit(*zip(*sizes, strict=True), 1)[0])
    slopes = hvd.allgather(torch.tensor([slope]), name="slopes")
    fifth = steps // 5
    return {
        "slope": float(slopes.max()),
        "first": statistics.median(took[steps // 10 : steps // 10 + fifth]),
        "last": statistics.median(took[-fifth:]),
    }


def peak(step: Callable[[], object]) -> int:
    """Return the most resident memory of this process during a step, since its beginning."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew.
    step()
    return memory("VmHWM") - before


def large(gib: float) -> dict[str, float]:
    """Return what two steps of a model with `gib` of gradients take beside them, in each way."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    layers = max(round(gib * 2**30 / (4 * WIDTH**2)), 1)
    parts = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    model = torch.nn.Sequential(*parts)
    batch = torch.full((4, WIDTH), 1.0 + hvd.rank())
    gradients = 4 * WIDTH**2 * layers

    def beside(reduce: Callable[[], object]) -> float:
        def steps() -> None:
            for _ in range(2):
                model.zero_grad()
                model(batch).sum().backward()
                reduce()

        model.zero_grad()
        most = torch.tensor([peak(steps) - gradients])
        return float(hvd.allreduce(most, name="most", op=hvd.Max))

    found = {"gradients": gradients, "backward": beside(lambda: None)}
    own = [each.grad.flatten()[:64].clone() for each in model.parameters() if each.grad is not None]
    for views in (False, True):
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), gradient_as_bucket_view=views
        )
        found["views" if views else "reduced"] = beside(optimizer.synchronize)
        for number, (mine, parameter) in enumerate(zip(own, model.parameters(), strict=True)):
            assert parameter.grad is not None
            expected = hvd.allreduce(mine, name=f"expected.{number}")
            torch.testing.assert_close(parameter.grad.flatten()[:64], expected)
        del optimizer
    return found


def main() -> None:
    """Start the ranks, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["many", "large"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=1_000)
    parser.add_argument("--gib", type=float, default=2.0)
    options = parser.parse_args()
    if options.what == "many":
        found = run_ranks(many, options.ranks, options.steps, options.tensors)
        print(f"resident memory grows by {found['slope']:.1f} bytes a step")
        print(f"a step: {duration(found['first'])} first, {duration(found['last'])} at last")
        return
    found = run_ranks(large, options.ranks, options.gib)
    sizes = {name: f"{size / MIB:.0f} MiB" for name, size in found.items()}
    print(f"{sizes.pop('gradients')} of gradients; beside them at most")
    print(", ".join(f"{name}: {size}" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
