"""The control plane of one rank: reports go up the control tree, orders come down.

The coordinator and the aggregators decide; this module only moves their messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError
from hvdlite.common.collectives.between_hosts.carried import add_up
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.control_tree import ROOT
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.devices.agreement import Ballot
from hvdlite.common.engine.response_memory import ResponseMemory
from hvdlite.common.engine.tree_links import ClockOffset, LauncherOrders, StallWatch, TreeLinks
from hvdlite.common.requests.messages import (
    Abort,
    Capabilities,
    ClockQuery,
    ClockReply,
    Depart,
    Departed,
    DeviceRuns,
    Figures,
    LauncherOrder,
    Order,
    Orders,
    Report,
    Reports,
    Retune,
    StackQuery,
    StackReply,
    WaitQuery,
    WaitReply,
    decode,
)
from hvdlite.common.requests.process_set_table import ProcessSetTable
from hvdlite.common.settings.config import Config
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
        self._rank = transport.rank
        self._transport, self._timeline, self._memory = transport, timeline, memory
        self._process_sets, self._clock = process_sets, clock
        self._links = links = TreeLinks(transport)
        self._tree, self._departed = links.tree, links.departed
        self.launcher_orders = LauncherOrders(links)
        host_of = transport.topology.host_of
        self.clock_offset = ClockOffset(
            links, timeline, clock, same=host_of[self._rank] == host_of[ROOT]
        )
        # Only connections to these ranks are watched: their Departed comes on the same path, and so
        # before the connection closes. A connection to another rank may close first.
        self._neighbours = self._tree.neighbours
        self._lost: set[int] = set()  # Ranks whose connection closed before they departed.
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
                # The sum of what members have sent inside their requests.
                add_up=lambda request, ranks, data: add_up(
                    request, ranks, transport.topology.restrict(tuple(ranks)), data
                ),
            )
        self.stalls = StallWatch(
            config, links, self._coordinator, self._aggregator, self.pass_on, clock
        )
        self._handlers: dict[type, Callable[..., None]] = {
            Reports: lambda message: self.report(message.reports),
            Orders: self._on_orders,
            Abort: _raise_reason,
            Depart: lambda message: self.depart(message.rank, message.reason),
            Capabilities: self.on_capabilities,
            StackQuery: self.stalls.on_stack_query,
            StackReply: self.stalls.on_stack_reply,
            WaitQuery: self.stalls.on_wait_query,
            WaitReply: self.stalls.on_wait_reply,
            LauncherOrder: self.launcher_orders.on_order,
            ClockQuery: self.clock_offset.on_query,
            ClockReply: self.clock_offset.on_reply,
        }

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
            self._links.send_up(Reports(tuple(reports)))
            return
        now = self.stalls.now()
        self.stalls.disturb()
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
            self._links.send_up(Depart(rank, reason))

    def retune(self, retune: Retune) -> None:
        """Order all ranks to use these settings. Rank 0 only."""
        assert self._coordinator is not None
        self._coordinator.retune(retune)

    def announce(self, figures: Figures) -> None:
        """Order all ranks to choose algorithms by these figures. Rank 0 only."""
        assert self._coordinator is not None
        self._coordinator.announce(figures)

    def pass_on(self) -> None:
        """Send what the coordinator or the aggregator of this rank has decided."""
        if self._coordinator is not None:
            orders = self._coordinator.pop_orders()
            if orders:
                self.stalls.disturb()
                self._on_orders(Orders(orders))
        elif self._aggregator is not None:
            reports = self._aggregator.pop_reports()
            if reports:
                self._links.send_up(Reports(reports))

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
        if body is not None:
            message = decode(body, rank)
            self._handlers[type(message)](message)
        elif rank in self._neighbours:
            # The engine of a rank serves those that report by way of it after its own departure.
            is_parent = not self._tree.is_root and rank == self._tree.parent
            below = self._tree.subtree if is_parent else self._tree.subtree_of(rank)
            has_departed = rank in self._departed
            if not (has_departed and below <= self._departed):
                self._lost.add(rank)
                log.debug("rank %d: the connection to rank %d was closed", self._rank, rank)
                raise PeerLostError(_loss_text(rank, departed=has_departed), rank=rank)

    def _on_orders(self, message: Orders) -> None:
        for order in message.orders:
            if self._aggregator is not None:
                self._aggregator.note(order)
            if isinstance(order, Departed):
                log.debug("rank %d: rank %d has shut down", self._rank, order.rank)
                self._departed.add(order.rank)
        self.orders.extend(message.orders)
        self._links.send_down(message)

    def on_capabilities(self, message: Capabilities) -> None:
        """Tell rank 0 what the device libraries of this rank, or one below, run."""
        if self._coordinator is None:
            self._links.send_up(message)
            return
        common = self._ballot.receive(message.rank, message.runs)
        if common is not None:
            log.debug("all ranks run on devices: %s", "; ".join(common) or "nothing")
            self._coordinator.announce(DeviceRuns(common))
            self.pass_on()  # Before the segments of requests that came after it.

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
                            return HorovodInternalError(_loss_text(rank, departed=False), rank=rank)
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
            self._links.send_down(message)
            if not self._tree.is_root:
                self._links.send_up(message)
            self._transport.receive(0)
        except Exception as second:  # Other ranks see that the connections of this rank close.
            log.debug("rank %d: %s, while telling why the job fails", self._rank, second)


def _raise_reason(message: Abort) -> None:
    raise _reason_of(message)


def _reason_of(message: Abort) -> HorovodInternalError:
    return HorovodInternalError(message.reason, rank=None if message.rank < 0 else message.rank)


def _loss_text(rank: int, *, departed: bool) -> str:
    if not departed:
        return (
            f"rank {rank} is gone: its process died, or left without shutting down. "
            "See the output of that rank for the reason"
        )
    return (
        f"the process of rank {rank} has ended after hvd.shutdown(), before the ranks that its "
        "engine serves had shut down: end it by sys.exit(), or by the end of the script, which "
        "wait for the engine, instead of os._exit()"
    )
