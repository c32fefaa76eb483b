"""The background thread of a rank: take what was enqueued, negotiate, run, complete.

    training thread --enqueue--> Inbox --reports--> parent ... --> Coordinator (rank 0)
    handles <--complete-- Executor <--orders-- parent <-- ... orders, one sequence for all ranks

Only this thread touches the transport. It sleeps in `Transport.receive` while nothing happens.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError
from hvdlite.common.collectives.backend_choice import build_backends
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.decisions.control_tree import ROOT
from hvdlite.common.engine.control_plane import ControlPlane
from hvdlite.common.engine.executor import Executor
from hvdlite.common.engine.inbox import Inbox
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.engine.response_memory import ResponseMemory
from hvdlite.common.plain.config import Config
from hvdlite.common.plain.entries import Entry, Observer
from hvdlite.common.plain.messages import Eviction, Order, Response, Retune, Segment
from hvdlite.common.plain.process_set_table import ProcessSetTable, unflatten
from hvdlite.common.timeline.recorder import Timeline
from hvdlite.common.transport.base import Transport

if TYPE_CHECKING:
    from hvdlite.common.engine.autotuning import Autotuning

log = logging.getLogger("hvdlite")

SLOW_SECONDS = 1.0  # a negotiation that takes longer is told at debug level
SHUT_DOWN = "hvdlite has been shut down; call init() again"


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
        self.departed = threading.Event()  # this rank takes part in nothing any more
        self.failed = False  # the job ended because something went wrong
        self._transport = transport
        self._config = config
        self._timeline = timeline
        self._clock = clock
        self._inbox = Inbox(transport.wake, config.cycle_time_ms / 1000)
        self._pending = PendingTable(self.rank)
        self._memory = ResponseMemory(self.rank, self._pending)
        self._control_plane = ControlPlane(
            transport, config, timeline, self._memory, self.process_sets, clock
        )
        self._backends = build_backends(transport, config)
        self._executor = Executor(self.rank, self.topology, self._backends, timeline)
        self._autotuning: Autotuning | None = None
        if config.autotune and self.rank == ROOT and self.topology.size > 1:
            from hvdlite.common.engine.autotuning import Autotuning

            self._autotuning = Autotuning(config, self.topology, self._control_plane.retune)
            self._autotuning.stop_observing = self.observe(self._autotuning.observe)
        self._debug = log.isEnabledFor(logging.DEBUG)
        self._leaving = threading.Event()  # this rank wants to shut down
        self._asked_to_leave = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-engine", daemon=True)
        transport.call_while_waiting(self._negotiate_meanwhile)

    # -- of any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def enqueue(self, entries: Sequence[Entry]) -> None:
        """Hand over entries; never waits. Raises as `PendingTable.add`."""
        if self._timeline.enabled:
            for entry in entries:
                self._timeline.negotiate_start(entry.request.name, entry.request.collective)
        if self._executor.observers or self._debug:
            now = time.monotonic()
            for entry in entries:
                entry.enqueued = now
        self._pending.add(entries)
        self._inbox.put(entries)

    @property
    def clock_offset_seconds(self) -> float:
        """How far the monotonic clock of rank 0 is ahead of this one; 0 until it has answered."""
        return self._control_plane.clock_offset_seconds

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` on the engine's thread with each segment that has run from now on.

        Returns what ends that.
        """
        executor = self._executor
        executor.observers = (*executor.observers, observer)

        def end() -> None:
            executor.observers = tuple(each for each in executor.observers if each is not observer)

        return end

    def shutdown(self) -> None:
        """Leave the job. Returns when no other rank waits for this one any more.

        The thread goes on for as long as ranks below this one in the control tree need it.
        """
        self._leaving.set()
        self._transport.wake()
        self.departed.wait()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, and no other rank needs this engine any more."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Sleep until the thread has ended."""
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        try:
            self._pin()
            log.debug("rank %d: the engine starts; hosts %s", self.rank, self.topology.hosts)
            self._control_plane.ask_clock()
            while not self._control_plane.finished:
                self._cycle()
            self._close(HorovodInternalError(SHUT_DOWN))
        except BaseException as error:  # the user must hear of it on every rank
            self._fail(self._reason(error))

    def _reason(self, error: BaseException) -> HorovodInternalError:
        """Return what the handles of all ranks fail with, which names the rank at fault."""
        if isinstance(error, PeerLostError):
            return self._control_plane.blame(error)
        if not isinstance(error, HorovodInternalError):
            log.error("the engine of rank %d failed", self.rank, exc_info=error)
            text = f"the engine of rank {self.rank} failed: {type(error).__name__}: {error}"
            return HorovodInternalError(text, rank=self.rank)
        if error.rank is None:
            return HorovodInternalError(str(error), rank=self.rank)
        return error

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

    def _cycle(self) -> None:
        timeout = self._timeout()
        with self._timeline.receiving(sleeps=timeout != 0):
            self._control_plane.receive(timeout)
        self._take_entries()
        self._control_plane.pass_on()
        if self._control_plane.orders:
            self._obey(self._control_plane.orders.popleft())
            self._control_plane.pass_on()  # to obey may be to report, and that may decide something
        else:
            self._control_plane.inspect()

    def _negotiate_meanwhile(self) -> None:
        """Keep negotiation going while a collective waits for its peers."""
        self._control_plane.receive(0)
        self._take_entries()
        self._control_plane.pass_on()

    def _take_entries(self) -> None:
        entries = self._inbox.drain()
        if entries:
            self._control_plane.report(self._memory.reports(entries))
        if self._leaving.is_set() and not self._asked_to_leave:
            self._asked_to_leave = True
            self._control_plane.depart(self.rank)

    def _timeout(self) -> float | None:
        """How long nothing can become due: 0 while there is work, None without an end."""
        if self._control_plane.orders or not self._inbox.may_sleep():
            return 0
        if self._leaving.is_set() and not self._asked_to_leave:
            return 0
        due = self._control_plane.next_inspection()
        return None if due is None else max(due - self._clock(), 0)

    # -- orders

    def _obey(self, order: Order) -> None:
        if isinstance(order, Segment):
            self._run_segment(order)
        elif isinstance(order, Eviction):
            again = self._memory.evict(order)
            log.debug("rank %d: %s; reported again: %d", self.rank, order, len(again))
            if again:
                self._control_plane.report(self._memory.reports(again))
        elif isinstance(order, Retune):
            self._retune(order)
        elif order.rank == self.rank:
            log.debug("rank %d takes part in nothing any more", self.rank)
            self._pending.close(HorovodInternalError(SHUT_DOWN))
            self.departed.set()

    def _run_segment(self, segment: Segment) -> None:
        members = self.process_sets.find(segment.process_set_id)
        if members is None or self.rank not in members:
            return
        responses, entries = self._memory.resolve(segment)
        if self._timeline.enabled:
            for response in responses:
                self._timeline.negotiate_end(response.request.name)
        if self._debug:
            self._tell_slow(entries)
        if responses[0].error:
            log.debug("rank %d: %s", self.rank, responses[0].error)
            if entries[0] is not None:
                error = HorovodInternalError(responses[0].error, job_goes_on=True)
                entries[0].handle.fail(error)
        elif SPECS[responses[0].request.collective].run is None:
            self._answer(responses[0], entries[0])
        else:
            self._timeline.engine("EXECUTE")
            self._executor.run(members, responses, entries)

    def _tell_slow(self, entries: Sequence[Entry | None]) -> None:
        """Log what has waited long for other ranks."""
        now = time.monotonic()
        for entry in entries:
            if entry is not None and entry.enqueued and now - entry.enqueued > SLOW_SECONDS:
                log.debug(
                    "rank %d: %s '%s' waited %.1f s for other ranks", self.rank,
                    entry.request.collective, entry.request.name, now - entry.enqueued,
                )  # fmt: skip

    def _answer(self, response: Response, entry: Entry | None) -> None:
        """The negotiation itself was the collective."""
        request = response.request
        effect = SPECS[request.collective].effect
        value: int | None = None
        if effect is Effect.JOIN:
            value = response.last_joined
            log.debug("rank %d: all have joined, rank %d last", self.rank, value)
        elif effect is Effect.ADD_SET:
            added = {r: self.process_sets.add(r) for r in unflatten(response.first_dims)}
            value = None if entry is None else added[entry.request.shape]
            log.debug("rank %d: process sets by their ranks: %s", self.rank, added)
        elif effect is Effect.REMOVE_SET:
            for removed in response.first_dims:
                self.process_sets.remove(removed)
                self._drop_set(removed)
                log.debug("rank %d: process set %d is removed", self.rank, removed)
        if entry is not None:
            entry.complete(value)

    def _drop_set(self, process_set_id: int) -> None:
        """A process set is no more: what is pending in it fails."""
        self._memory.forget_set(process_set_id)
        dropped = self._pending.pop_set(process_set_id)
        self._inbox.remove(dropped)
        for entry in dropped:
            entry.handle.fail(
                HorovodInternalError(f"'{entry.request.name}': Process set has been removed")
            )

    def _retune(self, retune: Retune) -> None:
        log.debug("rank %d: from here on %s", self.rank, retune)
        self._inbox.gather_for(retune.cycle_time_ms / 1000)
        self._backends.retune(retune.allreduce, retune.piece_bytes)
        if self._autotuning is not None:
            self._autotuning.settings_applied()

    # -- the end

    def _fail(self, error: HorovodInternalError) -> None:
        self.failed = True
        log.debug("rank %d: the job fails, by rank %s: %s", self.rank, error.rank, error)
        try:
            self._control_plane.abort(error)
        finally:
            self._close(error)

    def _close(self, error: HorovodInternalError) -> None:
        try:
            self._pending.close(error)
        finally:
            self.departed.set()
            self._transport.close()
