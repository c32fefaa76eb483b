"""Training between two simulated hosts on a slow link, with gradients cut in different ways.

    python benchmarks/segmentation.py                     # both networks, 1 Gbit/s
    python benchmarks/segmentation.py --quick             # the transformer, a few rounds
    python benchmarks/segmentation.py --picture docs/images/segmentation.png   # and the extra plot

Needs what `simulated_hosts` needs, and the extras torch and examples. All
ways train in the same processes, in turns. The tail is the time from the end of backward on all
ranks until all gradients are reduced: what of the communication backward does not hide.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import Spread, make_parser, parse, say, slowest, table, write
from simulated_hosts import TCP, add_link_options, describe, two_hosts

import hvdlite.torch as hvd
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current

AUTO = "auto"
WAYS = {
    "one segment": "size:100",
    "96.54 / 3.46 %": "size",
    "16 MiB / 50": "mb:16",
    "as it comes (default)": "threshold",
    AUTO: "auto",
}
WARM_STEPS = 2  # after the first one segments follow the order of readiness
MOST_TUNING_STEPS = 250
LARGE_IMAGES = "resnet50-224"  # backward takes longer than the gradients on the wire
Record = dict[str, Any]


class Step(NamedTuple):
    """What one rank saw of one step; seconds from the start of forward."""

    start: float  # of the clock that both hosts have, as they are one machine
    forward_end: float
    backward_end: float
    reduced: float
    end: float
    segments: tuple[tuple[int, float, float], ...]  # bytes, start, end


class Trainee:
    """A copy of the network, trained with gradients that are cut in one way."""

    def __init__(self, task: Any, way: str) -> None:
        self._task = task
        self._model = copy.deepcopy(task.model)
        inner = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        named = [(f"{way}.{name}", each) for name, each in self._model.named_parameters()]
        self._optimizer = hvd.DistributedOptimizer(inner, named, segmentation=WAYS[way])
        self._prefix = f"allreduce.{way}."
        self._runs: list[SegmentRun] = []
        current().engine.observe(self._runs.append)

    @property
    def tuning(self) -> bool:
        """Whether `auto` still tries; it says so on all ranks alike."""
        auto = self._optimizer._exchange.segment_schedule.auto
        return auto is None or not auto.frozen

    def step(self) -> Step:
        """Make one step."""
        self._runs.clear()
        self._optimizer.zero_grad()
        hvd.barrier()
        start = time.monotonic()
        loss = self._task.loss(self._model)
        forward_end = time.monotonic()
        loss.backward()
        backward_end = time.monotonic()
        self._optimizer.synchronize()
        reduced = time.monotonic()
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        end = time.monotonic()
        mine = [run for run in self._runs if run.names[0].startswith(self._prefix)]
        spans = tuple((run.bytes, run.start - start, run.end - start) for run in mine)
        marks = (each - start for each in (forward_end, backward_end, reduced, end))
        return Step(start, *marks, spans)


def rank_main(plan: argparse.Namespace) -> None:
    """Run one rank; rank 0 writes the records."""
    from training import EXAMPLES, NETWORKS, resnet50

    networks = {**NETWORKS, LARGE_IMAGES: partial(resnet50, images=8, pixels=224)}
    sys.path.append(str(EXAMPLES))
    hvd.init()
    records: list[Record] = []
    for network in plan.networks:
        torch.manual_seed(1)  # the same network everywhere
        task = networks[network]()
        records += measure(network, task, plan)
    if hvd.rank() == 0:
        plan.rank_file.write_text(json.dumps(records))
    hvd.shutdown()


def measure(network: str, task: Any, plan: argparse.Namespace) -> list[Record]:
    """Return a record for each way."""
    trainees = {way: Trainee(task, way) for way in plan.ways}
    for way, trainee in trainees.items():
        steps = 0
        while steps < WARM_STEPS or (way == AUTO and trainee.tuning and steps < MOST_TUNING_STEPS):
            trainee.step()
            steps += 1
        say(f"{network}, {way}: {steps} steps to warm up")
    seen: dict[str, list[Step]] = {way: [] for way in plan.ways}
    tails: dict[str, list[float]] = {way: [] for way in plan.ways}
    totals: dict[str, list[float]] = {way: [] for way in plan.ways}
    lot = random.Random(0)
    for _ in range(plan.rounds):
        for way in lot.sample([*trainees], len(trainees)):
            seen[way].append(trainees[way].step())
        last = {way: steps[-1] for way, steps in seen.items()}
        backward_end = slowest(last, [each.start + each.backward_end for each in last.values()])
        reduced = slowest(last, [each.start + each.reduced for each in last.values()])
        total = slowest(last, [each.end for each in last.values()])
        for way in last:
            tails[way].append(reduced[way] - backward_end[way])
            totals[way].append(total[way])
    return [
        {
            "network": network,
            "entry": way,
            "seconds": asdict(Spread.quartiles(totals[way])),
            "tail_seconds": asdict(Spread.quartiles(tails[way])),
            "reductions": len(seen[way][-1].segments),
            "median_step": median_step(seen[way]),
        }
        for way in plan.ways
    ]


def median_step(steps: Sequence[Step]) -> Step:
    """Return the step with the median tail."""
    return sorted(steps, key=lambda step: step.reduced - step.backward_end)[len(steps) // 2]


def draw(records: Sequence[Record], title: str, path: Path) -> None:
    """Draw a row for each way: forward, backward, the optimizer, and below them the reductions."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    networks = list(dict.fromkeys(each["network"] for each in records))
    figure, axes = plt.subplots(len(networks), 1, figsize=(10, 3.2 * len(networks)),
                                layout="constrained", squeeze=False)  # fmt: skip
    for axis, network in zip(axes[:, 0], networks, strict=True):
        mine = [each for each in records if each["network"] == network]
        for row, record in enumerate(mine):
            step = Step(*record["median_step"])
            bars = ((0, step.forward_end, "#cfd8dc", "forward"),
                    (step.forward_end, step.backward_end, "#90a4ae", "backward"),
                    (step.backward_end, step.reduced, "#ef9a9a", "tail"),
                    (step.reduced, step.end, "#546e7a", "optimizer"))  # fmt: skip
            for start, end, colour, label in bars:
                axis.barh(row - 0.18, 1e3 * (end - start), 0.36, 1e3 * start, color=colour,
                          label=label if row == 0 else None)  # fmt: skip
            for number, (_, start, end) in enumerate(step.segments):
                axis.barh(row + 0.18, 1e3 * (end - start), 0.3, 1e3 * start,
                          color="#2f6db0" if number % 2 else "#9ec5e8",
                          label="reductions" if row == number == 0 else None)  # fmt: skip
        axis.set_yticks(range(len(mine)), [each["entry"] for each in mine])
        axis.invert_yaxis()
        axis.set_xlabel("ms")
        axis.set_title(network)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=5, loc="outside lower center")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def print_table(records: Sequence[Record]) -> None:
    rows = [
        [each["network"], each["entry"], str(each["reductions"]),
         str(Spread(**each["seconds"])), str(Spread(**each["tail_seconds"]))]
        for each in records
    ]  # fmt: skip
    print(table(["network", "gradients in", "reductions", "step", "tail"], rows))


def main() -> None:
    parser = make_parser("Training between two simulated hosts.", "segmentation")
    parser.add_argument("--networks", nargs="+", default=["gpt", "resnet50", LARGE_IMAGES])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--picture", type=Path, help="to draw; needs matplotlib")
    add_link_options(parser, gbit=1)
    args = parse(parser, "the transformer, 5 rounds", networks=["gpt"], rounds=5)
    if args.rank_file:
        rank_main(args)
        return
    with two_hosts(args) as hosts:
        records = hosts.measure(TCP, __file__, sys.argv[1:])
    title = f"2 hosts, {describe(args, hosts.delayed_by)}"
    print(f"{title}\n")
    print_table(records)
    write(args.json, records)
    if args.picture:
        draw(records, title, args.picture)


if __name__ == "__main__":
    main()
