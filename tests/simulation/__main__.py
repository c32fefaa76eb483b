"""Replay a seed, or play many.

python -m tests.simulation --seed 144              # its story; shrunk if an invariant breaks
python -m tests.simulation --seed 144 --messages   # with every message
python -m tests.simulation --seeds 0..10000        # a soak: how many, how fast, and which broke
python -m tests.simulation --world ps --seed 144   # of another kind of job
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tests.simulation.shrinking import KINDS, Kind, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", metavar="A..B", help="from A up to, and without, B")
    parser.add_argument("--world", choices=KINDS, default="ranks", help="the kind of the jobs")
    parser.add_argument("--messages", action="store_true", help="show every message")
    options = parser.parse_args()
    kind = KINDS[options.world]
    if options.seeds is None:
        return replay(kind, options.seed, messages=options.messages)
    first, _, end = options.seeds.partition("..")
    return soak(kind, range(int(first), int(end)))


def replay(kind: Kind, seed: int, *, messages: bool) -> int:
    """Print the story of a seed, and that of the smallest program that fails like it."""
    job = kind.play(kind.make(seed))
    if messages or job.broken is None:
        show(job, messages=messages)
    if job.broken is None:
        return 0
    print(f"\nseed {seed} breaks an invariant. The smallest program that still does:\n")
    show(shrink(kind, job), messages=messages)
    return 1


def show(job: Any, *, messages: bool) -> None:
    print(job.program, "\n")
    for line in job.world.story():
        if messages or not any(word in line for word in (" sends rank ", " -> ")):
            print(line)


def soak(kind: Kind, seeds: range) -> int:
    """Play many seeds, and tell of those that break an invariant."""
    start, cpu, broken = time.monotonic(), time.process_time(), 0
    for seed in seeds:
        job = kind.play(kind.make(seed))
        if job.broken is not None:
            broken += 1
            print(f"seed {seed}: {job.broken}", flush=True)
    cpu, wall = time.process_time() - cpu, time.monotonic() - start
    print(
        f"{len(seeds)} seeds, {broken} broken: {wall:.1f} s, {cpu:.1f} s of CPU, "
        f"{len(seeds) / max(cpu, 1e-9):.0f} seeds a second of CPU"
    )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
