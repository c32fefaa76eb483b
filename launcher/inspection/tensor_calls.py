"""The last calls of one tensor, from what each rank remembers of it: pure.

The ranks give times on the clock of rank 0. The exchange of a call ends on all ranks before that of
the next one begins on any, so that those belong together whose ends are nearest.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

Answer = dict[str, Any]
LONGEST_GAP = 1.0  # Between the ends of one call, where there is no other to compare with.


class Run(NamedTuple):
    """One exchange on one rank, in seconds of the clock of rank 0; see `Counts.history`."""

    ready: float
    start: float
    end: float
    bytes: int
    tensors: int


def merge(wanted: str, found: dict[int, Answer], at: float) -> Answer:
    """Return what is known of a tensor, by the answer of each rank; `at` is the time of the day.

    ``{name, others, ranks, calls: [{ago, seconds, bytes, tensors, last, waited, waiting}]}``, the
    newest call first: how long before the newest one it ended, how long the exchange took, the rank
    that was ready last, how long the first one waited for it, and which that was. Besides there are
    ``{asked: [rank], waits: [[rank, seconds]]}``: the ranks that have answered, and those of them
    that have submitted the tensor so long ago and have no result yet.
    """
    told = {rank: answer for rank, answer in found.items() if "error" not in answer}
    waits = [
        [rank, float(answer["waits"])]
        for rank, answer in told.items()
        if isinstance(answer.get("waits"), (int, float))
    ]
    facts = {"asked": sorted(told), "waits": waits, "at": at}
    runs = {rank: _runs(answer) for rank, answer in found.items()}
    runs = {rank: each for rank, each in runs.items() if each}
    if not runs and waits:
        name = str(found[int(waits[0][0])].get("name"))
        return {"name": name, "others": [], "ranks": len(told), "calls": [], **facts}
    if not runs:
        others = [answer.get("others") or [] for answer in found.values()]
        errors = [answer["error"] for answer in found.values() if "error" in answer]
        names = list(dict.fromkeys(str(name) for each in others for name in each))
        if len(errors) == len(found):
            why = f"no rank can tell: {errors[0]}" if errors else "no rank has been heard of"
            return {"error": why}
        found_none = {"name": "", "wanted": wanted, "others": names, "ranks": 0, "calls": []}
        return found_none | facts
    base = max(runs.values(), key=len)
    gaps = [later.end - earlier.end for earlier, later in pairwise(base)]
    reach = min([LONGEST_GAP, *(gap / 2 for gap in gaps)])
    calls = [_call(run, runs, reach, base[-1].end) for run in reversed(base)]
    name = next(str(answer["name"]) for answer in found.values() if answer.get("name"))
    return {"name": name, "others": [], "ranks": len(runs), "calls": calls, **facts}


def _runs(answer: Answer) -> list[Run]:
    try:
        return sorted((Run(*map(float, run)) for run in answer["runs"]), key=lambda run: run.end)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return []


def _call(base: Run, runs: dict[int, list[Run]], reach: float, newest: float) -> Answer:
    same = {}
    for rank, each in runs.items():
        nearest = min(each, key=lambda run: abs(run.end - base.end))
        if abs(nearest.end - base.end) <= reach:
            same[rank] = nearest
    last = max(same, key=lambda rank: same[rank].ready)
    first = min(same, key=lambda rank: same[rank].ready)
    return {
        "ago": newest - base.end,
        "seconds": max(run.end - run.start for run in same.values()),
        "bytes": int(base.bytes),
        "tensors": int(base.tensors),
        "last": last,
        "waiting": first,
        "waited": same[last].ready - same[first].ready,
    }
