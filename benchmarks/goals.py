"""All goals of speed in one table: hvdlite beside other libraries, in turns, within some minutes.

    python benchmarks/goals.py                              # all that is timed, in 12 minutes
    python benchmarks/goals.py --part steps --minutes 3.5   # one part, and its own bound
    python benchmarks/goals.py --part losses                # what trainings with compressors reach
    python benchmarks/goals.py --part                       # only the table of what is measured

Each part runs commands of this folder, round by round as long as its minutes allow, and once at
least: in each round, all libraries run a job of their own. The table has the median of the rounds,
the ratio of the medians, and in brackets the least and the most of the rounds' ratios. "exposed"
is a step minus the floor. All figures are added to a JSON file, in place of those of an earlier
sitting of the same part.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Spread, duration, make_parser, say, table, write

HERE = Path(__file__).parent
Figures = dict[str, list[float]]  # name of a case -> its seconds (or loss) in each round


def step_name(record: Mapping[str, Any]) -> str:
    """Return the name of a training step."""
    return f"{record['network']}, {record['entry']}"


def call_name(record: Mapping[str, Any]) -> str:
    """Return the name of a collective."""
    dtype = "" if record["dtype"] == "float32" else f" of {record['dtype']}"
    call = f"{record['collective']} {record['size']}{dtype}"
    return f"{call}, {record['ranks']} ranks, {record['entry']}"


def entry_name(record: Mapping[str, Any]) -> str:
    """Return the name of what is its entry alone."""
    return str(record["entry"])


def loss_name(record: Mapping[str, Any]) -> str:
    """Return the name of a training with a compressor."""
    return f"{record['what']}, {record['entry']}"


@dataclass(frozen=True)
class Part:
    """Commands of this folder, the names of what they measure, and a share of the minutes."""

    commands: Sequence[str]
    name: Callable[[Mapping[str, Any]], str]
    share: float  # 0: it is left out unless it is asked for


PARTS = {
    "steps": Part(
        ["training.py --ranks 2 --networks small transformer wide gpt --seconds 1 --rounds 1 "
         "--entries floor 'DDP gloo' 'FSDP2 gloo' hvdlite 'hvdlite views'"],
        step_name, 3.5,
    ),
    "tensorflow": Part(
        ["training_tf.py --networks gpt --seconds 2 --rounds 1"], step_name, 2.5
    ),
    "ranks": Part(
        ["collectives.py --ranks 4 8 --sizes '1 MiB' '16 MiB' --seconds 0.3 --rounds 1 "
         "--entries 'hvdlite numpy' MPI 'hvdlite torch' gloo"],
        call_name, 1.5,
    ),
    "large": Part(
        ["collectives.py --ranks 2 --sizes '64 MiB' --collectives broadcast --seconds 0.3 "
         "--rounds 1 --entries 'hvdlite numpy' MPI 'hvdlite torch' gloo",
         "collectives.py --ranks 2 --sizes '64 MiB' --seconds 0.3 --rounds 1 "
         "--entries 'hvdlite numpy' 'hvdlite torch' gloo MPI",
         # As many elements as 64 MiB of float32 have.
         "collectives.py --ranks 2 --sizes '32 MiB' --dtypes bfloat16 float16 --seconds 0.3 "
         "--rounds 1 --entries 'hvdlite numpy' 'hvdlite torch' gloo MPI"],
        call_name, 1,
    ),
    "import": Part(["start.py --import-only --rounds 5"], entry_name, 0.5),
    "links": Part(
        ["compression.py --rounds 1 --seconds 2 --entries alone none fp16 int8 'powersgd(4)' "
         "'DDP, PowerSGD hook'"],
        entry_name, 3,
    ),
    "losses": Part(["compression.py --only training"], loss_name, 0),
}  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """A case, its share of another one, and the largest share that is wanted.

    Without `theirs` the case itself is compared with `most`; `floor` is taken off from both.
    """

    part: str
    ours: str
    theirs: str
    most: float
    floor: str = ""

    @property
    def names(self) -> list[str]:
        """Return the names of what it needs."""
        return [name for name in (self.ours, self.theirs, self.floor) if name]

    def shares(self, figures: Figures) -> Spread:
        """Return the share: of the medians, and the least and the most of the rounds.

        It is not a number where the other case takes no longer than the floor.
        """
        rounds = [*zip(*map(figures.__getitem__, self.names), strict=True)]
        each = [self._share(*values) for values in rounds]
        whole = self._share(*(median(values) for values in zip(*rounds, strict=True)))
        return Spread(min(each), whole, max(each))

    def _share(self, ours: float, theirs: float = 1.0, floor: float = 0.0) -> float:
        return (ours - floor) / (theirs - floor) if theirs > floor else math.nan


def step_goals() -> Iterator[Goal]:
    """Yield the goals of whole steps and of their exposed parts."""
    wanted = {
        "small": (0.55, 0.0),
        "transformer": (0.92, 0.5),
        "wide": (0.65, 0.4),
        "gpt": (0.92, 0.0),
    }
    for network, (whole, exposed) in wanted.items():
        ddp, floor = f"{network}, DDP gloo", f"{network}, floor"
        for entry in ("hvdlite", "hvdlite views"):
            yield Goal("steps", f"{network}, {entry}", ddp, whole)
            if exposed:
                yield Goal("steps", f"{network}, {entry}", ddp, exposed, floor)
    for entry in ("hvdlite tape", "hvdlite Keras"):
        yield Goal("tensorflow", f"gpt, {entry}", "gpt, MWMS", 0.92)


def call_goals() -> Iterator[Goal]:
    """Yield the goals of collectives beside MPI, and of 16 bits beside 32."""
    for ranks, most in ((4, 1.0), (8, 1.1)):
        for size in ("1 MiB", "16 MiB"):
            call = f"allreduce {size}, {ranks} ranks"
            yield Goal("ranks", f"{call}, hvdlite numpy", f"{call}, MPI", most)
    for entry in ("hvdlite numpy", "hvdlite torch"):
        call = "broadcast 64 MiB, 2 ranks"
        yield Goal("large", f"{call}, {entry}", f"{call}, MPI", 0.8)
        for dtype in ("bfloat16", "float16"):
            end = f", 2 ranks, {entry}"
            yield Goal("large", f"allreduce 32 MiB of {dtype}{end}", f"allreduce 64 MiB{end}", 0.55)


def other_goals() -> Iterator[Goal]:
    """Yield the goals of the import, of slow links and of trainings with compressors."""
    yield Goal("import", "import hvdlite.torch after torch", "", 0.06)
    for entry, most in (("powersgd(4)", 1 / 5), ("int8", 1 / 3)):
        yield Goal("links", entry, "none", most)
    yield Goal("links", "powersgd(4)", "DDP, PowerSGD hook", 0.8)
    for training in ("digits", "GPT"):
        for entry in ("fp16", "bf16", "int8", "powersgd(4)", "topk(0.01)", "onebit"):
            yield Goal("losses", f"{training}, {entry}", f"{training}, none", 1.01)


GOALS = [*step_goals(), *call_goals(), *other_goals()]


def measure(part: Part, seconds: float) -> Figures:
    """Run the commands of a part, round by round; return what each round has measured.

    A round begins as long as one that takes as long as the longest before ends within `seconds`.
    """
    figures: Figures = {}
    end, longest = time.monotonic() + seconds, 0.0
    while longest == 0 or time.monotonic() + longest < end:
        start = time.monotonic()
        for record in run(part):
            figures.setdefault(part.name(record), []).extend(values(record))
        longest = max(longest, time.monotonic() - start)
    return figures


def run(part: Part) -> Iterator[Mapping[str, Any]]:
    """Run the commands of a part once, and yield the records that they write."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        for command in part.commands:
            script, *options = shlex.split(command)
            program = [sys.executable, str(HERE / script), *options, "--json", str(file)]
            subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
            yield from json.loads(file.read_text())["records"]


