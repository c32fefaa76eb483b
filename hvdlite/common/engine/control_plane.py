"""The control plane of one rank: reports go up the control tree, orders come down.

The coordinator and the aggregators decide; this module only moves their messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError, StalledError
from hvdlite.common.base.report_failure import (
    LONGEST_TEXT,
    launcher_pipe,
    main_thread_stack,
    tell_launcher,
)
from hvdlite.common.collectives.between_hosts.carried import add_up
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.control_tree import ROOT, Tree
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.decisions.stall_inspector import FIRST_SECONDS, DeadlockDetector, StallInspector
from hvdlite.common.devices.agreement import Ballot
from hvdlite.common.engine.response_memory import ResponseMemory
from hvdlite.common.plain.config import Config
from hvdlite.common.plain.messages import (
    EVERY_RANK,
    Abort,
    Capabilities,
    ClockQuery,
    ClockReply,
    Depart,
    Departed,
    DeviceRuns,
    Figures,
    LauncherOrder,
    Message,
    Order,
    Orders,
    Report,
    Reports,
    Request,
    Retune,
    StackQuery,
    StackReply,
    WaitQuery,
    WaitReply,
    decode,
    encode,
)
from hvdlite.common.plain.process_set_table import ProcessSetTable
from hvdlite.common.timeline.recorder import Timeline
from hvdlite.common.transport.base import Transport

log = logging.getLogger("hvdlite")

BLAME_SECONDS = 1.0  # How long a rank that has lost a peer waits for the reason.


class ControlPlane:
    """One rank's place in the control tree. Owned by the engine thread, as the transport is."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        timeline: Timeline,
        memory: ResponseMemory,
        process_sets: ProcessSetTable,
        clock: Callable[[], float],
    ) -> None:
        # The orders that this rank has yet to execute, in sequence.
        self.orders: deque[Order] = deque()
        # Set by `Engine.abandon`, from any thread: every `receive` raises a copy of it. The
        # traceback of a raised error refers to the engine, which would keep itself alive by it.
        self.abandoned: HorovodInternalError | None = None
        # How far the monotonic clock of rank 0 is ahead; 0 until `ask_clock` is answered.
        self.clock_offset_seconds = 0.0
        self._rank = transport.rank
        self._transport, self._timeline, self._memory = transport, timeline, memory
        self._process_sets, self._clock = process_sets, clock
        self._tree = Tree(transport.topology, transport.rank)
        # Only connections to these ranks are watched: their Departed comes on the same path, and so
        # before the connection closes. A connection to another rank may close first.
        self._neighbours = self._tree.neighbours
        self._departed: set[int] = set()  # Ranks that have shut down.
        self._lost: set[int] = set()  # Ranks whose connection closed before they departed.
        self._stalls = StallInspector(config.stall_warning_seconds, config.stall_shutdown_seconds)
        self._deadlocks = DeadlockDetector()
        # The number of the question of rank 0 for which tensors this rank waits; 0 once `answer`ed.
        self.asked = 0
        # Orders of the launcher that came before `take_orders`, and what gets them from then on.
        self._early_orders: deque[str] = deque()
        self._take_order: Callable[[str], None] | None = None
        self._stacks: dict[int, str] = {}  # What rank 0 has shown of each rank's main thread.
        self._watches_stalls = not config.stall_check_disable and (
            config.stall_warning_seconds > 0 or config.stall_shutdown_seconds > 0
        )
        size = transport.topology.size
        leads = bool(self._tree.children) and not self._tree.is_root
        sets = process_sets.added()
        self._aggregator = Aggregator(size, self._tree.subtree, sets) if leads else None
        log.debug(
            "rank %d reports to %s; to it report %s", self._rank,
            "nobody" if self._tree.is_root else self._tree.parent, self._tree.children,
        )  # fmt: skip
        self._ballot = Ballot(size)
        self._coordinator: Coordinator | None = None
        if self._tree.is_root:
            self._coordinator = Coordinator(
                size,
                cache_capacity=config.cache_capacity,
                threshold_bytes=config.fusion_threshold_bytes,
                keep_groups=config.disable_group_fusion,
                sets=sets,
                add_up=self._add_up,
            )

    def _add_up(self, request: Request, ranks: Sequence[int], data: Mapping[int, bytes]) -> bytes:
        """Return the sum of what members have sent inside their requests."""
        topology = self._transport.topology.restrict(tuple(ranks))
        return add_up(request, ranks, topology, data)

    @property
    def finished(self) -> bool:
        """Whether this rank and all below it have departed, so that nobody needs this engine."""
        return not self.orders and self._tree.subtree <= self._departed

    def receive(self, timeout: float | None) -> None:
        """Sleep until a message comes, at most `timeout` seconds, and handle all that are there.

        Raises `HorovodInternalError` where the job fails, also by `Engine.abandon`.
        """
        self._raise_if_abandoned()
        for rank, body in self._transport.receive(timeout):
            self._handle(rank, body)
        self._raise_if_abandoned()

    def _raise_if_abandoned(self) -> None:
        if self.abandoned is not None:
            raise HorovodInternalError(str(self.abandoned), rank=self.abandoned.rank)

    def report(self, reports: Sequence[Report]) -> None:
        """Count what this rank or a rank below has ready, or pass it to the parent."""
        counter = self._coordinator or self._aggregator
        if counter is None:
            self._send_up(Reports(tuple(reports)))
            return
        now = self._clock()
        self._deadlocks.disturb()
        for report in reports:
            counter.receive(report, now)
            if self._timeline.enabled:
                self._record_readiness(report)

    def depart(self, rank: int, reason: str) -> None:
        """Ask the coordinator to let `rank`, this one or one below, shut down."""
        self.pass_on()  # The reports of the rank must arrive before its departure.
        log.debug("rank %d: rank %d wants to shut down", self._rank, rank)
        if self._coordinator is not None:
            self._coordinator.depart(rank, reason)
        else:
            self._send_up(Depart(rank, reason))

    def retune(self, retune: Retune) -> None:
        """Order all ranks to use these settings. Rank 0 only."""
        assert self._coordinator is not None
        self._coordinator.retune(retune)

    def announce(self, figures: Figures) -> None:
        """Order all ranks to choose algorithms by these figures. Rank 0 only."""
        assert self._coordinator is not None
        self._coordinator.announce(figures)

    def tell_capabilities(self, runs: tuple[str, ...]) -> None:
        """Tell rank 0 what the device libraries of this rank run."""
        self._on_capabilities(Capabilities(self._rank, runs))

    def pass_on(self) -> None:
        """Send what the coordinator or the aggregator of this rank has decided."""
        if self._coordinator is not None:
            orders = self._coordinator.pop_orders()
            if orders:
                self._deadlocks.disturb()
                self._on_orders(Orders(orders))
        elif self._aggregator is not None:
            reports = self._aggregator.pop_reports()
            if reports:
                self._send_up(Reports(reports))

    def ask_clock(self) -> None:
        """Ask how far the clock of rank 0 is ahead.

        The answer is the midpoint estimate of Cristian ("Probabilistic clock synchronization",
        1989): the reply was sent in the middle between question and answer, on average.
        """
        host_of = self._transport.topology.host_of
        if host_of[self._rank] == host_of[ROOT]:
            self._set_clock_offset(0.0)  # All processes of a host share one monotonic clock.
        else:
            self._send_up(ClockQuery(self._rank, self._clock_ns()))

    def _record_readiness(self, report: Report) -> None:
        """Show in the timeline which ranks are ready for which tensors."""
        members = self._process_sets.find(report.process_set_id)
        if members is None or self._rank not in members:
            return  # This rank runs no segment that would end the negotiation in its timeline.
        for request in self._memory.requests_of(report):
            if self._rank not in (request.parties or members):
                continue  # A message of others, or a set that they form.
            self._timeline.negotiate_start(request.name, request.collective)
            for rank in report.ranks:
                self._timeline.rank_ready(request.name, rank)

    # -- messages

    def _handle(self, rank: int, body: bytes | None) -> None:
        if body is None:
            if rank in self._neighbours and not self._needed_by_nobody(rank):
                self._lost.add(rank)
                log.debug("rank %d: the connection to rank %d was closed", self._rank, rank)
                has_departed = rank in self._departed
                raise PeerLostError((_end_text if has_departed else _loss_text)(rank), rank=rank)
            return
        message = decode(body, rank)
        self._handlers[type(message)](self, message)

    def _needed_by_nobody(self, rank: int) -> bool:
        """Return whether a neighbour, and all ranks that report by way of it, have departed.

        The engine of a rank serves those below it after its own departure.
        """
        is_parent = not self._tree.is_root and rank == self._tree.parent
        below = self._tree.subtree if is_parent else self._tree.subtree_of(rank)
        return rank in self._departed and below <= self._departed

    def _on_reports(self, message: Reports) -> None:
        self.report(message.reports)

    def _on_orders(self, message: Orders) -> None:
        for order in message.orders:
            if self._aggregator is not None:
                self._aggregator.note(order)
            if isinstance(order, Departed):
                log.debug("rank %d: rank %d has shut down", self._rank, order.rank)
                self._departed.add(order.rank)
        self.orders.extend(message.orders)
        self._send_down(message)

    def _on_abort(self, message: Abort) -> None:
        raise _reason_of(message)

    def _on_depart(self, message: Depart) -> None:
        self.depart(message.rank, message.reason)

    def _on_capabilities(self, message: Capabilities) -> None:
        if self._coordinator is None:
            self._send_up(message)
            return
        common = self._ballot.receive(message.rank, message.runs)
        if common is not None:
            log.debug("all ranks run on devices: %s", "; ".join(common) or "nothing")
            self._coordinator.announce(DeviceRuns(common))
            self.pass_on()  # Before the segments of requests that came after it.

    def _on_stack_query(self, message: StackQuery) -> None:
        self._send_down(message)
        if self._rank in message.ranks:
            self._on_stack_reply(StackReply(self._rank, main_thread_stack()))

    def _on_stack_reply(self, message: StackReply) -> None:
        if self._tree.is_root:
            stack = message.stack.rstrip()
            shown = " where it was" if stack == self._stacks.get(message.rank) else f"\n{stack}"
            self._stacks[message.rank] = stack
            log.warning("main thread of rank %d:%s", message.rank, shown)
        else:
            self._send_up(message)

    def _on_wait_query(self, message: WaitQuery) -> None:
        self._send_down(message)
        self.asked = message.number if self._rank in message.ranks else 0

    def answer(self, waits: Sequence[tuple[str, str]]) -> None:
        """Tell rank 0 for which tensors the threads of this rank wait, and where.

        All that they had submitted before must be reported, and all orders be obeyed.
        """
        number, self.asked = self.asked, 0
        names, places = zip(*waits, strict=True) if waits else ((), ())
        self._on_wait_reply(WaitReply(number, self._rank, names, places))

    def _on_wait_reply(self, message: WaitReply) -> None:
        if self._aggregator is not None:  # What it holds was submitted before.
            self._aggregator.flush(self._clock())
            self.pass_on()
        if self._coordinator is None:
            self._send_up(message)
            return
        text = self._deadlocks.receive(message, self._coordinator.waiting())
        if text is not None:
            log.warning(text)
            first, *ranks = text.splitlines()
            _tell_of_stall("\n".join([first.partition(". ")[0] + ":", *ranks]))

    def pass_order(self, rank: int, line: str) -> None:
        """Give an order of the launcher to a rank, or to EVERY_RANK."""
        self._on_launcher_order(LauncherOrder(rank, line))

    def take_orders(self, take: Callable[[str], None]) -> None:
        """Let ``take(line)`` have the orders of the launcher for this rank, from any thread."""
        self._take_order = take
        self._hand_over_orders()

    def _hand_over_orders(self) -> None:
        # Either this thread finds an order that came meanwhile, or the other one finds `take`.
        while self._take_order is not None and self._early_orders:
            with suppress(IndexError):
                self._take_order(self._early_orders.popleft())

    def _on_launcher_order(self, message: LauncherOrder) -> None:
        if not (self._tree.is_root or message.descends):
            self._send_up(message)
            return
        self._send_down(message._replace(descends=1))
        if message.rank in (self._rank, EVERY_RANK):
            self._early_orders.append(message.line)
            self._hand_over_orders()

    def _on_clock_query(self, message: ClockQuery) -> None:
        if self._tree.is_root:
            self._send_down(ClockReply(message.rank, message.time_ns, self._clock_ns()))
        else:
            self._send_up(message)

    def _on_clock_reply(self, message: ClockReply) -> None:
        if message.rank != self._rank:
            self._send_down(message)
            return
        middle_ns = (message.asked_ns + self._clock_ns()) // 2
        self._set_clock_offset((message.answered_ns - middle_ns) / 1e9)

    def _clock_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _set_clock_offset(self, seconds: float) -> None:
        log.debug("rank %d: the clock of rank 0 is ahead by %.6f s", self._rank, seconds)
        self.clock_offset_seconds = seconds
        self._timeline.set_clock_offset(seconds)

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
        Reports: _on_reports,
        Orders: _on_orders,
        Abort: _on_abort,
        Depart: _on_depart,
        StackQuery: _on_stack_query,
        StackReply: _on_stack_reply,
        WaitQuery: _on_wait_query,
        WaitReply: _on_wait_reply,
        LauncherOrder: _on_launcher_order,
        ClockQuery: _on_clock_query,
        ClockReply: _on_clock_reply,
        Capabilities: _on_capabilities,
    }

    def _send_up(self, message: Message) -> None:
        self._transport.send(self._tree.parent, encode(message))

    def _send_down(self, message: Message) -> None:
        children = self._tree.children
        if not isinstance(message, Orders):  # A rank must still receive its own Departed.
            children = tuple(child for child in children if not self._has_ended(child))
        body = encode(message) if children else b""
        for child in children:
            self._transport.send(child, body)

    def _has_ended(self, child: int) -> bool:
        """Return whether a child and all below it, which its engine serves, have departed."""
        return child in self._departed and self._tree.subtree_of(child) <= self._departed

    # -- stalls

    def next_inspection(self) -> float | None:
        """Return when to call `inspect` next; None while nothing waits."""
        counter = self._coordinator or self._aggregator
        oldest = None if counter is None else counter.oldest
        if oldest is None or not self._watches_stalls:
            return None
        if self._coordinator is not None:
            return min(self._stalls.next_check(oldest), self._deadlocks.next_check(oldest))
        return oldest + self._hold_seconds

    @property
    def _hold_seconds(self) -> float:
        """The seconds that a leader holds incomplete tensors: rank 0 must hear before it warns."""
        return min(self._stalls.report_seconds / 2, FIRST_SECONDS)

    def inspect(self) -> None:
        """Warn of tensors that some ranks do not submit, or ask what they wait for, if it is time.

        Raises `HorovodInternalError` after the shutdown time, which fails the job.
        """
        due, now = self.next_inspection(), self._clock()
        if due is None or now < due:
            return
        if self._aggregator is not None:
            log.debug("rank %d: passes on tensors that some ranks do not submit", self._rank)
            self._aggregator.flush(now - self._hold_seconds)
            self.pass_on()
        if self._coordinator is None:
            return
        oldest = self._coordinator.oldest
        assert oldest is not None  # Else nothing would be due.
        query = self._deadlocks.ask(self._coordinator.waiting(), oldest, now)
        if query is not None:
            self._on_wait_query(query)
        report = self._stalls.inspect(self._coordinator.waiting(), now)
        if report is None:
            return
        log.warning(report.text)
        _tell_of_stall(report.text)
        if report.shutdown:
            raise StalledError(report.text, report.missing)
        self._on_stack_query(StackQuery(report.missing))

    # -- failures

    def blame(self, lost: PeerLostError) -> HorovodInternalError:
        """Return the error that names the rank at fault after a connection was closed.

        A rank that fails for another reason closes its connections too. So wait a moment for the
        Abort that tells the reason, until the connection to the lost rank itself is closed. A
        neighbour whose connection closes without that has not fled, and is the one at fault.
        """
        deadline = self._clock() + BLAME_SECONDS
        try:
            while lost.rank not in self._lost and (left := deadline - self._clock()) > 0:
                messages = self._transport.receive(left)
                if self.abandoned is not None:
                    return self.abandoned
                for rank, body in messages:
                    message = None if body is None else decode(body, rank)
                    if isinstance(message, Abort):
                        return _reason_of(message)
                    if message is None and rank in self._neighbours - self._departed:
                        self._lost.add(rank)
                        if rank != lost.rank:
                            return HorovodInternalError(_loss_text(rank), rank=rank)
                    elif message is None and rank == lost.rank:
                        self._lost.add(rank)
        except Exception as second:  # A second failure adds nothing to the first.
            log.debug("rank %d: %s, while waiting for the reason of a loss", self._rank, second)
        return HorovodInternalError(str(lost), rank=lost.rank)

    def reason_for(self, error: HorovodInternalError) -> HorovodInternalError:
        """Return why a device library has failed on this rank: mostly that another rank has.

        So wait a moment for the news of that. Without any, the error of the library names this
        rank.
        """
        deadline = self._clock() + BLAME_SECONDS
        try:
            while (left := deadline - self._clock()) > 0:
                self.receive(left)
        except PeerLostError as lost:
            return self.blame(lost)
        except HorovodInternalError as reason:
            return reason
        return HorovodInternalError(str(error), rank=self._rank)

    def abort(self, error: HorovodInternalError) -> None:
        """Tell the ranks above and below that the job fails. Never raises."""
        message = Abort(-1 if error.rank is None else error.rank, str(error))
        try:
            self._send_down(message)
            if not self._tree.is_root:
                self._send_up(message)
            self._transport.receive(0)
        except Exception as second:  # Other ranks see that the connections of this rank close.
            log.debug("rank %d: %s, while telling why the job fails", self._rank, second)


def _tell_of_stall(text: str) -> None:
    if launcher_pipe() is not None:
        tell_launcher("stall", " ".join(text.split())[:LONGEST_TEXT])


def _reason_of(message: Abort) -> HorovodInternalError:
    return HorovodInternalError(message.reason, rank=None if message.rank < 0 else message.rank)


def _loss_text(rank: int) -> str:
    return (
        f"rank {rank} is gone: its process died, or left without shutting down. "
        "See the output of that rank for the reason"
    )


def _end_text(rank: int) -> str:
    return (
        f"the process of rank {rank} has ended after hvd.shutdown(), before the ranks that its "
        "engine serves had shut down: end it by sys.exit(), or by the end of the script, which "
        "wait for the engine, instead of os._exit()"
    )
