"""The stall inspector: finds tensors that some ranks submit and others do not, and words a report.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvdlite.common.requests.messages import WaitQuery, WaitReply

MOST_NAMES = 6  # Names in one line of a report; the rest is counted.
SECONDS_BETWEEN_REPORTS = 1.0  # The least time between two reports.
SECONDS_BETWEEN_SAME_REPORTS = 600.0  # Until here, each report of the same doubles the time.
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


class Deadlock(NamedTuple):
    """Ranks that wait for each other, and where each of some of them is."""

    ranks: frozenset[int]
    names: frozenset[str]  # Of the tensors that they wait for.
    sentence: str
    lines: tuple[str, ...]


class StallReport(NamedTuple):
    """A warning for the user."""

    text: str
    missing: tuple[int, ...]  # The ranks that are asked for the stack of their main thread.
    shutdown: bool  # Whether the shutdown time is over, which fails the job.


class StallInspector:
    """Warns once per warning time, at most once a second; a time of 0 means never.

    While the same tensors miss the same ranks, each warning comes after twice the time of the last.
    """

    def __init__(self, warning_seconds: float, shutdown_seconds: float) -> None:
        self.warning_seconds = warning_seconds or NEVER
        self.shutdown_seconds = shutdown_seconds or NEVER
        self._shortest = max(self.warning_seconds, SECONDS_BETWEEN_REPORTS)
        self._not_before = -NEVER  # When `inspect` looks at the tensors again.
        # What the last report told, and when it is told again.
        self._told: list[tuple[str, tuple[int, ...]]] = []
        self._interval, self._again = self._shortest, -NEVER

    def next_check(self, oldest: float) -> float:
        """Return when to call `inspect` next, if `oldest` is since when the oldest tensor waits."""
        due = max(oldest + self.warning_seconds, self._not_before)
        return min(due, oldest + self.shutdown_seconds)

    def inspect(
        self, waiting: Iterable[Waiting], now: float, deadlock: Deadlock | None = None
    ) -> StallReport | None:
        """Return the report that is due at `now`, or None; it repeats a known `deadlock`."""
        late = [item for item in waiting if now >= item.since + self.report_seconds]
        if not late:
            return None
        shutdown = any(now >= item.since + self.shutdown_seconds for item in late)
        if now < self._not_before and not shutdown:
            return None
        self._not_before = now + self._shortest
        told = [(item.name, item.missing) for item in late]
        if told != self._told:
            self._told, self._interval = told, self._shortest
        elif now < self._again and not shutdown:
            return None
        else:
            longest = max(self._shortest, SECONDS_BETWEEN_SAME_REPORTS)
            self._interval = min(2 * self._interval, longest)
        self._again = now + self._interval
        missing = tuple(sorted({rank for item in late for rank in item.missing}))
        text = self._text(late, missing, now, shutdown, deadlock)
        return StallReport(text, missing, shutdown)

    @property
    def report_seconds(self) -> float:
        """The seconds that a tensor may wait before it is reported."""
        return min(self.warning_seconds, self.shutdown_seconds)

    def _text(
        self,
        late: list[Waiting],
        missing: tuple[int, ...],
        now: float,
        shutdown: bool,
        deadlock: Deadlock | None,
    ) -> str:
        longest = now - min(item.since for item in late)
        tensors = [item for item in late if not item.joined]
        subject = "ranks wait in join for others that do nothing"
        if tensors:
            count = f"{len(tensors)} tensors were" if len(tensors) != 1 else "1 tensor was"
            subject = f"{count} submitted by some ranks and not by others"
        why = f"{subject}. A rank may have taken another branch, or failed."
        lines = [
            f"stalled for up to {longest:.0f} s: {why if deadlock is None else deadlock.sentence}"
        ]
        if deadlock is not None:
            lines += deadlock.lines
            missing = tuple(rank for rank in missing if rank not in deadlock.ranks)
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


# -- ranks that wait for each other: found by what they have submitted, and what their threads do

# Rank 0 sees a tensor that ranks miss which have submitted others. That is usual: they submit it
# later. So it asks them. A rank answers for which tensors its threads wait, or that one of them
# still works. While nothing was submitted or ordered between question and answers, a rank whose
# threads all wait goes on only when one of these tensors is complete; a tensor is never complete
# that misses a rank which does not go on. Ranks that keep each other from going on in this way will
# wait for ever.


FIRST_SECONDS = 1.0  # How long a tensor is incomplete before rank 0 asks; doubled each time.
LONGEST_SECONDS = 60.0
MOST_RANKS = 4  # That a report names, with two lines each.


class DeadlockDetector:
    """The questions of rank 0, and what follows from the answers."""

    def __init__(self, shutdown_seconds: float = 0.0) -> None:
        """`shutdown_seconds` is the time after which the stall inspector ends the job; 0: never."""
        self._shutdown_seconds = shutdown_seconds
        self._interval = FIRST_SECONDS
        self._not_before = 0.0
        self._oldest: float | None = None  # Since when the oldest tensor waited at the last check.
        self._number = 0  # Of the last question: an answer to an earlier one does not count.
        self._replies: dict[int, WaitReply] = {}
        self._asked: frozenset[int] = frozenset()  # Empty where no answer would count.
        self._told: Deadlock | None = None  # What the last report told.

    def next_check(self, oldest: float) -> float:
        """Return when to call `ask` next, if `oldest` is since when the oldest tensor waits."""
        due = oldest + FIRST_SECONDS
        return due if oldest != self._oldest else max(due, self._not_before)

    def ask(self, waiting: Iterable[Waiting], oldest: float, now: float) -> WaitQuery | None:
        """Return the question whether ranks wait for each other, where it is time and they could.

        See `next_check` for `oldest`.
        """
        if now < self.next_check(oldest):
            return None
        if oldest != self._oldest:
            self._oldest, self._interval = oldest, FIRST_SECONDS
        self._not_before = now + self._interval
        self._interval = min(2 * self._interval, LONGEST_SECONDS)
        tensors = list(waiting)
        could = {rank for tensor in tensors for rank in tensor.missing}
        asked: set[int] = set()
        while asked != could:
            asked = could  # One of them could wait for any tensor that it has submitted.
            lacking = [tensor.missing for tensor in tensors if tensor.needs(asked)]
            could = {rank for rank in asked if any(rank not in missing for missing in lacking)}
        self._number += 1
        self._asked, self._replies = frozenset(asked), {}
        return WaitQuery(self._number, tuple(sorted(asked))) if asked else None

    def disturb(self) -> None:
        """Take no answer to the last question: something was submitted or ordered after it."""
        self._asked = frozenset()

    def receive(self, reply: WaitReply, waiting: Iterable[Waiting]) -> str | None:
        """Return the report of ranks that wait for each other, once, when the last one answers."""
        if reply.number != self._number or reply.rank not in self._asked:
            return None
        self._replies[reply.rank] = reply
        if self._replies.keys() != self._asked:
            return None
        tensors = list(waiting)
        waits = {rank: each.names for rank, each in self._replies.items() if each.names}
        stuck: set[int] = set()
        while stuck != waits.keys():
            stuck = set(waits)  # One of them goes on when any tensor that it waits for is complete.
            missing_of = _never_complete(tensors, stuck)
            waits = {rank: names for rank, names in waits.items() if missing_of.keys() >= {*names}}
        if not stuck or (self._told is not None and stuck == self._told.ranks):
            return None
        self._told = self._deadlock(frozenset(stuck), missing_of)
        flag, limit = "--stall-check-shutdown-time-seconds", self._shutdown_seconds
        end = f"The job waits until it is ended; {flag} ends such a job by itself."
        if limit:
            end = f"They are ended after {limit:g} s, by {flag}."
        return "\n".join([f"{self._told.sentence} {end}", *self._told.lines])

    def deadlock(self, waiting: Iterable[Waiting]) -> Deadlock | None:
        """Return the ranks of the last report, where all that they waited for is waiting still."""
        if self._told is None or not self._told.names <= {tensor.name for tensor in waiting}:
            return None
        return self._told

    def _deadlock(
        self, stuck: frozenset[int], missing_of: Mapping[str, Collection[int]]
    ) -> Deadlock:
        sentence = (
            f"{len(stuck)} ranks wait for each other, and none of them will ever go on. "
            "Let all ranks make these calls in one order, and none for rank 0 alone."
        )
        if len({self._replies[rank].in_gradients[0] for rank in stuck}) > 1:
            sentence += (
                " Ranks with different numbers of batches need join(): docs/howto/uneven_data.md."
            )
        shown, lines = sorted(stuck)[:MOST_RANKS], []
        for rank in shown:
            name, place = self._replies[rank].names[0], self._replies[rank].places[0]
            others = ranks_text(sorted(stuck.intersection(missing_of[name])))
            lines.append(f"  rank {rank} waits for '{name}', not yet submitted by {others}:")
            lines.append(f"    {place}")
        if len(stuck) > len(shown):
            lines.append(f"  and {len(stuck) - len(shown)} more ranks.")
        names = frozenset(name for rank in stuck for name in self._replies[rank].names)
        return Deadlock(stuck, names, sentence, tuple(lines))


def _never_complete(
    tensors: Iterable[Waiting], stuck: Collection[int]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that are missing, by the names of all that needs ranks which are stuck.

    Names stand for tensors in several process sets: where one of them may come, none is returned.
    """
    never = {tensor.name: tensor.missing for tensor in tensors if tensor.needs(stuck)}
    may_come = {tensor.name for tensor in tensors if not tensor.needs(stuck)}
    return {name: missing for name, missing in never.items() if name not in may_come}