def values(record: Mapping[str, Any]) -> list[float]:
    """Return the seconds of the jobs of a record, or its loss."""
    return [*record["jobs"]] if "jobs" in record else [record["loss"]]


def print_goals(parts: Mapping[str, Figures]) -> None:
    """Print a line for each goal of which everything is measured, and then all figures."""
    rows = []
    for goal in GOALS:
        figures = parts.get(goal.part, {})
        if not all(name in figures for name in goal.names):
            continue
        ours, theirs, floor, *_ = (
            *(shown(goal.part, figures[name]) for name in goal.names),
            "",
            "",
        )
        shares, text, wanted = goal.shares(figures), "", duration(goal.most)
        if goal.theirs:
            text = f"{shares.median:.2f} ({shares.low:.2f} to {shares.high:.2f})"
            wanted = f"{goal.most:.2f}"
            theirs = f"{goal.theirs.rpartition(', ')[2]}: {theirs}"
        met = "met" if shares.median <= goal.most else "missed"
        met = "not decided" if math.isnan(shares.median) else met
        rows.append([goal.ours, ours, theirs, floor, text, wanted, met])
    print(table(["", "it takes", "beside", "floor", "share", "goal", ""], rows))
    print("\nAll figures, of so many jobs each:\n")
    named = [(part, name) for part, figures in parts.items() for name in figures]
    rows = [[name, shown(part, parts[part][name]), str(len(parts[part][name]))]
            for part, name in named]  # fmt: skip
    print(table(["", "median", "jobs"], rows))


def shown(part: str, rounds: Sequence[float]) -> str:
    """Return the median of the rounds of a case, and the least and the most of them."""
    return f"{median(rounds):.4f}" if part == "losses" else str(Spread.extremes(rounds))


def read(file: Path) -> dict[str, Figures]:
    """Return the figures of earlier parts by part, of a file that may not be there yet."""
    if not file.exists():
        return {}
    return {each["part"]: each["figures"] for each in json.loads(file.read_text())["records"]}


def main() -> None:
    """Measure the parts, write their figures, and print the table."""
    parser = make_parser("All goals of speed in one table.", "goals")
    timed = [name for name, part in PARTS.items() if part.share]
    add = parser.add_argument
    add("--part", nargs="*", choices=PARTS, default=timed, metavar="PART", help=", ".join(PARTS))
    add("--minutes", type=float, default=12, help="of all parts together, which divide them")
    args = parser.parse_args()
    shares = {name: PARTS[name].share or 1 for name in args.part}
    for name, share in shares.items():
        start = time.monotonic()
        figures = measure(PARTS[name], 60 * args.minutes * share / sum(shares.values()))
        say(f"{name}: {time.monotonic() - start:.0f} s")
        parts = {**read(args.json), name: figures}
        write(args.json, [{"part": each, "figures": found} for each, found in parts.items()])
    print_goals(read(args.json))


if __name__ == "__main__":
    main()
