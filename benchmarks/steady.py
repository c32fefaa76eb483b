"""Whether memory grows: 10,000 steps of ResNet-50's 161 gradients.

    python benchmarks/steady.py                          # 2 ranks: some minutes
    python benchmarks/steady.py --share 0.01             # tensors a hundredth as large

A step enqueues all gradients under their names and waits for them. Printed, after every tenth part
of the steps and for the rank where it is most: resident memory, objects that Python's garbage
collector follows, and blocks of memory that Python has allocated.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

from jobs import run_ranks
from measuring import make_parser, say, slowest, table, write
from resnet50 import Gradients

import hvdlite.numpy as hvd

LOOKS = 10
MIB = 1 << 20
STEP, RESIDENT, OBJECTS, BLOCKS, SECONDS = "step", "resident_bytes", "objects", "blocks", "seconds"


def look() -> dict[str, float]:
    """Return what this process holds after a garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        RESIDENT: pages * os.sysconf("SC_PAGE_SIZE"),
        OBJECTS: len(gc.get_objects()),
        BLOCKS: sys.getallocatedblocks(),
    }


def measure(steps: int, share: float) -> list[dict[str, float]]:
    """Run one rank; return the most of any rank after every tenth part."""
    hvd.init()
    gradients = Gradients(share)
    records = []
    for tenth in range(1, LOOKS + 1):
        start = time.perf_counter()
        for _ in range(steps // LOOKS):
            gradients.enqueue()
            gradients.wait()
        figures = {SECONDS: (time.perf_counter() - start) / (steps // LOOKS), **look()}
        step = {STEP: tenth * (steps // LOOKS), "ranks": hvd.size()}
        records.append(step | slowest(figures, [*figures.values()]))
        say(f"{hvd.size()} ranks, step {records[-1][STEP]} of {steps}")
    return records


def main() -> None:
    parser = make_parser("Whether memory grows.", "steady", [2])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=1, help="size of the tensors")
    args = parser.parse_args()
    records: list[dict[str, float]] = []
    for ranks in args.ranks:
        records += run_ranks(measure, ranks, args.steps, args.share)
    rows = [
        (
            f"{each['ranks']:.0f}",
            f"{each[STEP]:.0f}",
            f"{each[RESIDENT] / MIB:.1f} MiB",
            f"{each[OBJECTS]:.0f}",
            f"{each[BLOCKS]:.0f}",
            f"{each[SECONDS] * 1e3:.2f} ms",
        )
        for each in records
    ]
    print(table(["ranks", "step", "resident memory", "objects", "blocks", "a step"], rows))
    write(args.json, records)


if __name__ == "__main__":
    main()
