"""What a rank sends up and down the control tree, and the messages that only pass along it.

These are the questions for the clock of rank 0, and the orders of the launcher for a rank.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.requests.messages import (
    EVERY_RANK,
    ClockQuery,
    ClockReply,
    LauncherOrder,
    Message,
    Orders,
    encode,
)
from hvdlite.common.timeline.recorder import Timeline
from hvdlite.common.transport.base import Transport

log = logging.getLogger("hvdlite")


class TreeLinks:
    """The connections of this rank with its parent and its children in the control tree."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.tree = Tree(transport.topology, transport.rank)
        self.departed: set[int] = set()  # Ranks that have shut down.
        self._transport = transport

    def send_up(self, message: Message) -> None:
        self._transport.send(self.tree.parent, encode(message))

    def send_down(self, message: Message) -> None:
        children = self.tree.children
        if not isinstance(message, Orders):  # A rank must still receive its own Departed.
            # The engine of a child that has departed serves those below it that have not.
            children = tuple(
                child
                for child in children
                if child not in self.departed or not self.tree.subtree_of(child) <= self.departed
            )
        body = encode(message) if children else b""
        for child in children:
            self._transport.send(child, body)


class ClockOffset:
    """How far the monotonic clock of rank 0 is ahead, in `seconds`; 0 until it has answered.

    The answer is the midpoint estimate of Cristian ("Probabilistic clock synchronization", 1989):
    the reply was sent in the middle between question and answer, on average. All processes of a
    host share one monotonic clock: `same` says that rank 0 is on this one.
    """

    def __init__(
        self, links: TreeLinks, timeline: Timeline, clock: Callable[[], float], *, same: bool
    ) -> None:
        self.seconds = 0.0
        self._links, self._timeline, self._clock, self._same = links, timeline, clock, same

    def ask(self) -> None:
        if self._same:
            self._set(0.0)
        else:
            self._links.send_up(ClockQuery(self._links.rank, self._now_ns()))

    def on_query(self, message: ClockQuery) -> None:
        if self._links.tree.is_root:
            self._links.send_down(ClockReply(message.rank, message.time_ns, self._now_ns()))
        else:
            self._links.send_up(message)

    def on_reply(self, message: ClockReply) -> None:
        if message.rank != self._links.rank:
            self._links.send_down(message)
            return
        middle_ns = (message.asked_ns + self._now_ns()) // 2
        self._set((message.answered_ns - middle_ns) / 1e9)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _set(self, seconds: float) -> None:
        log.debug("rank %d: the clock of rank 0 is ahead by %.6f s", self._links.rank, seconds)
        self.seconds = seconds
        self._timeline.set_clock_offset(seconds)


class LauncherOrders:
    """The orders of the launcher, which one rank of a host gets for all ranks of the job."""

    def __init__(self, links: TreeLinks) -> None:
        self._links = links
        self._early: deque[str] = deque()  # Those for this rank that came before `take`.
        self._take: Callable[[str], None] | None = None

    def take(self, take: Callable[[str], None]) -> None:
        """Let ``take(line)`` have the orders for this rank, from any thread."""
        self._take = take
        self._hand_over()

    def _hand_over(self) -> None:
        # Either this thread finds an order that came meanwhile, or the other one finds `take`.
        while self._take is not None and self._early:
            with suppress(IndexError):
                self._take(self._early.popleft())

    def on_order(self, message: LauncherOrder) -> None:
        if not (self._links.tree.is_root or message.descends):
            self._links.send_up(message)
            return
        self._links.send_down(message._replace(descends=1))
        if message.rank in (self._links.rank, EVERY_RANK):
            self._early.append(message.line)
            self._hand_over()
