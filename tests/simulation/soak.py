"""Plays seeds for a given time, and goes on where the last soak of the same file has ended.

The file has a line for each range of seeds: the date, the kind of the jobs, the range, the seeds
that broke an invariant, and the seconds of CPU. So nights add up to a million. Several processes
may add to one file: each of them plays its part of the ranges.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tests.simulation.shrinking import KINDS, Kind

BATCH = 100  # Seeds of a kind, before another one has its turn.
COLLECTED = 20  # After so many jobs their memory is freed.


class Range(NamedTuple):
    """Seeds that were played, from `first` up to, and without, `end`."""

    day: str
    world: str
    first: int
    end: int
    broken: tuple[int, ...]
    seconds: float  # Of CPU.

    def line(self) -> str:
        """Return it as the file has it."""
        broken = ",".join(map(str, self.broken)) or "-"
        return f"{self.day}\t{self.world}\t{self.first}..{self.end}\t{broken}\t{self.seconds:.2f}\n"


def read(file: Path) -> list[Range]:
    """Return the ranges of a file, which may be missing."""
    if not file.exists():
        return []
    ranges = []
    for line in file.read_text().splitlines():
        day, world, span, broken, seconds = line.split("\t")
        first, _, end = span.partition("..")
        seeds = () if broken == "-" else tuple(map(int, broken.split(",")))
        ranges.append(Range(day, world, int(first), int(end), seeds, float(seconds)))
    return ranges


def play(world: str, kind: Kind, seeds: range) -> Range:
    """Play seeds, and tell of those that break an invariant."""
    cpu, broken = time.process_time(), []
    with _no_collector():
        for seed in seeds:
            job = kind.play(kind.make(seed))
            if job.broken is not None:
                broken.append(seed)
                print(f"seed {seed} of {world}: {job.broken}", flush=True)
            if not seed % COLLECTED:
                gc.collect()
    seconds = time.process_time() - cpu
    day = date.today().isoformat()
    return Range(day, world, seeds.start, seeds.stop, tuple(broken), seconds)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Let Python look for garbage only when it is asked: a job makes many objects that stay."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()  # What was there stays out of collections: it is for the whole process.


def soak(
    file: Path,
    worlds: Sequence[str],
    seconds: float,
    batch: int = BATCH,
    part: int = 0,
    parts: int = 1,
) -> int:
    """Play the next seeds of each kind, which all have the same share of the CPU time.

    Of `parts` processes that share a file, this is the one with the number `part`.
    """
    before = read(file)
    ends = {}
    for world in worlds:
        blocks = [each.first // batch for each in before if each.world == world]
        own = max((each for each in blocks if each % parts == part), default=part - parts)
        ends[world] = (own + parts) * batch
    used: Counter[str] = Counter(dict.fromkeys(worlds, 0))  # Milliseconds of CPU.
    until, made = time.monotonic() + seconds, []
    while not made or time.monotonic() < until:
        world = min(worlds, key=used.__getitem__)
        first = ends[world]
        ends[world] += parts * batch
        made.append(play(world, KINDS[world], range(first, first + batch)))
        used[world] += max(1, int(made[-1].seconds * 1000))
        with file.open("a") as lines:
            lines.write(made[-1].line())
    print(*summary("now", made), *summary("in all", [*before, *made]), sep="\n")
    return int(any(each.broken for each in made))


def summary(words: str, ranges: Sequence[Range]) -> Iterator[str]:
    """Yield a line for each kind."""
    for world in dict.fromkeys(each.world for each in ranges):
        of = [each for each in ranges if each.world == world]
        seeds, seconds = sum(each.end - each.first for each in of), sum(each.seconds for each in of)
        broken = sum(len(each.broken) for each in of)
        rate = seeds / max(seconds, 1e-9)
        yield f"{words}: {seeds} seeds of {world}, {broken} broken, {rate:.0f} a second of CPU"
