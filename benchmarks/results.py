"""Measure collectives in one sitting, and write the tables into RESULTS.md.

    python benchmarks/results.py                     # 12 minutes: measure, write the page
    python benchmarks/results.py --list              # show the commands and what they are for
    python benchmarks/results.py --only allreduce    # one of them
    python benchmarks/results.py --tables-only       # from the files of an earlier sitting

Nothing else should compute on the machine meanwhile. Each part of the page lies between two
comments that name it; above its tables stand the command, the date and the machine. The figures of
the main part are drawn, too, where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives import tables_text
from measuring import say

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
PICTURE = HERE.parent / "docs" / "images" / "allreduce.png"
DRAWN = "allreduce"


@dataclass(frozen=True)
class Part:
    """A part of the page: its name, and the options of collectives.py that measure it."""

    name: str
    options: Sequence[str]


HVDLITE = ("hvdlite numpy", "hvdlite torch")
OTHERS = ("allgather", "reducescatter", "broadcast", "alltoall")
PARTS = (
    Part(DRAWN, ("--entries", *HVDLITE, "gloo", "MPI", "copy", "--seconds", "0.1")),
    Part(
        "short calls",
        ("--collectives", "allreduce", "barrier", "--sizes", "4 B", "4 KiB", "64 KiB", "1 MiB",
         "--entries", *HVDLITE, "gloo", "--seconds", "0.1"),
    ),
    Part(
        "16-bit allreduce",
        ("--ranks", "2", "--dtypes", "bfloat16", "float16", "--entries", *HVDLITE, "gloo",
         "--sizes", "4 B", "1 MiB", "64 MiB", "ResNet-50", "--seconds", "0.1"),
    ),
    Part(
        "other collectives",
        ("--ranks", "2", "4", "--collectives", *OTHERS, "--sizes", "4 B", "64 KiB", "1 MiB",
         "64 MiB", "--entries", *HVDLITE, "gloo", "MPI", "--seconds", "0.1", "--rounds", "3"),
    ),
)  # fmt: skip


def command_text(options: Sequence[str]) -> str:
    """Return the command as a reader would type it."""
    return shlex.join(["python", "benchmarks/collectives.py", *options])


def measure(part: Part, file: Path, more: Sequence[str]) -> None:
    """Run the command of a part, which writes its figures to `file`."""
    command = [sys.executable, str(HERE / "collectives.py"), *part.options, *more]
    start = time.monotonic()
    subprocess.run([*command, "--json", str(file)], check=True)
    say(f"{part.name}: {time.monotonic() - start:.0f} s")


def body(result: dict[str, Any]) -> str:
    """Return the text of a part from the JSON that collectives.py has written."""
    *options, _, _ = result["command"][1:]  # without --json FILE
    machine = dict(result["machine"])
    place = ", ".join([f"{machine.pop('cores')} cores", machine.pop("machine")])
    date, system = machine.pop("date"), machine.pop("system")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items())
    rounds = len(result["records"][0]["jobs"])
    return (
        f"`{command_text(options)}`, {date}, on {place}, {system}, {versions}. Medians of {rounds} "
        f"jobs of each library (the least and the most of them).\n{tables_text(result['records'])}"
    )


def put(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the comments of the part `name`.

    Raises `ValueError` where the page lacks one of them.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    place = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    changed, found = place.subn(lambda _: f"{begin}\n{text}\n{end}", page)
    if found != 1:
        raise ValueError(f"the page must have {begin} and {end} once, and has them {found} times")
    return changed


def draw(file: Path) -> None:
    """Draw the picture of the documentation."""
    if not importlib.util.find_spec("matplotlib"):
        say("left out: the picture (there is no matplotlib)")
        return
    command = [sys.executable, str(HERE / "plot.py"), str(file), "-o", str(PICTURE)]
    subprocess.run(command, check=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure and write the tables of collectives.")
    names = [part.name for part in PARTS]
    add = parser.add_argument
    add("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    add("--folder", type=Path, default=Path(), help="of the files with all figures")
    add("--page", type=Path, default=PAGE, help="to write the tables to")
    add("--tables-only", action="store_true", help="from files that are there")
    add("--list", action="store_true", help="show the commands, and do nothing")
    add("more", nargs="*", help="options of collectives.py for all parts, after --")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    for part in PARTS:
        if part.name not in args.only:
            continue
        if args.list:
            print(f"{part.name}: {command_text(part.options)}")
            continue
        file = args.folder / f"{part.name.replace(' ', '_')}.json"
        if not args.tables_only:
            measure(part, file, args.more)
        text = body(json.loads(file.read_text()))
        args.page.write_text(put(args.page.read_text(), part.name, text))
        if part.name == DRAWN and args.page == PAGE:
            draw(file)


if __name__ == "__main__":
    main()
