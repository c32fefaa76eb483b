"""A CUDA device without a framework: its streams, events and memory by the CUDA runtime alone."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdlite.common.devices.interface import HostMemory, Stream
from hvdlite.common.devices.nccl.cudart import (
    BLOCKING_EVENT,
    BY_ADDRESSES,
    EVENT_WITHOUT_TIME,
    HOST_TO_DEVICE,
    NOT_BLOCKING_STREAM,
    NOT_READY,
    SUCCESS,
    CudaRuntime,
)
from hvdlite.common.meeting.placement import host_identity
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import do_nothing

log = logging.getLogger("hvdlite")
DEFAULT_STREAM = 0
Scale = Callable[["DeviceMemory", float, Stream], None]


class CudaEvent:
    """A point in a stream."""

    flags = BLOCKING_EVENT | EVENT_WITHOUT_TIME

    def __init__(self, cuda: CudaRuntime, failed: Callable[[str], None]) -> None:
        """Call `failed` with a text when it is seen that the device has failed."""
        self._cuda = cuda
        self._failed = failed
        self._event = cuda.new("cudaEventCreateWithFlags", self.flags)

    def record(self, stream: Stream) -> None:
        """Let it occur after the work that is queued on a stream."""
        self._cuda.do("cudaEventRecord", self._event, stream)

    def make_wait(self, stream: Stream) -> None:
        self._cuda.do("cudaStreamWaitEvent", stream, self._event, 0)

    def query(self) -> bool:
        """Return whether it has occurred, or never will as the device has failed."""
        return self._ended(self._cuda.call("cudaEventQuery", self._event))

    def synchronize(self) -> None:
        """Sleep until it has occurred."""
        self._ended(self._cuda.call("cudaEventSynchronize", self._event))

    def _ended(self, code: int) -> bool:
        if code != SUCCESS:
            self._cuda.call("cudaGetLastError")  # Who asks next shall not take it for their own.
        if code not in (SUCCESS, NOT_READY):
            self._failed(self._cuda.error_text(code))
        return code != NOT_READY

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self._cuda.call("cudaEventDestroy", self._event)


class TimedCudaEvent(CudaEvent):
    """An event that knows when it has occurred."""

    flags = BLOCKING_EVENT

    def seconds_since(self, earlier: TimedCudaEvent) -> float:
        return self._cuda.milliseconds(earlier._event, self._event) / 1000


class ForeignEvent(CudaEvent):
    """An event that somebody else has made, and destroys later than this is used."""

    def __init__(self, cuda: CudaRuntime, event: int) -> None:
        self._cuda = cuda
        self._failed = _ignore
        self._event = event

    def __del__(self) -> None:
        """Do nothing."""


def _ignore(text: str) -> None:
    """Do nothing: the event behind the collective tells of the same failure."""


class _Allocation:
    """Memory of a device, which belongs to a stream and is freed behind the work on it."""

    def __init__(self, context: CudaContext, count: int, stream: Stream) -> None:
        self._context = context
        self._stream = stream
        self.address = context.cuda.new("cudaMallocAsync", count, stream)
        self.others: set[Stream] = set()  # Streams that use the memory too.

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._context.free(self.address, self._stream, self.others)


class _Pinned:
    """Memory of the host that copies of a device reach without waiting."""

    def __init__(self, cuda: CudaRuntime, count: int) -> None:
        self._cuda = cuda
        self.address = cuda.new("cudaHostAlloc", max(count, 1), 0)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._cuda.call("cudaFreeHost", self.address)


class DeviceMemory:
    """Flat memory of one dtype on a device: a `Buffer`."""

    def __init__(self, address: int, count: int, dtype: str, owner: object) -> None:
        """Describe `count` elements, which exist as long as `owner` does."""
        self.dtype = dtype
        self.owner = owner
        self._address, self._count = address, count

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self._address

    def numel(self) -> int:
        """Return the number of elements."""
        return self._count

    @property
    def nbytes(self) -> int:
        return self._count * numpy_dtype(self.dtype).itemsize

    def __getitem__(self, part: slice) -> DeviceMemory:
        start, stop, _ = part.indices(self._count)
        address = self._address + start * numpy_dtype(self.dtype).itemsize
        return DeviceMemory(address, max(stop - start, 0), self.dtype, self.owner)


class CudaContext:
    """One device of one rank; see `hvdlite.common.devices.interface.Context` for the methods."""

    threads_wait = False

    def __init__(self, cuda: CudaRuntime, device: int) -> None:
        self.cuda = cuda
        self.device = device
        self.identity = f"{host_identity()} cuda {cuda.bus_id(device)}"
        self.error = ""  # Why the device has failed.
        # Multiplies memory on a stream, and what frees it; the library sets them when it connects.
        self.multiply: Scale | None = None
        self.end_multiply: Callable[[], None] = do_nothing
        self._thread = threading.local()  # Has the stream that a thread queues work on.
        # Memory of the host, which copies may use for as long as there are streams.
        self._pinned: list[_Pinned] = []
        self._streams: set[Stream] = set()  # Those of this context that exist.

    def new_stream(self) -> int:
        with self.cuda.on(self.device):
            stream = self.cuda.new("cudaStreamCreateWithFlags", NOT_BLOCKING_STREAM)
        with self.cuda.stream_lock:
            self._streams.add(stream)
            self.cuda.streams.add(stream)
            before = self.cuda.stream_ends.pop(stream, None)  # Of one that had the same address.
        if before is not None:
            before.make_wait(stream)
        return stream

    def free_stream(self, stream: Stream) -> None:
        """Destroy it; CUDA does what is queued before."""
        with self.cuda.stream_lock:
            self._streams.discard(stream)
            self.cuda.streams.discard(stream)
            self.cuda.stream_ends[stream] = self.record(stream)
            self.cuda.do("cudaStreamDestroy", stream)
            if self._streams:
                return
        self.multiply = None
        self.end_multiply()

    def begin_thread(self) -> None:
        """Let the calling thread ask events of this device, and disturb no other thread."""
        self.cuda.do("cudaSetDevice", self.device)
        self.cuda.begin_thread()

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        with self.allocating(stream):
            work()

    @contextmanager
    def allocating(self, stream: Stream) -> Iterator[None]:
        """Return a context in which new memory belongs to a stream."""
        before = getattr(self._thread, "stream", 0)
        self._thread.stream = stream
        try:
            with self.cuda.on(self.device):
                yield
        finally:
            self._thread.stream = before

    def record(self, stream: Stream) -> CudaEvent:
        """Return an event after all work that is queued on a stream."""
        with self.cuda.on(self.device):
            event = CudaEvent(self.cuda, self._fail)
            event.record(stream)
        return event

    def record_timed(self, stream: Stream) -> TimedCudaEvent:
        """Return an event that knows when it occurs."""
        with self.cuda.on(self.device):
            event = TimedCudaEvent(self.cuda, self._fail)
            event.record(stream)
        return event

    def _fail(self, text: str) -> None:
        self.error = self.error or f"{self.identity}: {text}"

    def wait(self, stream: Stream, event: Any) -> None:
        event.make_wait(stream)

    def empty(self, count: int, dtype: str) -> DeviceMemory:
        """Allocate memory without values."""
        owner = _Allocation(self, count * numpy_dtype(dtype).itemsize, self._thread.stream)
        return DeviceMemory(owner.address, count, dtype, owner)

    def fill(self, buffer: DeviceMemory, value: Any) -> None:
        """Set all elements. Zeros never wait for the device."""
        if value == 0:
            place = buffer.data_ptr(), 0, buffer.nbytes
            self.cuda.do("cudaMemsetAsync", *place, self._thread.stream)
            return
        self.write(buffer, np.full(buffer.numel(), value, numpy_dtype(buffer.dtype)))

    def write(self, buffer: DeviceMemory, values: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous array from the host; it is read before this returns."""
        self._copy(buffer.data_ptr(), values.ctypes.data, values.nbytes, HOST_TO_DEVICE)

    def copy(self, targets: Sequence[DeviceMemory], sources: Sequence[DeviceMemory]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy(target.data_ptr(), source.data_ptr(), source.nbytes, BY_ADDRESSES)

    def host_memory(self, count: int, dtype: str) -> HostMemory:
        """Allocate pinned memory of the host: copies with other memory wait for the device.

        It exists as long as the context, since copies may be queued when it is given up.
        """
        size = count * numpy_dtype(dtype).itemsize
        with self.cuda.on(self.device):
            pinned = _Pinned(self.cuda, size)
        self._pinned.append(pinned)
        memory: Any = (ctypes.c_byte * size).from_address(pinned.address)
        memory.owner = pinned
        array = np.frombuffer(memory, numpy_dtype(dtype))
        return HostMemory(DeviceMemory(pinned.address, count, dtype, pinned), array)

    def _copy(self, target: int, source: int, count: int, kind: int) -> None:
        if count:
            self.cuda.do("cudaMemcpyAsync", target, source, count, kind, self._thread.stream)

    def scale(self, buffer: DeviceMemory, factor: float) -> None:
        if self.multiply is None:
            raise RuntimeError(f"{self.identity} multiplies nothing before a library connects")
        self.multiply(buffer, factor, self._thread.stream)

    def keep(self, buffer: DeviceMemory, stream: Stream) -> None:
        """Free the memory behind what is queued on `stream` when nobody refers to it any more."""
        if isinstance(buffer.owner, _Allocation):
            buffer.owner.others.add(stream)

    def free(self, address: int, stream: Stream, others: set[Stream]) -> None:
        """Free memory of a stream behind what is queued on it and on others. Any thread."""
        try:
            with self.cuda.stream_lock, self.cuda.on(self.device):
                behind = stream if stream in self.cuda.streams else DEFAULT_STREAM
                for other in (others | {stream}) - {behind}:
                    end = self.cuda.stream_ends.get(other)  # Where its context is gone.
                    (self.record(other) if end is None else end).make_wait(behind)
                self.cuda.do("cudaFreeAsync", address, behind)
        except Exception as error:  # Raised within a garbage collection, it would reach nobody.
            log.debug("memory of a device was not freed: %s", error)
