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
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.base import Members
from hvdlite.common.collectives.table import reduction_of
from hvdlite.common.devices.agreement import Agreement
from hvdlite.common.devices.collectives import (
    COLLECTIVES,
    DeviceOperand,
    DeviceRun,
    nothing_to_move,
)
from hvdlite.common.devices.communicators import connect
from hvdlite.common.devices.finalizer import Finalizer, Launched
from hvdlite.common.devices.host_paths import HostPaths
from hvdlite.common.devices.interface import (
    Buffer,
    Communicator,
    Context,
    DeviceLibrary,
    DeviceOutput,
    Event,
    Stream,
)
from hvdlite.common.devices.neutral import neutral
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import Request, Response
from hvdlite.common.transport.base import do_nothing

log = logging.getLogger("hvdlite")
# Called once when the device has done a segment, or with why it never will.
End = Callable[[HorovodInternalError | None], None]


class _Device(NamedTuple):
    """The device of this rank for one library."""

    context: Context
    stream: Stream
    finalizer: Finalizer


class _EntryOperand:
    """A tensor that this rank has."""

    def __init__(self, entry: Entry, outputs: list[DeviceOutput]) -> None:
        self._entry = entry
        self._outputs = outputs
        self.response = entry.response
        self.splits = entry.splits

    @property
    def received_splits(self) -> tuple[int, ...]:
        return self._entry.received_splits

    @received_splits.setter
    def received_splits(self, splits: tuple[int, ...]) -> None:
        self._entry.received_splits = splits

    @property
    def source(self) -> Buffer:
        assert self._entry.device_input is not None
        return self._entry.device_input.buffer

    def target(self, shape: tuple[int, ...]) -> Buffer:
        output: DeviceOutput = self._entry.device_output(shape)
        self._outputs.append(output)
        return output.buffer


class _JoinedOperand:
    """A tensor that this rank does not have, as it has joined: neutral data."""

    received_splits: tuple[int, ...] = ()

    def __init__(self, response: Response, device: _Device, members: int) -> None:
        self.response = response
        self.splits = (0,) * members
        self._device = device

    @property
    def source(self) -> Buffer:
        request, (context, stream, _) = self.response.request, self._device
        value, count = neutral(request)
        buffer = context.empty(count, request.dtype)
        context.run(stream, lambda: context.fill(buffer, value))
        return buffer

    def target(self, shape: tuple[int, ...]) -> Buffer:
        count = 1
        for length in shape:
            count *= length
        return self._device.context.empty(count, self.response.request.dtype)


class DevicePlane:
    """The devices and communicators of one rank. Engine thread, but for `agreement`."""

    def __init__(
        self,
        rank: int,
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
        self._rank = rank
        self._local_rank = local_rank
        self._libraries = {library.name: library for library in libraries}
        self._host = host
        self._completes_on_host = completes_on_host
        self._negotiate = negotiate
        self._on_error = on_error
        self._devices: dict[str, _Device] = {}
        # By library and members; None where they cannot be connected, and everything is staged.
        self._communicators: dict[tuple[str, tuple[int, ...]], Communicator | None] = {}
        # Fusion buffers by members, dtype and name.
        self._buffers: dict[tuple[tuple[int, ...], str, str], Buffer] = {}

    def run(
        self,
        members: Members,
        responses: Sequence[Response],
        entries: Sequence[Entry | None],
        end: End,
    ) -> bool:
        """Queue a segment on the device; False if it is to be staged, on all members alike.

        Raises what a library raises; the job cannot go on then.
        """
        request = responses[0].request
        name = self.agreement.library_for(request)
        if name is None:
            return False
        device = self._device(name, entries)
        communicator = self._communicator(name, device, members)
        if communicator is None:
            return False
        outputs: list[DeviceOutput] = []
        present = [entry for entry in entries if entry is not None]
        context, stream, finalizer = device
        for entry in present:
            assert entry.device_input is not None
            context.wait(stream, entry.device_input.ready)
        with context.allocating(stream):
            operands: list[DeviceOperand] = [
                _JoinedOperand(response, device, members.size)
                if entry is None
                else _EntryOperand(entry, outputs)
                for response, entry in zip(responses, entries, strict=True)
            ]
            run = DeviceRun(
                context=context,
                communicator=communicator,
                stream=stream,
                members=members,
                operands=operands,
                reduction=reduction_of(request, members.size),
                buffer=lambda slot, count: self._buffer(context, members, request, slot, count),
                exchange_counts=lambda counts: self._host.exchange_counts(members, counts),
            )
            work = COLLECTIVES[request.collective].prepare(run)
        if not nothing_to_move(run):
            context.run(stream, work)
            context.run(stream, lambda: _unpack(outputs))
        event = context.record(stream)
        self._keep(device, present, outputs, event)
        waits = self._completes_on_host or context.threads_wait
        finalizer.add(
            Launched(
                event,
                communicator,
                f"{request.collective} '{request.name}' on rank {self._rank}",
                _ending(present, end, waits=waits),
            )
        )
        if not waits:
            for entry in reversed(present):
                entry.complete_on_device(event)
        return True

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
            device = _Device(context, context.new_stream(), Finalizer(name, self._on_error))
            self._devices[library] = device
        return device

    def _communicator(self, name: str, device: _Device, members: Members) -> Communicator | None:
        key = name, members.ranks
        if key not in self._communicators:
            outcome = connect(
                self._libraries[name],
                device.context,
                members,
                lambda text: self._host.gather(members, text),
                self._negotiate,
            )
            self._communicators[key] = outcome.communicator
            if outcome.communicator is None and members.index == 0:
                log.warning(
                    "tensors of ranks %s go through host memory: %s",
                    list(members.ranks), outcome.reason,
                )  # fmt: skip
        return self._communicators[key]

    def _buffer(
        self, context: Context, members: Members, request: Request, name: str, count: int
    ) -> Buffer:
        key = members.ranks, request.dtype, name
        known = self._buffers.get(key)
        if known is None or known.numel() < count:
            known = self._buffers[key] = context.empty(count, request.dtype)
        return known[:count]

    def close(self, error: HorovodInternalError | None) -> None:
        """End everything: with an error at once, otherwise when the devices are done."""
        communicators = [each for each in self._communicators.values() if each is not None]
        if error is not None:
            for device in self._devices.values():
                device.finalizer.fail(error)
            for communicator in communicators:
                _quietly(communicator.abort)
        for device in self._devices.values():
            device.finalizer.close()
            device.context.free_stream(device.stream)
        if error is None:
            for communicator in communicators:
                _quietly(communicator.close)
        self._communicators.clear()
        self._buffers.clear()
        self._devices.clear()
        self._negotiate = do_nothing  # The engine refers to this plane.
        self._on_error = _ignore


def _unpack(outputs: Sequence[DeviceOutput]) -> None:
    for output in outputs:
        output.unpack()


def _ending(present: Sequence[Entry], end: End, *, waits: bool) -> End:
    """Return what the finalizer calls: the handles complete then, if a thread `waits`."""

    def ended(error: HorovodInternalError | None) -> None:
        end(error)
        for entry in reversed(present):
            if error is not None:
                entry.handle.spoil(error)
            elif waits:
                entry.complete_on_device(None)

    return ended


def _ignore(error: HorovodInternalError) -> None:
    """Do nothing: the engine has ended."""


def _quietly(step: Callable[[], None]) -> None:
    """Do a step of an ending. What it raises adds nothing."""
    try:
        step()
    except Exception as error:
        log.debug("at the end of a communicator: %s", error)
