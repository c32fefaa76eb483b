"""Tensors that some ranks have and others never send. Decides, and says it in words.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MOST_NAMES = 6  # in one line of a report
SECONDS_BETWEEN_REPORTS = 1.0  # at least
NEVER = float("inf")


class Waiting(NamedTuple):
    """A tensor that is not complete, or a join that waits for other ranks."""

    name: str
    missing: tuple[int, ...]  # global ranks
    since: float  # seconds, on the caller's clock
    joined: tuple[int, ...] = ()  # a join: the global ranks that wait in it


class StallReport(NamedTuple):
    """What to tell the user, whom to ask for a stack, and whether to end the job."""

    text: str
    missing: tuple[int, ...]
    shutdown: bool


class StallInspector:
    """Warns once per warning time, at most once a second; a time of 0 means never."""

    def __init__(self, warning_seconds: float, shutdown_seconds: float) -> None:
        self.warning_seconds = warning_seconds or NEVER
        self.shutdown_seconds = shutdown_seconds or NEVER
        self._interval = max(self.warning_seconds, SECONDS_BETWEEN_REPORTS)
        self._last_report: float | None = None

    def next_check(self, oldest: float) -> float:
        """When to look next, if `oldest` is the time since which some tensor waits."""
        due = oldest + self.warning_seconds
        if self._last_report is not None:
            due = max(due, self._last_report + self._interval)
        return min(due, oldest + self.shutdown_seconds)

    def inspect(self, waiting: Iterable[Waiting], now: float) -> StallReport | None:
        """The report that is due at `now`, or None."""
        late = [each for each in waiting if now >= each.since + self.patience]
        if not late:
            return None
        dead = any(now >= each.since + self.shutdown_seconds for each in late)
        recent = self._last_report is not None and now < self._last_report + self._interval
        if recent and not dead:
            return None
        self._last_report = now
        missing = tuple(sorted({rank for each in late for rank in each.missing}))
        return StallReport(self._text(late, missing, now, dead), missing, dead)

    @property
    def patience(self) -> float:
        """How long a tensor may wait, in seconds, before anything is said or done."""
        return min(self.warning_seconds, self.shutdown_seconds)

    def _text(
        self, late: list[Waiting], missing: tuple[int, ...], now: float, shutdown: bool
    ) -> str:
        longest = now - min(each.since for each in late)
        tensors = [each for each in late if not each.joined]
        what = "ranks wait in join for others that do nothing"
        if tensors:
            count = _count(len(tensors), "tensor")
            what = f"{count} submitted by some ranks and not by others"
        lines = [
            f"stalled: {what} for up to {longest:.0f} s. "
            "A rank may have taken another branch, or failed.",
        ]
        for rank in missing:
            names = [each.name for each in tensors if rank in each.missing]
            if names:
                lines.append(f"  rank {rank} has not submitted: {_shown(names)}")
        for each in late:
            if each.joined:
                lines.append(f"  {_ranks(each.joined, 'wait')} in join for {_ranks(each.missing)}")
        if shutdown:
            lines.append(f"  the limit of {self.shutdown_seconds:g} s is over: the job ends")
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s were" if number != 1 else " was")


def _ranks(ranks: tuple[int, ...], verb: str = "") -> str:
    if verb and len(ranks) == 1:
        verb += "s"
    shown = _shown([str(rank) for rank in ranks])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} {verb}".rstrip()


def _shown(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
