"""The device data plane of one rank: it runs segments whose tensors are on a device, there.

[Note: two clocks]
The engine runs a segment when all ranks have made the call, and that is before the device has
computed the tensors, let alone reduced them. So the engine only queues: the communication stream
waits for the ready events of the tensors, and the handles complete at once with an event behind the
collective. Whoever synchronizes lets the current stream of the device wait for that event. All
ranks queue in the one total order, so the libraries' collectives cannot block each other. Only the
finalizer thread waits for the device, to see that work was done or that a library has failed.

Where the user must not use a result before it is known to be right (elastic jobs), or a device has
no streams that could wait, the finalizer completes the handles instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.base import Members
from hvdlite.common.collectives.table import reduction_of
from hvdlite.common.devices.agreement import Agreement
from hvdlite.common.devices.collectives import (
    COLLECTIVES,
    DeviceOperand,
    DeviceRun,
    EntryOperand,
    JoinedOperand,
    nothing_to_move,
)
from hvdlite.common.devices.communicators import CommunicatorTable, Layers, quietly
from hvdlite.common.devices.finalizer import Finalizer, Launched, described, ignore
from hvdlite.common.devices.hierarchy import HierarchicalAllreduce, HostPaths
from hvdlite.common.devices.interface import (
    Buffer,
    Communicator,
    Context,
    DeviceLibrary,
    DeviceOutput,
    Event,
    Stream,
    TimedEvent,
)
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request, Response
from hvdlite.common.transport.base import do_nothing

# The clock of a device: when on the host's clock its events have occurred.
#
# A device tells how much time lies between two of its events. One event, whose time on the host's
# clock is known, makes times of that. It is taken anew after a while, as the clocks drift.
REFERENCE_SECONDS = 60.0  # How long a reference is good: clocks drift by some microseconds then.
ATTEMPTS = 3  # The quickest one is the most exact.


class _Reference(NamedTuple):
    event: TimedEvent
    at: float  # Seconds of `time.monotonic`.
    uncertain: float


class DeviceClock:
    """Converts the times of one device. Used by one thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._reference: _Reference | None = None

    def span(self, begin: TimedEvent, end: TimedEvent) -> tuple[float, float]:
        """Return when two events have occurred, in seconds of `time.monotonic`."""
        reference = self._reference
        if reference is None or time.monotonic() - reference.at > REFERENCE_SECONDS:
            stream = self._context.new_stream()  # On which nothing else is queued.
            try:
                attempts = [self._attempt(stream) for _ in range(ATTEMPTS)]
            finally:
                self._context.free_stream(stream)
            reference = self._reference = min(attempts, key=lambda each: each.uncertain)
        start = reference.at + begin.seconds_since(reference.event)
        return start, start + end.seconds_since(begin)

    def _attempt(self, stream: object) -> _Reference:
        before = time.monotonic()
        event = self._context.record_timed(stream)
        event.synchronize()
        after = time.monotonic()
        return _Reference(event, after, after - before)  # A thread wakes soon after the event.


log = logging.getLogger("hvdlite")
# When the device began a segment and ended it, in seconds of `time.monotonic`.
Span = tuple[float, float]
# Called once when the device has done a segment, or with why it never will; with the times if
# these were asked for.
End = Callable[[HorovodInternalError | None, Span | None], None]


class _Device(NamedTuple):
    context: Context
    stream: Stream
    finalizer: Finalizer
    clock: DeviceClock  # Of the finalizer's thread.


