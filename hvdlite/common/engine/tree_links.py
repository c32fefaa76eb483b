"""What a rank sends up and down the control tree, and the messages that only pass along it.

These are the questions for the clock of rank 0, the orders of the launcher for a rank, and what
rank 0 asks of tensors that some ranks do not submit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from hvdlite.common.base.errors import StalledError
from hvdlite.common.base.report_failure import LONGEST_TEXT, launcher_pipe, tell_launcher
from hvdlite.common.base.user_frames import main_thread_stack
from hvdlite.common.connections.loop import LATE_SECONDS
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.decisions.crossed_programs import CROSSED_SECONDS
from hvdlite.common.decisions.stall_inspector import FIRST_SECONDS, DeadlockDetector, StallInspector
from hvdlite.common.requests.messages import (
    EVERY_RANK,
    ClockQuery,
    ClockReply,
    LauncherOrder,
    Message,
    Orders,
    StackQuery,
    StackReply,
    WaitQuery,
    WaitReply,
    encode,
)
from hvdlite.common.settings.config import Config
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


class StallWatch:
    """Tensors that some ranks do not submit: rank 0 asks who waits for what, and says it.

    The decisions are those of `decisions/stall_inspector`. `pass_on` sends what the aggregator has
    released.
    """

    def __init__(
        self,
        config: Config,
        links: TreeLinks,
        coordinator: Coordinator | None,
        aggregator: Aggregator | None,
        pass_on: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        # The number of the question of rank 0 for which tensors this rank waits; 0 once `answer`ed.
        self.asked = 0
        self._links, self._coordinator, self._aggregator = links, coordinator, aggregator
        self._pass_on, self._clock = pass_on, clock
        self._stood_still = 0.0  # For how long in all.
        self.wakes_at: float | None = None  # When the engine means to wake at the latest.
        self._stalls = StallInspector(config.stall_warning_seconds, config.stall_shutdown_seconds)
        self._deadlocks = DeadlockDetector(config.stall_shutdown_seconds)
        self.disturb = self._deadlocks.disturb  # To be called when something goes on.
        self._stacks: dict[int, str] = {}  # What rank 0 has shown of each rank's main thread.
        self._watches = not config.stall_check_disable and (
            config.stall_warning_seconds > 0 or config.stall_shutdown_seconds > 0
        )

    def next_inspection(self) -> float | None:
        """Return when to call `inspect` next; None while nothing waits."""
        counter = self._coordinator or self._aggregator
        oldest = None if counter is None else counter.oldest
        if oldest is None or not self._watches:
            return None
        if self._coordinator is not None:
            return min(self._stalls.next_check(oldest), self._deadlocks.next_check(oldest))
        return oldest + self._hold_seconds

    def now(self) -> float:
        """Return the time by which tensors wait: not while a suspended job stands still."""
        return self._clock() - self._stood_still

    def timeout(self) -> float | None:
        """Return how long the engine may sleep until something is to be inspected."""
        due, now = self.next_inspection(), self.now()
        self.wakes_at = None if due is None else max(due, now)
        return None if self.wakes_at is None else self.wakes_at - now

    @property
    def _hold_seconds(self) -> float:
        """The seconds that a leader holds incomplete tensors: rank 0 must hear before it warns."""
        return min(self._stalls.report_seconds / 2, FIRST_SECONDS)

    def inspect(self) -> None:
        """Warn of tensors that some ranks do not submit, or ask what they wait for, if it is time.

        Raises `HorovodInternalError` after the shutdown time, which fails the job.
        """
        due, now = self.next_inspection(), self.now()
        if due is None or now < due:
            return
        if self.wakes_at is not None and now - self.wakes_at > LATE_SECONDS:
            self._stood_still += now - self.wakes_at
            return  # Others may have to go on first.
        if self._aggregator is not None:
            rank = self._links.rank
            log.debug("rank %d: passes on tensors that some ranks do not submit", rank)
            self._aggregator.flush(now - self._hold_seconds)
            self._pass_on()
        if self._coordinator is None:
            return
        self._coordinator.fail_crossed(now - CROSSED_SECONDS)
        self._pass_on()
        oldest = self._coordinator.oldest
        if oldest is None:  # All have failed.
            return
        waiting = list(self._coordinator.waiting())
        query = self._deadlocks.ask(waiting, oldest, now)
        if query is not None:
            self.on_wait_query(query)
        report = self._stalls.inspect(waiting, now, self._deadlocks.deadlock(waiting))
        if report is None:
            return
        log.warning(report.text)
        _tell_launcher(report.text)
        if report.shutdown:
            raise StalledError(report.text, report.missing)
        self.on_stack_query(StackQuery(report.missing))

    def answer(self, waits: Sequence[tuple[str, str, int]]) -> None:
        """Tell rank 0 for which tensors threads of this rank wait, and where.

        `waits` is what `PendingTable.waits` returns.

        All that they had submitted before must be reported, and all orders be obeyed.
        """
        number, self.asked = self.asked, 0
        columns = zip(*waits, strict=True) if waits else ((), (), ())
        self.on_wait_reply(WaitReply(number, self._links.rank, *columns))

    # -- messages

    def on_stack_query(self, message: StackQuery) -> None:
        self._links.send_down(message)
        if self._links.rank in message.ranks:
            self.on_stack_reply(StackReply(self._links.rank, main_thread_stack()))

    def on_stack_reply(self, message: StackReply) -> None:
        if self._links.tree.is_root:
            stack = message.stack.rstrip()
            shown = " where it was" if stack == self._stacks.get(message.rank) else f"\n{stack}"
            self._stacks[message.rank] = stack
            log.warning("main thread of rank %d:%s", message.rank, shown)
        else:
            self._links.send_up(message)

    def on_wait_query(self, message: WaitQuery) -> None:
        self._links.send_down(message)
        self.asked = message.number if self._links.rank in message.ranks else 0

    def on_wait_reply(self, message: WaitReply) -> None:
        if self._aggregator is not None:  # What it holds was submitted before.
            self._aggregator.flush(self.now())
            self._pass_on()
        if self._coordinator is None:
            self._links.send_up(message)
            return
        text = self._deadlocks.receive(message, self._coordinator.waiting())
        if text is not None:
            log.warning(text)
            first, *ranks = text.splitlines()
            _tell_launcher("\n".join([first.partition(". ")[0] + ":", *ranks]))


def _tell_launcher(text: str) -> None:
    if launcher_pipe() is not None:
        tell_launcher("stall", " ".join(text.split())[:LONGEST_TEXT])
