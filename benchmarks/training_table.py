"""The table of training steps: each library beside another one, and beside no exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from measuring import Spread, table


def print_training(
    records: Sequence[Mapping[str, Any]],
    entries: Sequence[str],
    floor: str,
    theirs: str,
    *ours: str,
) -> None:
    """Print a line for each network and number of ranks.

    `floor` is the entry without exchange; those of `ours` are compared with `theirs`, as whole
    steps and by what of them is exposed: the step minus the floor.
    """
    lines: dict[tuple[str, int], dict[str, Spread]] = {}
    for record in sorted(records, key=lambda each: each["ranks"]):
        line = lines.setdefault((record["network"], record["ranks"]), {})
        line[record["entry"]] = Spread(**record["seconds"])
    ours = tuple(entry for entry in ours if entry in entries)
    rows = []
    for (network, ranks), line in lines.items():
        figures = [str(line[entry]) if entry in line else "" for entry in entries]
        ratios = []
        for entry in ours:
            ratios.append(quotient(line, entry, theirs))
            ratios.append(quotient(line, entry, theirs, floor))
        rows.append([network, str(ranks), *figures, *ratios])
    them = theirs.partition(" ")[0]
    head = [text for entry in ours for text in (f"{entry} / {them}", "exposed / exposed")]
    print()
    print(table(["network", "ranks", *entries, *head], rows))


def quotient(line: Mapping[str, Spread], entry: str, other: str, floor: str | None = None) -> str:
    """Return the time of a step relative to another's, both without the floor if it is given.

    It is empty where an entry was left out, or where the other is within 2 % of the floor.
    """
    if not {entry, other, floor or entry} <= line.keys():
        return ""
    least = line[floor].median if floor else 0.0
    theirs = line[other].median - least
    return f"{(line[entry].median - least) / theirs:.2f}" if theirs > 0.02 * least else ""