class DevicePlane:
    """The devices and communicators of one rank. Engine thread, but for `agreement`."""

    def __init__(
        self,
        local_rank: int,
        libraries: Iterable[DeviceLibrary],
        host: HostPaths,
        *,
        completes_on_host: bool,
        negotiate: Callable[[], None],
        on_error: Callable[[HorovodInternalError], None],
    ) -> None:
        """Call `negotiate` while a library connects; report its errors by `on_error`."""
        self.agreement = Agreement()
        self._local_rank = local_rank
        self._libraries = {library.name: library for library in libraries}
        self._host, self._completes_on_host, self._on_error = host, completes_on_host, on_error
        self._devices: dict[str, _Device] = {}
        self._communicators = CommunicatorTable(host.gather, negotiate)
        self._hierarchy = HierarchicalAllreduce(host, negotiate, on_error)
        # The communicators of process sets that were removed, until they are closed.
        self._leaving: list[Communicator] = []
        # Fusion buffers by library, members, dtype and slot. Libraries have streams of their own,
        # which do not wait for each other.
        self._buffers: dict[tuple[str, tuple[int, ...], str, str], Buffer] = {}

    def library_of(self, kind: str) -> DeviceLibrary | None:
        """Return the library of this rank for a kind of device, agreed on or not."""
        libraries = self._libraries.values()
        return next((each for each in libraries if each.device_kind == kind), None)

    def run(
        self,
        members: Members,
        responses: Sequence[Response],
        entries: Sequence[Entry | None],
        end: End,
        *,
        timed: bool = False,
    ) -> bool:
        """Queue a segment on the device; False if it is to be staged, on all members alike.

        With `timed` the device tells `end` when it ran. Raises what a library raises; the job
        cannot go on then.
        """
        request = responses[0].request
        name = self.agreement.library_for(request)
        if name is None:
            return False
        device = self._device(name, entries)
        way = self._way(name, device.context, request, members)
        if way is None:
            return False
        communicator, layers = way
        outputs: list[DeviceOutput] = []
        present = [entry for entry in entries if entry is not None]
        context, stream, finalizer, clock = device
        for entry in present:
            assert entry.device_input is not None
            context.wait(stream, entry.device_input.ready)
        with context.allocating(stream):
            operands: list[DeviceOperand] = [
                JoinedOperand(response, context, stream, members.size)
                if entry is None
                else EntryOperand(entry, outputs)
                for response, entry in zip(responses, entries, strict=True)
            ]
            run = DeviceRun(
                context=context,
                communicator=communicator,
                stream=stream,
                members=members,
                operands=operands,
                reduction=reduction_of(request, members.size),
                buffer=lambda slot, count: self._buffer(
                    context, (name, members.ranks, request.dtype, slot), count
                ),
                exchange_counts=lambda counts: self._host.exchange_counts(members, counts),
            )
            queue = self._prepared(run, layers)
        begin = context.record_timed(stream) if timed else None
        if not nothing_to_move(run):
            queue()
            context.run(stream, lambda: _unpack(outputs))
        span = None if begin is None else _spanning(clock, begin, context.record_timed(stream))
        event = context.record(stream)
        self._keep(device, present, outputs, event)
        waits = self._completes_on_host or context.threads_wait
        finalizer.add(
            Launched(
                event,
                communicator,
                described(request, members),
                _ending(present, end, span, waits=waits),
            )
        )
        if not waits:
            for entry in reversed(present):
                entry.complete_on_device(event)
        return True

    def _way(
        self, name: str, context: Context, request: Request, members: Members
    ) -> tuple[Communicator, Layers | None] | None:
        """Return the communicator that runs a request, with the layers if it takes these."""
        library = self._libraries[name]
        if self.agreement.in_layers(request):
            layers = self._communicators.layers(library, context, members)
            if layers is not None and layers.communicator is not None:
                return layers.communicator, layers
        communicator = self._communicators.find(library, context, members)
        return None if communicator is None else (communicator, None)

    def _prepared(self, run: DeviceRun, layers: Layers | None) -> Callable[[], None]:
        """Allocate what a segment needs; return what queues its work."""
        if layers is not None:
            return self._hierarchy.prepare(run, layers)
        work = COLLECTIVES[run.operands[0].response.request.collective].prepare(run)
        return lambda: run.context.run(run.stream, work)

    def _keep(
        self,
        device: _Device,
        present: Sequence[Entry],
        outputs: Sequence[DeviceOutput],
        event: Event,
    ) -> None:
        """Keep memory until the stream is done with it, and order its next uses behind `event`."""
        for entry in present:
            assert entry.device_input is not None
            device.context.keep(entry.device_input.buffer, device.stream)
        for output in outputs:
            device.context.keep(output.buffer, device.stream)
            output.written_by(event)

    def _device(self, library: str, entries: Sequence[Entry | None]) -> _Device:
        device = self._devices.get(library)
        if device is None:
            inputs = [entry.device_input for entry in entries if entry is not None]
            place = inputs[0].device if inputs and inputs[0] is not None else None
            context = self._libraries[library].context(place, self._local_rank)
            name = f"hvdlite-device-{library}"
            begin_thread = getattr(context, "begin_thread", do_nothing)
            finalizer = Finalizer(name, self._on_error, begin_thread)
            device = _Device(context, context.new_stream(), finalizer, DeviceClock(context))
            self._devices[library] = device
        return device

    def _buffer(
        self, context: Context, key: tuple[str, tuple[int, ...], str, str], count: int
    ) -> Buffer:
        known = self._buffers.get(key)
        if known is None or known.numel() < count:
            known = self._buffers[key] = context.empty(count, key[2])
        return known[:count]

    def forget(self, ranks: tuple[int, ...]) -> None:
        """Free what the members of a process set have, which was removed. All of them call this.

        Communicators are closed behind all work that is queued, by the finalizer: they may wait
        for other members.
        """
        for key in [key for key in self._buffers if key[1] == ranks]:
            del self._buffers[key]
        for library, communicator in self._communicators.pop(ranks):
            context, stream, finalizer, _ = self._devices[library]
            what = f"the end of the process set {list(ranks)}"
            self._leaving.append(communicator)
            closing = _closing(communicator, self._leaving)
            finalizer.add(Launched(context.record(stream), communicator, what, closing))

    def close(self, error: HorovodInternalError | None) -> None:
        """End everything: with an error at once, otherwise when the devices are done.

        The devices have left all memory afterwards, unless they hang.
        """
        if error is None:
            drained = [device.finalizer.drain() for device in self._devices.values()]
            if not all(drained):
                error = HorovodInternalError("hvdlite has been shut down")
        if error is not None:
            for device in self._devices.values():
                device.finalizer.fail(error)
            self._communicators.abort()
            for communicator in tuple(self._leaving):
                quietly(communicator.abort)
            for device in self._devices.values():
                device.finalizer.close(partial(device.context.record, device.stream))
        for device in self._devices.values():
            quietly(partial(device.context.free_stream, device.stream))  # It may have failed.
        self._communicators.close()
        self._hierarchy.close()
        self._buffers.clear()
        self._devices.clear()
        self._on_error = ignore  # The engine refers to this plane.


