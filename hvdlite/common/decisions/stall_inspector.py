"""The stall inspector: finds tensors that some ranks submit and others do not, and words a report.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

MOST_NAMES = 6  # Names in one line of a report; the rest is counted.
SECONDS_BETWEEN_REPORTS = 1.0  # The least time between two reports.
NEVER = float("inf")


class Waiting(NamedTuple):
    """A tensor that is not complete, or a join that waits for other ranks."""

    name: str
    missing: tuple[int, ...]  # The global ranks that have not submitted it.
    since: float  # In seconds, on the caller's clock.
    joined: tuple[int, ...] = ()  # Of a join: the global ranks that wait in it.
    one_is_enough: bool = False  # Whether it is complete as soon as any one of `missing` submits.

    def needs(self, ranks: Collection[int]) -> bool:
        """Return whether it is incomplete for as long as these ranks submit nothing."""
        lacking = [rank in ranks for rank in self.missing]
        return all(lacking) if self.one_is_enough else any(lacking)


class StallReport(NamedTuple):
    """A warning for the user."""

    text: str
    missing: tuple[int, ...]  # The ranks that are asked for the stack of their main thread.
    shutdown: bool  # Whether the shutdown time is over, which fails the job.


class StallInspector:
    """Warns once per warning time, at most once a second; a time of 0 means never."""

    def __init__(self, warning_seconds: float, shutdown_seconds: float) -> None:
        self.warning_seconds = warning_seconds or NEVER
        self.shutdown_seconds = shutdown_seconds or NEVER
        self._interval = max(self.warning_seconds, SECONDS_BETWEEN_REPORTS)
        # When `inspect` returned a report last; None before the first one.
        self._last_report: float | None = None

    def next_check(self, oldest: float) -> float:
        """Return when to call `inspect` next, if `oldest` is since when the oldest tensor waits."""
        due = oldest + self.warning_seconds
        if self._last_report is not None:
            due = max(due, self._last_report + self._interval)
        return min(due, oldest + self.shutdown_seconds)

    def inspect(self, waiting: Iterable[Waiting], now: float) -> StallReport | None:
        """Return the report that is due at `now`, or None."""
        late = [item for item in waiting if now >= item.since + self.report_seconds]
        if not late:
            return None
        shutdown = any(now >= item.since + self.shutdown_seconds for item in late)
        recent = self._last_report is not None and now < self._last_report + self._interval
        if recent and not shutdown:
            return None
        self._last_report = now
        missing = tuple(sorted({rank for item in late for rank in item.missing}))
        return StallReport(self._text(late, missing, now, shutdown), missing, shutdown)

    @property
    def report_seconds(self) -> float:
        """The seconds that a tensor may wait before it is reported."""
        return min(self.warning_seconds, self.shutdown_seconds)

    def _text(
        self, late: list[Waiting], missing: tuple[int, ...], now: float, shutdown: bool
    ) -> str:
        longest = now - min(item.since for item in late)
        tensors = [item for item in late if not item.joined]
        subject = "ranks wait in join for others that do nothing"
        if tensors:
            count = _count(len(tensors), "tensor")
            subject = f"{count} submitted by some ranks and not by others"
        lines = [
            f"stalled for up to {longest:.0f} s: {subject}. "
            "A rank may have taken another branch, or failed.",
        ]
        for rank in missing:
            names = [item.name for item in tensors if rank in item.missing]
            if names:
                lines.append(f"  Rank {rank} has not submitted: {_shown(names)}.")
        for join in late:
            if join.joined:
                waiting = ranks_text(join.joined, "wait").capitalize()
                lines.append(f"  {waiting} in join for {ranks_text(join.missing)}.")
        if shutdown:
            lines.append(
                f"  The limit of {self.shutdown_seconds:g} s is over: the job ends, "
                "or goes on without late ranks if it is elastic."
            )
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s were" if number != 1 else " was")


def ranks_text(ranks: Sequence[int], verb: str = "") -> str:
    """Return "rank 1" or "ranks 1, 2", and so on, with a verb that is given for several."""
    if verb and len(ranks) == 1:
        verb += "s"
    shown = _shown([str(rank) for rank in ranks])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} {verb}".rstrip()


def _shown(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
