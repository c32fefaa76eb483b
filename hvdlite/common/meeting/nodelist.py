"""Slurm's shorthand for hosts and for numbers of tasks.

``node[03-05,7],login`` is node03, node04, node05, node7 and login; ``2(x3),1`` is 2, 2, 2 and 1.
This module never reads a variable or a file.
"""

from __future__ import annotations

import itertools
import re

from hvdlite.common.base.errors import ConfigError

PART = r"[^\s,\[\]]|\[[\d,-]+\]"  # a character of a name, or a bracket with numbers
NAME = re.compile(rf"(?:{PART})+")
LIST = re.compile(rf"{NAME.pattern}(?:,{NAME.pattern})*")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
MOST = 1_000_000  # more than any cluster has: a list beyond it is a mistake


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Return the names of the hosts in their order, as many as there are; none for an empty text.

    Raises `ConfigError` that shows `text` where it is no list of hosts.
    """
    if not text:
        return ()
    if not LIST.fullmatch(text):
        raise _not_understood(text, "hosts such as node[03-05,7],login")
    names = []
    for match in NAME.finditer(text):
        pieces = re.split(r"\[([\d,-]+)\]", match[0])  # fixed text at even places, brackets at odd
        choices = [_numbers(piece, text) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        # The last bracket counts fastest.
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return tuple(names)


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of one bracket, as wide as the first of each range is written."""
    numbers = []
    for part in ranges.split(","):
        match = RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first or last - first >= MOST:
            raise _not_understood(text, f"numbers such as 03-05 in place of {part!r}")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the number of tasks of each host, from a variable such as SLURM_TASKS_PER_NODE.

    Raises `ConfigError` that shows `text` where it is no list of numbers.
    """
    counts: list[int] = []
    for part in text.split(",") if text else ():
        match = COUNT.fullmatch(part)
        if match is None or int(match[2] or 1) > MOST:
            raise _not_understood(text, "numbers such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _not_understood(text: str, wanted: str) -> ConfigError:
    return ConfigError(f"Slurm's list {text!r} is not understood: expected {wanted}")
