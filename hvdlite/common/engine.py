"""The background thread of a rank: take what was enqueued, negotiate, run, complete.

    training thread --enqueue--> TensorQueue --reports--> parent ... --> Coordinator (rank 0)
    handles <--complete-- Executor <--orders-- parent <-- ... orders, one sequence for all ranks

Only this thread touches the transport. It sleeps in `Transport.receive` while nothing happens.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from hvdlite.common.aggregator import Aggregator
from hvdlite.common.collectives.select import build_backends
from hvdlite.common.collectives.table import ROWS, Effect
from hvdlite.common.config import Config
from hvdlite.common.coordinator import Coordinator
from hvdlite.common.errors import HorovodInternalError, PeerLostError
from hvdlite.common.execution import Entry, Executor
from hvdlite.common.messages import (
    Abort,
    ClockQuery,
    ClockReply,
    Depart,
    Departed,
    Eviction,
    Message,
    Order,
    Orders,
    Report,
    Reports,
    Response,
    Segment,
    StackQuery,
    StackReply,
    decode,
    encode,
)
from hvdlite.common.process_set_table import ProcessSetTable, unflatten
from hvdlite.common.stall import StallInspector
from hvdlite.common.tensor_queue import TensorQueue
from hvdlite.common.timeline import Timeline
from hvdlite.common.transport.base import Transport
from hvdlite.common.tree import ROOT, Tree

log = logging.getLogger("hvdlite")

BLAME_SECONDS = 1.0  # how long a rank that lost a peer waits to hear why


class Engine:
    """One rank's engine. It can be ended and another one built in the same process."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = transport.rank
        self.topology = transport.topology
        self.process_sets = ProcessSetTable(self.topology.size)
        self.queue = TensorQueue(self.rank, transport.wake)
        self._transport = transport
        self._config = config
        self._timeline = timeline
        self._clock = clock
        self._tree = Tree(self.topology, self.rank)
        self._executor = Executor(
            self.rank, self.topology, build_backends(transport, config), timeline
        )
        self._coordinator = self._new_coordinator() if self._tree.is_root else None
        leads = bool(self._tree.children) and not self._tree.is_root
        self._aggregator = Aggregator(self.topology.size, self._tree.subtree) if leads else None
        self._stalls = StallInspector(config.stall_warning_seconds, config.stall_shutdown_seconds)
        self._orders: deque[Order] = deque()
        self._gone: set[int] = set()  # ranks that have shut down
        self._leaving = threading.Event()  # this rank wants to shut down
        self._asked_to_leave = False
        self.departed = threading.Event()  # this rank takes part in nothing any more
        self._thread = threading.Thread(target=self._run, name="hvdlite-engine", daemon=True)
        transport.check = self._pump

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            self.topology.size,
            cache_capacity=self._config.cache_capacity,
            threshold_bytes=self._config.fusion_threshold_bytes,
            keep_groups=self._config.disable_group_fusion,
        )

    # -- of any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def enqueue(self, entries: Sequence[Entry]) -> None:
        """Hand over entries; never waits. Raises as `TensorQueue.add`."""
        if self._timeline.enabled:
            for entry in entries:
                self._timeline.negotiate_start(entry.request.name, entry.request.collective)
        self.queue.add(entries)

    def shutdown(self) -> None:
        """Leave the job. Returns when no other rank waits for this one any more.

        The thread goes on for as long as ranks below this one in the control tree need it.
        """
        self._leaving.set()
        self._transport.wake()
        self.departed.wait()

    def join(self) -> None:
        """Sleep until the thread has ended."""
        self._thread.join()

    @property
    def thread(self) -> threading.Thread:
        """The engine thread."""
        return self._thread

    # -- the thread

    def _run(self) -> None:
        try:
            self._pin()
            self._ask_clock()
            while not self._finished:
                self._cycle()
            self._close(HorovodInternalError("hvdlite has been shut down; call init() again"))
        except PeerLostError as error:
            self._fail(self._blame(error))
        except HorovodInternalError as error:
            self._fail(error)
        except BaseException as error:  # the user must hear of it on every rank
            log.exception("the engine of rank %d failed", self.rank)
            self._fail(HorovodInternalError(
                f"the engine of rank {self.rank} failed: {type(error).__name__}: {error}",
                rank=self.rank,
            ))  # fmt: skip

    def _pin(self) -> None:
        """Bind this thread to its core, where the user has named one."""
        cores = self._config.thread_affinity
        if not cores:
            return
        try:
            os.sched_setaffinity(0, {cores[self.topology.local_rank(self.rank)]})
        except (AttributeError, IndexError, OSError) as error:
            log.error(
                "HVDLITE_THREAD_AFFINITY=%s cannot be used on rank %d: %s",
                ",".join(map(str, cores)), self.rank, error,
            )  # fmt: skip

    @property
    def _finished(self) -> bool:
        return not self._orders and self._tree.subtree <= self._gone

    def _cycle(self) -> None:
        incoming = self._transport.receive(self._timeout())
        if self._timeline.enabled:
            self._timeline.mark_cycle()
        self._take_entries()
        for rank, body in incoming:
            self._handle(rank, body)
        self._pass_on()
        if self._orders:
            self._obey(self._orders.popleft())
        elif not self._config.stall_check_disable:
            self._inspect()

    def _take_entries(self) -> None:
        entries = self.queue.take()
        if entries and self._config.cycle_time_ms:
            time.sleep(self._config.cycle_time_ms / 1000)  # more may gather
            entries += self.queue.take()
        if entries:
            self._report(entries)
        if self._leaving.is_set() and not self._asked_to_leave:
            self._asked_to_leave = True
            self._depart(self.rank)

    def _pump(self) -> None:
        """Keep negotiation going while a collective waits for its peers."""
        incoming = self._transport.receive(0)
        self._take_entries()
        for rank, body in incoming:
            self._handle(rank, body)
        self._pass_on()

    def _timeout(self) -> float | None:
        """How long nothing can become due: 0 while there is work, None without an end."""
        if self._orders or not self.queue.may_sleep():
            return 0
        if self._leaving.is_set() and not self._asked_to_leave:
            return 0
        due = None if self._config.stall_check_disable else self._next_inspection()
        return None if due is None else max(due - self._clock(), 0)

    # -- messages

    def _report(self, entries: Sequence[Entry]) -> None:
        reports = self.queue.reports(entries)
        if self._coordinator or self._aggregator:
            self._receive_reports(reports)
        else:
            self._send(self._tree.parent, Reports(reports))

    def _receive_reports(self, reports: Sequence[Report]) -> None:
        now = self._clock()
        counter = self._coordinator or self._aggregator
        if counter is None:
            raise HorovodInternalError(f"rank {self.rank} got a report and leads no host")
        for report in reports:
            counter.receive(report, now)
            if self._timeline.enabled:
                self._tick(report)

    def _tick(self, report: Report) -> None:
        names = [self.queue.name_of(report.process_set_id, bit) for bit in report.bits]
        names += [request.name for request in report.requests]
        for name in names:
            for rank in report.ranks:
                self._timeline.rank_ready(name, rank)

    def _handle(self, rank: int, body: bytes | None) -> None:
        if body is None:
            if rank not in self._gone:
                raise PeerLostError(_gone_text(rank), rank=rank)
            return
        message = decode(body, rank)
        self._handlers[type(message)](self, message)

    def _on_reports(self, message: Reports) -> None:
        self._receive_reports(message.reports)

    def _on_orders(self, message: Orders) -> None:
        for order in message.orders:
            if self._aggregator is not None:
                self._aggregator.note(order)
            if isinstance(order, Departed):
                self._gone.add(order.rank)
        self._orders.extend(message.orders)
        self._send_down(message)

    def _on_abort(self, message: Abort) -> None:
        raise HorovodInternalError(message.reason, rank=message.rank)

    def _on_depart(self, message: Depart) -> None:
        self._depart(message.rank)

    def _on_stack_query(self, message: StackQuery) -> None:
        self._send_down(message)
        if self.rank in message.ranks:
            self._on_stack_reply(StackReply(self.rank, main_thread_stack()))

    def _on_stack_reply(self, message: StackReply) -> None:
        if self._tree.is_root:
            log.warning("main thread of rank %d:\n%s", message.rank, message.stack)
        else:
            self._send(self._tree.parent, message)

    def _on_clock_query(self, message: ClockQuery) -> None:
        if self._tree.is_root:
            self._send_down(ClockReply(message.rank, message.time_ns, time.monotonic_ns()))
        else:
            self._send(self._tree.parent, message)

    def _on_clock_reply(self, message: ClockReply) -> None:
        if message.rank != self.rank:
            self._send_down(message)
            return
        middle_ns = (message.asked_ns + time.monotonic_ns()) // 2
        self._timeline.set_clock_offset((message.answered_ns - middle_ns) / 1e9)

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
        Reports: _on_reports,
        Orders: _on_orders,
        Abort: _on_abort,
        Depart: _on_depart,
        StackQuery: _on_stack_query,
        StackReply: _on_stack_reply,
        ClockQuery: _on_clock_query,
        ClockReply: _on_clock_reply,
    }

    def _ask_clock(self) -> None:
        if self.topology.host_of[self.rank] == self.topology.host_of[ROOT]:
            self._timeline.set_clock_offset(0.0)  # one host, one monotonic clock
        else:
            self._send(self._tree.parent, ClockQuery(self.rank, time.monotonic_ns()))

    def _depart(self, rank: int) -> None:
        if self._coordinator is not None:
            self._coordinator.depart(rank)
        else:
            self._send(self._tree.parent, Depart(rank))

    def _pass_on(self) -> None:
        """Send what the rooms of decision have decided."""
        if self._coordinator is not None:
            orders = self._coordinator.take_orders()
            if orders:
                self._on_orders(Orders(orders))
        elif self._aggregator is not None:
            reports = self._aggregator.take_reports()
            if reports:
                self._send(self._tree.parent, Reports(reports))

    def _send(self, rank: int, message: Message) -> None:
        self._transport.send(rank, encode(message))

    def _send_down(self, message: Message) -> None:
        if self._tree.children:
            body = encode(message)
            for child in self._tree.children:
                self._transport.send(child, body)

    # -- orders

    def _obey(self, order: Order) -> None:
        if isinstance(order, Segment):
            self._run_segment(order)
        elif isinstance(order, Eviction):
            entry = self.queue.evict(order)
            if entry is not None:
                self._report([entry])
                self._pass_on()
        elif order.rank == self.rank:
            self.queue.close(HorovodInternalError("hvdlite has been shut down; call init() again"))
            self.departed.set()

    def _run_segment(self, segment: Segment) -> None:
        members = self.process_sets.find(segment.process_set_id)
        if members is None or self.rank not in members:
            return
        responses, entries = self.queue.resolve(segment)
        if self._timeline.enabled:
            for response in responses:
                self._timeline.negotiate_end(response.request.name)
        if responses[0].error:
            self._refuse(responses[0], entries[0])
        elif ROWS[responses[0].request.collective].run is None:
            self._answer(responses[0], entries[0])
        else:
            self._executor.run(members, responses, entries)

    def _refuse(self, response: Response, entry: Entry | None) -> None:
        if entry is not None:
            entry.handle.fail(HorovodInternalError(response.error))

    def _answer(self, response: Response, entry: Entry | None) -> None:
        """The negotiation itself was the collective."""
        request = response.request
        effect = ROWS[request.collective].effect
        value: int | None = None
        if effect is Effect.JOIN:
            value = response.last_joined
        elif effect is Effect.ADD_SET:
            added = {r: self.process_sets.add(r) for r in unflatten(response.first_dims)}
            value = None if entry is None else added[entry.request.shape]
        elif effect is Effect.REMOVE_SET:
            self.process_sets.remove(request.root_rank)
            self.queue.drop_set(request.root_rank)
        if entry is not None:
            entry.complete(value)

    # -- stalls

    def _next_inspection(self) -> float | None:
        if self._coordinator is not None:
            since = [waiting.since for waiting in self._coordinator.waiting()]
            return self._stalls.next_check(min(since)) if since else None
        if self._aggregator is not None and self._aggregator.oldest is not None:
            return self._aggregator.oldest + self._patience
        return None

    @property
    def _patience(self) -> float:
        """How long a leader holds what is incomplete: rank 0 must know before it warns."""
        return self._stalls.patience / 2

    def _inspect(self) -> None:
        now = self._clock()
        if self._aggregator is not None:
            self._aggregator.flush(now - self._patience)
            self._pass_on()
        if self._coordinator is None:
            return
        report = self._stalls.inspect(self._coordinator.waiting(), now)
        if report is None:
            return
        log.warning(report.text)
        if report.shutdown:
            raise HorovodInternalError(report.text, rank=report.missing[0])
        self._on_stack_query(StackQuery(report.missing))

    # -- the end

    def _blame(self, lost: PeerLostError) -> HorovodInternalError:
        """Who is at fault when a connection ended: its rank, or the one it fled from."""
        deadline = self._clock() + BLAME_SECONDS
        try:
            while (left := deadline - self._clock()) > 0:
                for rank, body in self._transport.receive(left):
                    message = None if body is None else decode(body, rank)
                    if isinstance(message, Abort):
                        return HorovodInternalError(message.reason, rank=message.rank)
                    if message is None and rank == lost.rank:
                        return lost
        except HorovodInternalError:
            pass  # a second failure does not tell more
        return lost

    def _fail(self, error: HorovodInternalError) -> None:
        rank = -1 if error.rank is None else error.rank
        abort = Abort(rank, str(error))
        try:
            for peer in {
                *self._tree.children,
                *([] if self._tree.is_root else [self._tree.parent]),
            }:
                if peer not in self._gone:
                    self._send(peer, abort)
            self._transport.receive(0)
        except HorovodInternalError:
            pass  # whoever cannot be told sees this rank's connection end
        self._close(error)

    def _close(self, error: HorovodInternalError) -> None:
        self.queue.close(error)
        self.departed.set()
        self._transport.close()


def _gone_text(rank: int) -> str:
    return (
        f"rank {rank} is gone: its process died, or left without shutting down. "
        "See the output of that rank for the reason"
    )


def main_thread_stack() -> str:
    """Where the main thread of this process stands."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(no main thread)\n"
