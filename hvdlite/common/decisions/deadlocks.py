"""Ranks that wait for each other: found by what ranks have submitted, and what their threads do.

Rank 0 sees a tensor that ranks miss which have submitted others. That is usual: they submit it
later. So it asks them. A rank answers for which tensors its threads wait, or that one of them still
works. While nothing was submitted or ordered between question and answers, a rank whose threads all
wait goes on only when one of these tensors is complete; a tensor is never complete that misses a
rank which does not go on. Ranks that keep each other from going on in this way will wait for ever.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hvdlite.common.decisions.stall_inspector import Waiting, ranks_text
from hvdlite.common.plain.messages import WaitQuery, WaitReply

FIRST_SECONDS = 1.0  # How long a tensor is incomplete before rank 0 asks; doubled each time.
LONGEST_SECONDS = 60.0
MOST_RANKS = 4  # That a report names, with two lines each.


class DeadlockDetector:
    """The questions of rank 0, and what follows from the answers."""

    def __init__(self) -> None:
        self._interval = FIRST_SECONDS
        self._not_before = 0.0
        self._oldest: float | None = None  # Since when the oldest tensor waited at the last check.
        self._number = 0  # Of the last question: an answer to an earlier one does not count.
        self._replies: dict[int, WaitReply] = {}
        self._asked: frozenset[int] = frozenset()  # Empty where no answer would count.
        self._told: frozenset[int] = frozenset()  # The ranks of the last report.

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
        if not stuck or stuck == self._told:
            return None
        self._told = frozenset(stuck)
        return self._text(self._told, missing_of)

    def _text(self, stuck: frozenset[int], missing_of: Mapping[str, Collection[int]]) -> str:
        shown = sorted(stuck)[:MOST_RANKS]
        lines = [
            f"{len(stuck)} ranks wait for each other, and none of them will ever go on. "
            "Let all ranks make these calls in one order."
        ]
        for rank in shown:
            name, place = self._replies[rank].names[0], self._replies[rank].places[0]
            others = ranks_text(sorted(stuck.intersection(missing_of[name])))
            lines.append(f"  rank {rank} waits for '{name}', not yet submitted by {others}:")
            lines.append(f"    {place}")
        if len(stuck) > len(shown):
            lines.append(f"  and {len(stuck) - len(shown)} more ranks.")
        return "\n".join(lines)


def _never_complete(
    tensors: Iterable[Waiting], stuck: Collection[int]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that are missing, by the names of all that needs ranks which are stuck.

    Names stand for tensors in several process sets: where one of them may come, none is returned.
    """
    never = {tensor.name: tensor.missing for tensor in tensors if tensor.needs(stuck)}
    may_come = {tensor.name for tensor in tensors if not tensor.needs(stuck)}
    return {name: missing for name, missing in never.items() if name not in may_come}
