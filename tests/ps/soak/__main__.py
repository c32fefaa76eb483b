"""Random jobs of a parameter server, of which anything is killed, stopped, added and taken away.

    python -m tests.ps.soak --jobs 20 --seed 1
    python -m tests.ps.soak --file ps.tsv --minutes 60    # goes on where the last soak has ended

Each job is two clusters of processes, one after the other: the second one, of another number of
servers, loads what the first one has saved at its end. Every version has a snapshot, so that no
push may be lost or count twice: the last values are those of a serial oracle, to the bit, in every
worker. Jobs push integers with numpy, PyTorch or Keras in sync, ssp or async, or train the digits
with Adam of PyTorch in sync. A job that hangs, ends with an error or leaves a process fails, with
the seed by which it is repeated.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tests.ps import processes
from tests.ps.soak.lives import run_job

LIMIT_SECONDS = 600  # For a process; a machine may be busy.


class Line(NamedTuple):
    """What came of a job, as a file has it."""

    day: str
    seed: int
    kind: str
    outcome: str  # right, or where there is more of what it has said.
    steps: int
    seconds: float
    events: Counter[str]

    def text(self) -> str:
        events = ", ".join(f"{count} {kind}" for kind, count in sorted(self.events.items()))
        words = self.day, self.seed, self.kind, self.outcome, self.steps, f"{self.seconds:.1f}"
        return "\t".join(map(str, (*words, events)))

    @classmethod
    def read(cls, text: str) -> Line:
        day, seed, kind, outcome, steps, seconds, events = text.rstrip("\n").split("\t")
        pairs = (each.split(" ", 1) for each in events.split(", ") if each)
        counts = Counter({kind: int(count) for count, kind in pairs})
        return cls(day, int(seed), kind, outcome, int(steps), float(seconds), counts)


def run_one(seed: int, events: int) -> Line:
    """Run a job; what is left of one that fails stays in a folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
    begin, day = time.monotonic(), date.today().isoformat()
    try:
        plan, happened, steps = run_job(folder, seed, events)
    except BaseException as error:
        (folder / "why").write_text(traceback.format_exc())
        if not isinstance(error, Exception):
            raise
        print(f"job {seed} has failed (--seed {seed} --jobs 1)", traceback.format_exc())
        return Line(day, seed, "", str(folder), 0, time.monotonic() - begin, Counter())
    shutil.rmtree(folder)
    kind = f"{plan.framework}, {plan.mode}"
    return Line(day, seed, kind, "right", steps, time.monotonic() - begin, happened)


def summary(lines: Sequence[Line]) -> str:
    """Return what came of jobs, all together."""
    happened: Counter[str] = Counter()
    for line in lines:
        happened += line.events
    kinds = ", ".join(f"{count} {kind}" for kind, count in happened.most_common())
    wrong = [line.seed for line in lines if line.outcome != "right"]
    of = ", ".join(f"{n} {kind}" for kind, n in Counter(line.kind for line in lines).most_common())
    seconds, steps = sum(line.seconds for line in lines), sum(line.steps for line in lines)
    return (
        f"{len(lines)} jobs ({of}), {happened.total()} events ({kinds}), {steps} steps, "
        f"{seconds:.0f} s; failed: {wrong or 'none'}"
    )


def run(arguments: list[str] | None = None) -> int:
    """Run the jobs that the command line asks for; return 1 where one has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first job; others follow")
    parser.add_argument(
        "--events", type=int, default=5, help="in each of the two clusters of a job"
    )
    parser.add_argument("--file", type=Path, help="go on with the jobs of it, and add to it")
    parser.add_argument("--minutes", type=float, help="how long, with --file, instead of --jobs")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS",
        help="after which a job hangs: more where others use the machine",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    processes.LIMIT_SECONDS = given.limit
    before: list[Line] = []
    if given.file is not None and given.file.exists():
        before = [Line.read(text) for text in given.file.read_text().splitlines()]
    first = max([given.seed, *(line.seed + 1 for line in before)])
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    made: list[Line] = []
    while len(made) < given.jobs if until is None else time.monotonic() < until:
        made.append(run_one(first + len(made), given.events))
        print(made[-1].text(), flush=True)
        if given.file is not None:
            with given.file.open("a") as file:
                file.write(made[-1].text() + "\n")
    print(summary(made), *([f"in all: {summary([*before, *made])}"] if before else []), sep="\n")
    return int(any(line.outcome != "right" for line in made))


if __name__ == "__main__":
    processes.preload("tests.ps.soak.preloaded")
    sys.exit(run(sys.argv[1:]))
