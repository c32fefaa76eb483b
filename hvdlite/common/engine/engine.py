"""The engine thread of a rank: drain the inbox, negotiate, run segments, complete handles.

    training thread --enqueue--> Inbox --reports--> parent ... --> Coordinator (rank 0)
    handles <--complete-- Executor <--orders-- parent <-- ... orders, one sequence for all ranks

Only this thread touches the transport, but for `wake`, and for the memory of short calls. It sleeps
in `Transport.receive` while nothing happens.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    PeerLostError,
    StalledError,
)
from hvdlite.common.collectives.backend_choice import build_backends
from hvdlite.common.collectives.between_hosts.costs import Model
from hvdlite.common.collectives.between_hosts.model_file import chosen_model
from hvdlite.common.collectives.native.collectives import MOST_RANKS
from hvdlite.common.collectives.native.library import library
from hvdlite.common.collectives.native.short_call import ShortExchange
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.decisions.control_tree import ROOT
from hvdlite.common.decisions.process_sets import change_sets
from hvdlite.common.devices.agreement import capabilities
from hvdlite.common.devices.data_plane import DevicePlane
from hvdlite.common.devices.hierarchy import HostPaths
from hvdlite.common.devices.libraries import find_libraries
from hvdlite.common.engine.control_plane import ControlPlane
from hvdlite.common.engine.executor import Executor
from hvdlite.common.engine.inbox import Inbox, waking_bytes
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.engine.response_memory import ResponseMemory
from hvdlite.common.engine.short_calls import ShortCalls
from hvdlite.common.requests.entries import Bundle, Entry, Observer
from hvdlite.common.requests.messages import (
    Capabilities,
    DeviceRuns,
    Eviction,
    Figures,
    LauncherOrder,
    Order,
    Response,
    Retune,
    Segment,
)
from hvdlite.common.requests.process_set_table import FormedSet, ProcessSetTable
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import DTYPES
from hvdlite.common.timeline.recorder import Timeline
from hvdlite.common.transport.base import Transport

if TYPE_CHECKING:
    from hvdlite.common.engine.autotuning import Autotuning

log = logging.getLogger("hvdlite")

SLOW_SECONDS = 1.0  # A negotiation that takes longer is logged at debug level.
SHUT_DOWN = "hvdlite has been shut down; call init() again"


class Engine:
    """One rank's engine. After a shutdown, another one can be built in the same process."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
        *,
        sets: Iterable[tuple[int, ...]] = (),
    ) -> None:
        """Begin with process `sets`, the same on all ranks; see `ProcessSetTable`."""
        self.rank = transport.rank
        self.topology = transport.topology
        self.process_sets = ProcessSetTable(self.topology.size, sets)
        # Set when this rank takes part in nothing any more: it was shut down, or the job failed.
        self.departed = threading.Event()
        # Set before `departed` if the job failed.
        self.failed = False
        # Called on the thread of rank 0 with the ranks that were late for too long.
        self.on_stall: Callable[[tuple[int, ...]], None] = lambda late: None
        self._transport, self._config, self._timeline = transport, config, timeline
        self._pending = PendingTable(self.rank)
        self.outstanding = self._pending.outstanding  # the tensors that are not complete
        self._memory = ResponseMemory(self.rank, self._pending)
        self._control_plane = ControlPlane(
            transport, config, timeline, self._memory, self.process_sets, clock
        )
        # They run collectives. Only the engine thread may run one.
        self.backends = build_backends(transport, config)
        if self.rank == ROOT and len(self.topology.hosts) > 1:
            model = chosen_model(config.network_model)
            if model != Model():
                self._control_plane.announce(Figures(model.values))
        libraries = find_libraries(config.devices)
        # The tensors on devices that are reduced there.
        self.devices = DevicePlane(
            self.topology.local_rank(self.rank),
            libraries,
            HostPaths(self.backends),
            completes_on_host=config.device_completion == "host",
            negotiate=self._negotiate_meanwhile,
            on_error=self._note_device_error,
        )
        in_layers = config.device_allreduce == "hierarchical"
        self._capabilities = capabilities(libraries, DTYPES, in_layers=in_layers)
        # Set by the finalizer thread of a device, whose library has failed.
        self._device_error: HorovodInternalError | None = None
        self._executor = Executor(
            self.rank, self.topology, self.backends, timeline, self.devices,
            shows_at_launch=config.autotune,
        )  # fmt: skip
        # What the ranks choose by must not change while they report: autotuning changes it.
        if len(self.topology.hosts) > 1 and not config.autotune:
            self._memory.data_of = partial(self._executor.carried_data, self.process_sets)
        self._launcher_orders: deque[LauncherOrder] = deque()  # To be passed on.
        self._debug = log.isEnabledFor(logging.DEBUG)
        # Set by `shutdown`. The engine thread then asks the coordinator once for the departure.
        self._shutdown_requested = threading.Event()
        self._departure_sent = False
        self._departure_reason = ""  # What the errors of other ranks say of this one.
        self._short_calls = self._find_short_calls()
        self._inbox = Inbox(
            transport.wake,
            config.cycle_time_ms / 1000,
            self._short_calls,
            clock,
            enough=waking_bytes(self.topology, len(os.sched_getaffinity(0))),
        )
        self._autotuning: Autotuning | None = None
        if config.autotune and self.rank == ROOT and self.topology.size > 1:
            from hvdlite.common.engine.autotuning import Autotuning

            self._autotuning = Autotuning(config, self.topology, self._control_plane.retune)
            self._autotuning.stop_observing = self.observe(self._autotuning.observe)
        self._thread = threading.Thread(target=self._run, name="hvdlite-engine", daemon=True)
        transport.call_while_waiting(self._negotiate_meanwhile)

    # -- called by any thread

    def start(self) -> None:
        self._thread.start()

    def pin(self) -> None:
        """Bind the thread, which runs, to the core that the user has named for it, if any.

        Raises `ConfigError` where that cannot be.
        """
        cores, local_rank = self._config.thread_affinity, self.topology.local_rank(self.rank)
        if not cores:
            return
        given = f"HVDLITE_THREAD_AFFINITY={','.join(map(str, cores))}: rank {self.rank}"
        if local_rank >= len(cores):
            raise ConfigError(f"{given} has local rank {local_rank}: name a core for each of them")
        try:
            os.sched_setaffinity(self._thread.native_id or 0, {cores[local_rank]})
        except (AttributeError, OSError, OverflowError):
            raise ConfigError(
                f"{given} cannot use core {cores[local_rank]}: its host has none with this number, "
                "or forbids it; name other cores, or none"
            ) from None

    def enqueue(self, entries: Sequence[Entry], *, waits: bool = False) -> None:
        """Hand over entries without waiting. Raises as `PendingTable.add`.

        `waits` says that the calling thread waits for them next: one entry may be a short call.
        """
        if self._timeline.enabled or self._executor.observers or self._debug:
            self._note(entries)
        try:
            self._pending.add(entries)
            self._inbox.put(entries, waits=waits)
        except BaseException:  # A KeyboardInterrupt: the other ranks need what was counted here.
            left = [each for each in entries if self._pending.has(each)]
            if left:
                self._inbox.put([each for each in left if each.handle.queue is None])
                self._inbox.hurry()
            raise

    def add_pending(self, entries: Sequence[Entry]) -> None:
        """Keep entries until `send` or `exchange`. Raises as `PendingTable.add`."""
        if self._timeline.enabled or self._executor.observers or self._debug:
            self._note(entries)
        self._pending.add(entries)

    def _note(self, entries: Sequence[Entry]) -> None:
        """Note for those who watch when entries came."""
        if self._timeline.enabled:
            for entry in entries:
                self._timeline.negotiate_start(entry.request.name, entry.request.collective)
        if self._executor.observers or self._debug:
            now = time.monotonic()
            for entry in entries:
                entry.enqueued = now

    def send(self, entries: Sequence[Entry]) -> None:
        """Let those of the entries be negotiated that were announced, and have not ended."""
        self._inbox.put([each for each in entries if self._pending.has(each)])

    def exchange(self, bundle: Bundle) -> None:
        """Exchange entries that were announced in this thread, or send them; see `ShortCalls`."""
        exchanged = False
        try:
            if self._short_calls is not None:
                exchanged = self._short_calls.run(bundle)
        finally:  # Also for a KeyboardInterrupt: the other ranks need these entries.
            if not exchanged:
                left = [each for each in bundle.entries if self._pending.has(each)]
                if left and self._short_calls is not None:
                    self._short_calls.decline([bundle])
                self._inbox.put(left)

    def _find_short_calls(self) -> ShortCalls | None:
        """Return the short calls of this rank where the host has the code for them."""
        ranks = len(self.topology.peers(self.rank))
        code = library("off" if ranks == 1 else self._config.native, first_of_host=False)
        if code is None or ranks > MOST_RANKS:
            return None
        exchange = ShortExchange(self._transport, code)
        found = ShortCalls(
            self.rank,
            exchange,
            self._executor,
            self._pending,
            self.process_sets,
            self._makes_short_calls,
        )
        found.take_part()
        return found

    def _makes_short_calls(self) -> bool:
        """Return whether nobody wants to see the calls on their way, and this rank can be asked."""
        # Autotuning is observed, and decides, on the engine thread alone.
        seen = self._timeline.enabled or self._config.autotune or self._debug
        return not (seen or self._shutdown_requested.is_set() or self._pending.joined)

    @property
    def reported(self) -> tuple[int, int]:
        """How many tensors were reported to the coordinator, and how many of them by a bit."""
        return self._memory.reported, self._memory.reported_by_bit

    def take_launcher_orders(self, take: Callable[[str], None]) -> None:
        """Let ``take(line)`` have the orders of the launcher that other ranks have passed on.

        Those that have come before are handed over at once. `take` is called on the engine thread,
        too, and must not wait.
        """
        self._control_plane.launcher_orders.take(take)

    def pass_launcher_order(self, rank: int, line: str) -> None:
        """Pass an order of the launcher on to a rank, or to EVERY_RANK; any thread, never waits."""
        if not self.departed.is_set():
            self._launcher_orders.append(LauncherOrder(rank, line))
            self._transport.wake()

    @property
    def clock_offset_seconds(self) -> float:
        """How far the monotonic clock of rank 0 is ahead; 0 until rank 0 has answered."""
        return self._control_plane.clock_offset.seconds

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` with each segment that has run from now on.

        It is called on the engine thread, or by a thread that waits and has made a short call.
        Returns a function that removes the observer.
        """
        executor = self._executor
        executor.observers = (*executor.observers, observer)

        def remove() -> None:
            executor.observers = tuple(o for o in executor.observers if o is not observer)

        return remove

    def shutdown(self, reason: str = "") -> None:
        """Depart from the job. Returns when no other rank waits for this one any more.

        The thread continues for as long as ranks below this one in the control tree need it. Errors
        of ranks that need this one say the `reason`, as in "rank 1 has ended by ...".
        """
        self.begin_shutdown(reason)
        self.departed.wait()

    def begin_shutdown(self, reason: str = "") -> None:
        """Depart as `shutdown`, without waiting: `departed` is set at the end."""
        self._departure_reason = reason
        self._shutdown_requested.set()
        if self._short_calls is not None:
            self._short_calls.close()
        self._transport.wake()

    def abandon(self, error: HorovodInternalError) -> None:
        """Fail all handles, pending and later ones, with `error`; any thread, never waits.

        Waits of the engine thread end within `CHECK_SECONDS`, also when the peer is only silent.
        The connections are closed. Without effect after the first call, and after a failure.
        """
        if self._control_plane.abandoned is None:
            self._control_plane.abandoned = error
            self._transport.wake()

    @property
    def finished(self) -> bool:
        """Whether the thread has finished, since no other rank needs this engine any more."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Sleep until the thread has finished."""
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        try:
            log.debug("rank %d: the engine starts; hosts %s", self.rank, self.topology.hosts)
            self._control_plane.clock_offset.ask()
            if self._capabilities:
                self._control_plane.on_capabilities(Capabilities(self.rank, self._capabilities))
            while not self._control_plane.finished:
                self._cycle()
            self._close(HorovodInternalError(SHUT_DOWN))
        except BaseException as error:  # The handles of every rank must fail with the reason.
            self._fail(self._reason(error))

    def _reason(self, error: BaseException) -> HorovodInternalError:
        """Return the error for the handles of all ranks, which names the rank at fault."""
        if self._control_plane.abandoned is not None:
            return self._control_plane.abandoned
        if isinstance(error, PeerLostError):
            return self._control_plane.blame(error)
        if isinstance(error, StalledError):
            self.on_stall(error.late)
            return HorovodInternalError(str(error), rank=error.rank)
        if not isinstance(error, HorovodInternalError):
            log.error("the engine of rank %d failed", self.rank, exc_info=error)
            text = f"the engine of rank {self.rank} failed: {type(error).__name__}: {error}"
            return HorovodInternalError(text, rank=self.rank)
        if error.rank is None:
            return HorovodInternalError(str(error), rank=self.rank)
        return error

    def _cycle(self) -> None:
        """Sleep until something happens, negotiate, and execute at most one order.

        One order at a time lets messages that came meanwhile be answered between two segments.
        """
        self._check_devices()
        timeout = self._timeout()
        with self._timeline.receiving(sleeps=timeout != 0):
            self._control_plane.receive(timeout)
        self._report_entries(gathers=not self._control_plane.orders)
        self._control_plane.pass_on()
        if self._control_plane.orders:
            self._obey(self._control_plane.orders.popleft())
            # Executing an order can produce a report, which can complete further tensors.
            self._control_plane.pass_on()
            return
        if self._control_plane.stalls.asked:
            waits = self._pending.waits()  # Before the report, which has all that threads did then.
            self._report_entries(gathers=False)
            self._control_plane.pass_on()
            self._control_plane.stalls.answer(waits)
        self._control_plane.stalls.inspect()

    def _negotiate_meanwhile(self) -> None:
        """Receive, report and pass on, but execute no order, while a collective waits.

        [Note: negotiation while a collective waits]
        A collective runs on the engine thread, and may wait long for a slow peer. The engine then
        must still negotiate, for three reasons. A leader or rank 0 that is silent would stop ranks
        that take no part in this collective. Tensors that become ready meanwhile can be agreed on,
        so that their segments start when this one is complete. And only the control plane hears
        that a rank has failed far away (Abort, a lost connection): that error, raised here, ends a
        wait for data that will never come.

        So every wait of the data plane calls this method now and then, on the engine thread itself:
        no lock is needed, and the transport stays single-threaded. Orders are queued and not
        executed, since a segment must not start inside another one: buffers and the order of
        messages between two ranks are shared. Anything that runs here must therefore be prepared to
        see a segment half done, and must not wait.
        """
        self._control_plane.receive(0)
        self._check_devices()
        self._report_entries(gathers=False)
        self._control_plane.pass_on()

    def _note_device_error(self, error: HorovodInternalError) -> None:
        """Let the engine thread fail. Any thread, never waits."""
        self._device_error = error
        self._transport.wake()

    def _check_devices(self) -> None:
        """Raise `HorovodInternalError` where a device library has failed."""
        error, self._device_error = self._device_error, None
        if error is not None:
            raise self._control_plane.reason_for(error)

    def _report_entries(self, *, gathers: bool) -> None:
        """Report the entries of the inbox, and after them the departure if one is requested.

        More may gather before, where this thread has no order to execute meanwhile.
        """
        while self._launcher_orders:
            self._control_plane.launcher_orders.on_order(self._launcher_orders.popleft())
        departs = self._shutdown_requested.is_set()
        entries = self._inbox.drain(everything=departs, gathers=gathers)
        if entries:
            if self._short_calls is not None:
                self._short_calls.decline(entries)
            self._control_plane.report(self._memory.reports(entries))
        if departs and not self._departure_sent:
            self._departure_sent = True
            self._control_plane.depart(self.rank, self._departure_reason)

    def _timeout(self) -> float | None:
        """Return how long to sleep for messages: 0 while there is work, None without a limit."""
        stalls = self._control_plane.stalls
        stalls.wakes_at = None
        if self._control_plane.orders or not self._inbox.may_sleep():
            return 0
        leaves = self._shutdown_requested.is_set() and not self._departure_sent
        return 0 if leaves or stalls.asked else stalls.timeout()

    # -- orders

    def _obey(self, order: Order) -> None:
        if isinstance(order, Segment):
            self._run_segment(order)
        elif isinstance(order, Eviction):
            unanswered = self._memory.evict(order)
            log.debug("rank %d: %s; reported again: %d", self.rank, order, len(unanswered))
            if unanswered:
                self._control_plane.report(self._memory.reports(unanswered))
        elif isinstance(order, Retune):
            log.debug("rank %d: from here on %s", self.rank, order)
            self._inbox.gather_for(order.cycle_time_ms / 1000)
            self._executor.retune(order.allreduce, order.piece_bytes)
            if self._short_calls is not None:
                self._short_calls.forget()
            if self._autotuning is not None:
                self._autotuning.settings_applied()
        elif isinstance(order, Figures):
            self.backends.choice.set_model(Model(*order.values))
        elif isinstance(order, DeviceRuns):
            self.devices.agreement.follow(order.runs)
        elif order.rank == self.rank:
            log.debug("rank %d takes part in nothing any more", self.rank)
            self._pending.close(HorovodInternalError(SHUT_DOWN))
            self.departed.set()

    def _run_segment(self, segment: Segment) -> None:
        members = self.process_sets.find(segment.process_set_id)
        if members is None or self.rank not in members:
            return
        first = segment.items[0]
        if not isinstance(first, int) and first.request.parties:  # It has no bit to remember.
            if self.rank not in first.request.parties:
                if not first.error and SPECS[first.request.collective].run is None:
                    self._answer(first, None)  # All ranks know the sets that others form.
                return
            members = first.request.parties
        responses, entries = self._memory.resolve(segment)
        if self._short_calls is not None:
            self._short_calls.agree(entries)
        if self._timeline.enabled:
            for response in responses:
                self._timeline.negotiate_end(response.request.name)
        if self._debug:
            self._log_slow(entries)
        if responses[0].error:
            log.debug("rank %d: %s", self.rank, responses[0].error)
            if entries[0] is not None:
                error = HorovodInternalError(responses[0].error, job_goes_on=True)
                entries[0].handle.fail(error)
        elif SPECS[responses[0].request.collective].run is None:
            self._answer(responses[0], entries[0])
        else:
            self._timeline.engine("EXECUTE")
            ran = self._executor.run(members, responses, entries, segment.result)
            self._pending.ran(launched=ran)

    def _log_slow(self, entries: Sequence[Entry | None]) -> None:
        """Log entries that have waited long for other ranks."""
        now = time.monotonic()
        for entry in entries:
            if entry is not None and entry.enqueued and now - entry.enqueued > SLOW_SECONDS:
                log.debug(
                    "rank %d: %s '%s' waited %.1f s for other ranks", self.rank,
                    entry.request.collective, entry.request.name, now - entry.enqueued,
                )  # fmt: skip

    def _answer(self, response: Response, entry: Entry | None) -> None:
        """Complete a collective that moves no data: the negotiation itself was the collective."""
        request = response.request
        effect = SPECS[request.collective].effect
        value: int | FormedSet | None = None
        if effect is Effect.JOIN:
            value = response.last_joined
            log.debug("rank %d: all have joined, rank %d last", self.rank, value)
            if self._short_calls is not None:
                self._short_calls.forget()  # Only some ranks have counted calls meanwhile.
                self._short_calls.take_part()
        elif SPECS[request.collective].changes_sets:
            before = self.process_sets.all()
            change = change_sets(self.process_sets, response)
            log.debug("rank %d: '%s': %s", self.rank, request.name, change)
            for removed in change.gone:
                self._drop_set(removed)
                self.devices.forget(tuple(before[removed]))
            value = change.formed
            if effect is Effect.ADD_SET and entry is not None:
                process_set_id = self.process_sets.id_of(entry.request.shape)
                assert process_set_id is not None
                value = FormedSet(process_set_id, 0, process_set_id in change.made)
        if entry is not None:
            entry.complete(value)

    def _drop_set(self, process_set_id: int) -> None:
        """Forget a process set that was removed, and fail the entries that are pending in it."""
        self._memory.forget_set(process_set_id)
        dropped = self._pending.pop_set(process_set_id)
        self._inbox.remove(dropped)
        for entry in dropped:
            entry.handle.fail(
                HorovodInternalError(f"'{entry.request.name}': Process set has been removed")
            )

    # -- closing

    def _fail(self, error: HorovodInternalError) -> None:
        self.failed = True
        log.debug("rank %d: the job fails, by rank %s: %s", self.rank, error.rank, error)
        try:
            self._control_plane.abort(error)
        finally:
            self._close(error)

    def _close(self, error: HorovodInternalError) -> None:
        try:
            reason = error if self.failed else None
            self._pending.close(error, lambda: self.devices.close(reason))
        finally:
            if self._short_calls is not None:  # A thread that waits for others shall not any more.
                self._short_calls.close()
                self._short_calls.release()
            self.departed.set()
            self._transport.close()
