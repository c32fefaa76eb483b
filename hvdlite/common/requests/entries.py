"""Entries, which a rank has enqueued, and the record of a segment that has run."""

from __future__ import annotations

import re
from array import array as numbers
from collections.abc import Callable, Container, Sequence
from struct import pack_into
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdlite.common.requests.handles import Event, Handle
from hvdlite.common.requests.messages import NO_BIT, Request, Response

Array = NDArray[Any]


Key = tuple[int, str]  # (process set id, name)


def key_of(request: Request) -> Key:
    """Return the key under which the entry of a request is pending."""
    return request.process_set_id, request.name


class Series:
    """Calls that differ by their numbers alone, such as those of a process group of PyTorch.

    Their names end with the number. What one of them has found out serves the next.
    """

    __slots__ = ("request", "short")

    def __init__(self, request: Request) -> None:
        """`request` has the name without a number."""
        self.request = request
        self.short: Any = None  # What short calls know of the series.

    def key(self, number: int) -> Key:
        return self.request.process_set_id, f"{self.request.name}.{number}"

    def numbered(self, number: int) -> Request:
        return self.request._replace(name=f"{self.request.name}.{number}")


class Entry:
    """An enqueued call on this rank. Entries with a tensor override the data methods."""

    splits: tuple[int, ...] = ()
    received_splits: tuple[int, ...] = ()
    size_bytes = 0  # The size of the input.
    # Where the memory begins that is read and written, if this is contiguous memory of the host
    # and the input is the output: backends in compiled code need no array then.
    address: int | None = None
    # The number of elements; set where there is an address.
    count = 0
    # When it was enqueued, in seconds of `time.monotonic`. Set only while there are observers.
    enqueued = 0.0
    # Where its request is one of many, and which.
    series: Series | None = None
    number = 0
    # Where the tensor is on a device: its `DeviceInput` (common/devices/interface.py).
    device_input: Any = None
    response: Response  # Set when the coordinator has answered, before the entry is run.

    def __init__(self, request: Request, handle: Handle | None = None) -> None:
        """Complete `handle` when it has run, a new one by default."""
        self.request = request
        self.key = key_of(request)
        self.handle = Handle() if handle is None else handle
        # The bit under which it was reported; NO_BIT if it was reported in full, or not yet.
        self.sent_bit = NO_BIT

    def wait(self) -> None:
        """Sleep until the input may be read."""

    @property
    def input(self) -> Array:
        raise TypeError(f"{self.request.collective} has no tensor")

    def output(self, shape: tuple[int, ...]) -> Array:
        """Return the output of this shape as a flat array."""
        raise TypeError(f"{self.request.collective} has no tensor")

    def device_output(self, shape: tuple[int, ...]) -> Any:
        """Return the output of this shape as a `DeviceOutput`, where there is a device input."""
        raise TypeError(f"{self.request.collective} '{self.request.name}' is not on a device")

    def complete(self, value: Any = None) -> None:
        self.handle.complete(value)

    def complete_on_device(self, event: Event | None) -> None:
        """Complete the handle: the device has the result when `event` occurs; None: it has."""
        self.handle.complete(event=event)


class Bundle(Entry):
    """Entries whose data are exchanged as those of one; see [Note: short calls].

    The entries are reduced in place, in contiguous memory of the host. The bundle itself is never
    pending, nor waited for.
    """

    def __init__(self, request: Request, entries: Sequence[Entry]) -> None:
        super().__init__(request)
        self.entries = entries
        self.names = tuple(entry.request.name for entry in entries)
        self.sizes = numbers("q", [entry.size_bytes for entry in entries])
        self.size_bytes = sum(self.sizes)
        self.count = sum(entry.count for entry in entries)
        self.places = numbers("q", bytes(self.sizes.itemsize * len(entries)))

    def renew(self) -> None:
        addresses = [entry.address or 0 for entry in self.entries]
        pack_into(f"{len(addresses)}q", self.places, 0, *addresses)
        self.enqueued = self.entries[0].enqueued


# Suffixes that the name of a gradient gets, by the collective that carries it; and whether a name
# without one can be that of a gradient.
_GRADIENT_PARTS = {
    "allreduce": (re.compile(r"_\d+of\d+$"), True),  # A member of a grouped call.
    "allgather": (re.compile(r"\.(indices|values)$"), False),  # A part of a sparse gradient.
}


class SegmentRun(NamedTuple):
    """One segment that has run: which tensors it held, and when."""

    names: tuple[str, ...]
    collective: str
    bytes: int  # Of the inputs of this rank.
    start: float  # Seconds of `time.monotonic`, as all times here.
    end: float
    members: tuple[int, ...] = ()  # The global ranks that took part.
    ready: float = 0.0  # When this rank enqueued the last tensor; 0 if nobody observed it then.

    def gradient_of(self, names: Container[str]) -> str | None:
        """Return the first of `names`, the names of gradients, that is in this segment, or None.

        Dense gradients are reduced; the parts of sparse ones are gathered. Other collectives may
        carry the name of a gradient without being one, such as the broadcast of its parameter.
        """
        part, also_whole = _GRADIENT_PARTS.get(self.collective, (None, False))
        if part is None:
            return None
        for name in self.names:
            tensor_name = name.partition(".")[2]  # The collective stands before the dot.
            if also_whole and tensor_name in names:
                return tensor_name
            whole, parts = part.subn("", tensor_name)
            if parts and whole in names:
                return whole
        return None


Observer = Callable[[SegmentRun], None]