def _closing(
    communicator: Communicator, leaving: list[Communicator]
) -> Callable[[HorovodInternalError | None], None]:
    """Return what the finalizer calls when a communicator has no work any more."""

    def ended(error: HorovodInternalError | None) -> None:
        quietly(communicator.close if error is None else communicator.abort)
        leaving.remove(communicator)

    return ended


def _unpack(outputs: Sequence[DeviceOutput]) -> None:
    for output in outputs:
        output.unpack()


def _spanning(clock: DeviceClock, begin: TimedEvent, end: TimedEvent) -> Callable[[], Span | None]:
    """Return what tells the times of a segment when it was done; None if the device fails."""

    def span() -> Span | None:
        try:
            return clock.span(begin, end)
        except Exception as error:
            log.debug("a device does not tell the times of its events: %s", error)
            return None

    return span


def _ending(
    present: Sequence[Entry], end: End, span: Callable[[], Span | None] | None, *, waits: bool
) -> Callable[[HorovodInternalError | None], None]:
    """Return what the finalizer calls: the handles complete then, if a thread `waits`."""

    def ended(error: HorovodInternalError | None) -> None:
        end(error, span() if span is not None and error is None else None)
        for entry in reversed(present):
            if error is not None:
                entry.handle.spoil(error)
            elif waits:
                entry.complete_on_device(None)

    return ended
