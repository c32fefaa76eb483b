"""Tensors that some ranks do not submit: rank 0 asks who waits for what, and says it.

The decisions are those of `decisions/stall_inspector`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hvdlite.common.base.errors import StalledError
from hvdlite.common.base.report_failure import LONGEST_TEXT, launcher_pipe, tell_launcher
from hvdlite.common.base.user_frames import main_thread_stack
from hvdlite.common.connections.loop import LATE_SECONDS
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.decisions.crossed import CROSSED_SECONDS
from hvdlite.common.decisions.stall_inspector import FIRST_SECONDS, DeadlockDetector, StallInspector
from hvdlite.common.engine.tree_links import TreeLinks
from hvdlite.common.requests.messages import StackQuery, StackReply, WaitQuery, WaitReply
from hvdlite.common.settings.config import Config

log = logging.getLogger("hvdlite")


class StallWatch:
    """One rank's part in it. `pass_on` sends what the aggregator has released."""

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
