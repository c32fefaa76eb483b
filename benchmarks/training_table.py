"""The table of training steps: each library beside another one, and beside no communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from measuring import Spread, table


def print_training(
    records: Sequence[Mapping[str, Any]],
    entries: Sequence[str],
    alone: str,
    theirs: str,
    *ours: str,
) -> None:
    """Print a line for each network and number of ranks.

    `alone` is the entry without communication; those of `ours` are compared with `theirs`.
    """
    lines: dict[tuple[str, int], dict[str, Spread]] = {}
    for record in sorted(records, key=lambda each: each["ranks"]):
        line = lines.setdefault((record["network"], record["ranks"]), {})
        line[record["entry"]] = Spread(**record["seconds"])
    ours = tuple(entry for entry in ours if entry in entries)
    rows = []
    for (network, ranks), line in lines.items():
        figures = [str(line[entry]) for entry in entries]
        share = f"{1 - quotient(line, alone, theirs):.0%}" if {alone, theirs} <= line.keys() else ""
        ratios = [
            f"{quotient(line, entry, theirs):.2f}" if {entry, theirs} <= line.keys() else ""
            for entry in ours
        ]
        rows.append([network, str(ranks), *figures, share, *ratios])
    head = [f"communication of {theirs.partition(' ')[0]}"]
    head += [f"{entry} / {theirs.partition(' ')[0]}" for entry in ours]
    print()
    print(table(["network", "ranks", *entries, *head], rows))


def quotient(line: Mapping[str, Spread], entry: str, other: str) -> float:
    """Return the time of a step relative to another's."""
    return line[entry].median / line[other].median
