"""Replay a seed, or play many.

python -m tests.simulation --seed 144              # its story; shrunk if an invariant breaks
python -m tests.simulation --seed 144 --messages   # with every message
python -m tests.simulation --seeds 0..10000        # how many, how fast, and which broke
python -m tests.simulation --world ps --seed 144   # of another kind of job
python -m tests.simulation --soak seeds.tsv --minutes 60   # of all kinds, where the last one ended
python -m tests.simulation --soak seeds.tsv --part 0/2     # one of two processes that do that
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tests.simulation.shrinking import KINDS, Kind, shrink
from tests.simulation.soak import play, soak, summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", metavar="A..B", help="from A up to, and without, B")
    parser.add_argument(
        "--world", choices=KINDS, help="the kind of the jobs: ranks, or all with --soak"
    )
    parser.add_argument("--soak", metavar="FILE", type=Path, help="go on with it, and add to it")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long, with --soak")
    parser.add_argument("--part", metavar="K/N", default="0/1", help="of N that share the file")
    parser.add_argument("--messages", action="store_true", help="show every message")
    options = parser.parse_args()
    if options.soak is not None:
        worlds = [options.world] if options.world else [*KINDS]
        part, parts = map(int, options.part.split("/"))
        stay_on_a_core(part)
        return soak(options.soak, worlds, 60 * options.minutes, part=part, parts=parts)
    world = options.world or "ranks"
    if options.seeds is None:
        return replay(KINDS[world], options.seed, messages=options.messages)
    first, _, end = options.seeds.partition("..")
    stay_on_a_core(0)
    played = play(world, KINDS[world], range(int(first), int(end)))
    print(*summary("now", [played]), sep="\n")
    return int(bool(played.broken))


def stay_on_a_core(number: int) -> None:
    """Run on one core, as only one thread runs at any time: the next one is there sooner."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


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


if __name__ == "__main__":
    sys.exit(main())
