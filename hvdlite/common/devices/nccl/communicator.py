"""A communicator of NCCL, on addresses and streams alone.

    connect      ncclCommInitRankConfig, not blocking; asked until all members are there
    collective   one call, or one group, on the given stream: no memory, no events, no waiting
    abort        ncclCommAbort, from any thread

A collective does no work on the host but this call, so a CUDA graph can record it.

[Note: threads and communicators]
NCCL lets one thread at a time use a communicator, and frees it in an abort. So a lock is held
for each call, which is short as communicators do not block. Those of releases before 2.14 do, and
those for graphs, as NCCL else works in threads of its own, whose calls a stream may not record. An
abort of such a one waits for a second, then comes in between, as NCCL provides for it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from ctypes import c_void_p
from typing import Any, Protocol

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.devices.interface import Buffer, Stream
from hvdlite.common.devices.nccl.binding import (
    BYTES,
    DTYPES,
    IN_PROGRESS,
    MULTIPLIED_BY_HOST_VALUE,
    OPS,
    SUCCESS,
    Nccl,
    NcclError,
    UniqueId,
    not_blocking,
)
from hvdlite.common.tensors.adapter import numpy_dtype

SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 20e-6, 5e-4
CLOSE_SECONDS = 5.0
ABORT_WAITS_SECONDS = 1.0


class Forms(Protocol):
    """What a framework says of its buffers and streams."""

    def dtype(self, buffer: Buffer) -> str:
        """Return the name of the dtype of a buffer."""

    def stream(self, stream: Stream) -> int:
        """Return the address of a stream, a ``cudaStream_t``."""


class NcclCommunicator:
    """One member; see `hvdlite.common.devices.interface.Communicator` for the methods."""

    def __init__(
        self,
        nccl: Nccl,
        forms: Forms,
        unique_id: bytes,
        index: int,
        size: int,
        *,
        seconds: float,
        blocks: bool = False,
        device_error: Callable[[], str] = lambda: "",
    ) -> None:
        """Connect on the current device of the thread, with all other members.

        With `blocks` NCCL works in the calling thread alone, and nothing limits the time that it
        waits for other members. `device_error` says why the device itself has failed, or "".
        `seconds` limits what NCCL does on the host for a collective, too.
        Raises `NcclError` if the members are not there within `seconds`, or NCCL fails.
        """
        self._nccl = nccl
        self._forms = forms
        self._index, self._size = index, size
        self._device_error = device_error
        self._blocks = blocks or not nccl.does_not_block
        self._seconds = seconds
        self._lock = threading.Lock()  # See [Note: threads and communicators].
        self._comm: c_void_p | None = c_void_p()
        self._error = ""
        what = f"connecting member {index} of {size}"
        where = UniqueId.from_buffer_copy(unique_id)
        arguments: tuple[Any, ...] = ctypes.byref(self._comm), size, where, index
        if self._blocks:
            code = nccl.call("ncclCommInitRank", *arguments)
        else:
            config = ctypes.byref(not_blocking())
            code = nccl.call("ncclCommInitRankConfig", *arguments, config)
        nccl.check(code, what)
        try:
            if not self._settled(what, seconds):
                raise NcclError(
                    f"{what}: the other members did not come within {seconds:g} s. See that all "
                    "ranks reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), or raise "
                    "HVDLITE_START_TIMEOUT"
                )
        except NcclError:
            self.abort()
            raise

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp, stream: Stream) -> None:
        self._reduce_by("ncclAllReduce", source, target, source.numel(), op, stream)

    def reduce(
        self, source: Buffer, target: Buffer, op: ReduceOp, root: int, stream: Stream
    ) -> None:
        self._reduce_by("ncclReduce", source, target, source.numel(), op, stream, root)

    def reducescatter(self, source: Buffer, target: Buffer, op: ReduceOp, stream: Stream) -> None:
        """Reduce, and give each member its part."""
        self._reduce_by("ncclReduceScatter", source, target, target.numel(), op, stream)

    def _reduce_by(
        self,
        name: str,
        source: Buffer,
        target: Buffer,
        count: int,
        op: ReduceOp,
        stream: Stream,
        *root: int,
    ) -> None:
        dtype = DTYPES[self._forms.dtype(source)]
        addresses = source.data_ptr(), target.data_ptr()
        self._queue(name, *addresses, count, dtype, OPS[op], *root, stream=stream)

    def broadcast(self, buffer: Buffer, root: int, stream: Stream) -> None:
        place = buffer.data_ptr()
        count = buffer.numel() * self._item_bytes(buffer)
        self._queue("ncclBroadcast", place, place, count, BYTES, root, stream=stream)

    def allgather(self, source: Buffer, target: Buffer, stream: Stream) -> None:
        """Gather as many elements from each member."""
        count = source.numel() * self._item_bytes(source)
        addresses = source.data_ptr(), target.data_ptr()
        self._queue("ncclAllGather", *addresses, count, BYTES, stream=stream)

    def alltoall(
        self,
        source: Buffer,
        send_counts: Sequence[int],
        target: Buffer,
        receive_counts: Sequence[int],
        stream: Stream,
    ) -> None:
        """Send the next elements to each member, in one group."""
        item = self._item_bytes(source)
        calls = []
        for name, buffer, counts in (
            ("ncclSend", source, send_counts),
            ("ncclRecv", target, receive_counts),
        ):
            place = buffer.data_ptr()
            for member, count in enumerate(counts):
                if count:
                    calls.append((name, (place, count * item, BYTES, member)))
                place += count * item
        where = self._forms.stream(stream)
        with self._using("alltoall") as comm:
            if comm is None:
                return
            self._checked("ncclGroupStart")
            try:
                for name, arguments in calls:
                    self._checked(name, *arguments, comm, where)
            finally:
                self._checked("ncclGroupEnd")

    def scale(self, buffer: Buffer, factor: float, stream: Stream) -> None:
        """Multiply all elements, as a communicator of one member does by a sum of its own."""
        name = self._forms.dtype(buffer)
        dtype, place = DTYPES[name], buffer.data_ptr()
        value = numpy_dtype(name).type(factor).tobytes()
        op = ctypes.c_int()
        with self._using("scale") as comm:
            if comm is None:
                return
            arguments = ctypes.byref(op), value, dtype, MULTIPLIED_BY_HOST_VALUE, comm
            self._checked("ncclRedOpCreatePreMulSum", *arguments)
            where = comm, self._forms.stream(stream)
            try:
                self._checked("ncclAllReduce", place, place, buffer.numel(), dtype, op, *where)
            finally:
                self._nccl.call("ncclRedOpDestroy", op, comm)

    def _queue(self, name: str, *arguments: Any, stream: Stream) -> None:
        with self._using(name) as comm:
            if comm is not None:
                self._checked(name, *arguments, comm, self._forms.stream(stream))

    def _checked(self, name: str, *arguments: Any) -> None:
        self._nccl.check(self._nccl.call(name, *arguments), self._named(name))

    def _named(self, name: str) -> str:
        return f"{name} at member {self._index} of {self._size}"

    @contextmanager
    def _using(self, name: str) -> Any:
        """Give the communicator to a call, and note an error of it; None after an error or abort.

        The work that NCCL does for the call on the host has ended afterwards.
        """
        try:
            with self._lock:
                yield None if self._error else self._comm
            if not self._settled(self._named(name), self._seconds):
                raise NcclError(
                    f"{self._named(name)}: NCCL has not queued it within {self._seconds:g} s, as "
                    "another member does not answer. See NCCL_DEBUG=INFO there, or raise "
                    "HVDLITE_START_TIMEOUT"
                )
        except NcclError as error:
            self._error = self._error or str(error)

    def _settled(self, what: str, seconds: float) -> bool:
        """Sleep until NCCL does nothing on the host; False if it still does after `seconds`."""
        until = time.monotonic() + seconds
        pause = SHORTEST_POLL_SECONDS
        while True:
            with self._lock:
                code = self._code()
            if code != IN_PROGRESS:
                break
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_POLL_SECONDS)
        self._nccl.check(code, what)
        return True

    def _code(self) -> int:
        """Return the code of the communicator; success if it is not there any more."""
        code = ctypes.c_int()
        if self._comm is None:
            return SUCCESS
        return (
            self._nccl.call("ncclCommGetAsyncError", self._comm, ctypes.byref(code)) or code.value
        )

    def _item_bytes(self, buffer: Buffer) -> int:
        return numpy_dtype(self._forms.dtype(buffer)).itemsize

    def async_error(self) -> str:
        """Return why NCCL or the device has failed."""
        if self._error:
            return self._error
        reason = self._device_error()
        # While a call is being queued, its error is seen the next time.
        if not reason and self._lock.acquire(blocking=False):
            try:
                code = self._code()
            finally:
                self._lock.release()
            if code not in (SUCCESS, IN_PROGRESS):
                reason = f"{self._named('a collective')}: {self._nccl.error_text(code)}"
        self._error = self._error or reason
        return self._error

    def abort(self) -> None:
        held = self._lock.acquire(timeout=ABORT_WAITS_SECONDS)
        try:
            comm, self._comm = self._comm, None
            self._error = self._error or "the communicator was aborted"
            if comm is not None:
                self._nccl.call("ncclCommAbort", comm)
        finally:
            if held:
                self._lock.release()

    def close(self) -> None:
        """Free everything. What other members keep busy after a while is aborted."""
        if not self._blocks:
            with self._lock:
                if self._comm is not None:
                    self._nccl.call("ncclCommFinalize", self._comm)
            try:
                ended = self._settled(self._named("ncclCommFinalize"), CLOSE_SECONDS)
            except NcclError:
                ended = False
            if not ended:
                self.abort()
                return
        with self._lock:
            comm, self._comm = self._comm, None
            self._error = self._error or "the communicator was closed"
            if comm is not None:
                self._nccl.call("ncclCommDestroy", comm)
