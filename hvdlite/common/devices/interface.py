"""The interfaces between hvdlite and accelerators: what a vendor's plug-in gives, and what tensors.

tests/fake_accelerator/README.md says how to give them. A `Buffer` is flat contiguous memory of one
dtype on a device, in the form of the framework (a one-dimensional tensor of PyTorch): it can be
sliced, and has `data_ptr()` and `numel()`. A stream is opaque; work that is queued on it is done in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

from hvdlite.common.base.reduce_op import ReduceOp

Buffer: TypeAlias = Any
Stream: TypeAlias = Any


@runtime_checkable
class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Return whether the work before it is done; never wait. Any thread."""

    def synchronize(self) -> None:
        """Sleep until the work before it is done. Any thread."""


class HostMemory(NamedTuple):
    """Memory of the host that copies of a device reach, in two forms."""

    buffer: Buffer
    array: NDArray[Any]


class TimedEvent(Event, Protocol):
    """An event that knows when it has occurred."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the time from an event of the same device to this one; both have occurred.

        It is negative if this one was the first.
        """


class Context(Protocol):
    """One device of one rank: its streams and events, its memory, and the copies on it.

    hvdlite gives it for each device module of PyTorch that is like ``torch.cuda``. It may have a
    method ``begin_thread()``, which a thread calls that asks events of the device, and nothing
    else.
    """

    # Names the device among those of all hosts, by host and address on the bus or a serial number:
    # two ranks of a communicator may not share one.
    identity: str
    # Whether a thread that needs a result must sleep until it is there, as the device has no
    # streams that could wait in its place.
    threads_wait: bool

    def new_stream(self) -> Stream:
        """Return a stream for communication."""

    def free_stream(self, stream: Stream) -> None:
        """Give it back; its work is done, or was aborted."""

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queue what `work` does on a stream; never wait for it."""

    def allocating(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which new tensors belong to a stream."""

    def record(self, stream: Stream) -> Event:
        """Return an event after all work that is queued on a stream."""

    def record_timed(self, stream: Stream) -> TimedEvent:
        """Do as `record`, for the timeline."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream wait for an event; the thread does not."""

    def empty(self, count: int, dtype: str) -> Buffer:
        """Allocate memory without values, in `allocating`."""

    def fill(self, buffer: Buffer, value: Any) -> None:
        """Set all elements. Called within `run`, as `copy` and `scale`."""

    def copy(self, targets: Sequence[Buffer], sources: Sequence[Buffer]) -> None:
        """Copy each source to its target of the same length, all in one kernel if possible."""

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply all elements."""

    def host_memory(self, count: int, dtype: str) -> HostMemory:
        """Allocate memory of the host, pinned if possible, that `copy` reads and writes."""

    def keep(self, buffer: Buffer, stream: Stream) -> None:
        """Keep the memory from being used again before `stream` is done with what is queued."""


class Communicator(Protocol):
    """The members of a process set, connected by a library. All calls are made within `run`.

    All members make the same calls in the same order. Each method queues its work on `stream` and
    returns. `source` and `target` are the same buffer, or do not overlap.
    """

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp, stream: Stream) -> None:
        """Reduce over all members."""

    def reduce(
        self, source: Buffer, target: Buffer, op: ReduceOp, root: int, stream: Stream
    ) -> None:
        """Reduce to the member at `root`. The target of the others has no meaning afterwards."""

    def broadcast(self, buffer: Buffer, root: int, stream: Stream) -> None:
        """Copy the buffer of the member at `root` to all."""

    def allgather(self, source: Buffer, target: Buffer, stream: Stream) -> None:
        """Gather as many elements from each member, in their order."""

    def reducescatter(self, source: Buffer, target: Buffer, op: ReduceOp, stream: Stream) -> None:
        """Reduce `source`, and give each member its part, as many elements for each."""

    def alltoall(
        self,
        source: Buffer,
        send_counts: Sequence[int],
        target: Buffer,
        receive_counts: Sequence[int],
        stream: Stream,
    ) -> None:
        """Send the next ``send_counts[i]`` elements to member i; receive in the same way."""

    def async_error(self) -> str:
        """Return why work that was queued has failed or never will be done; "" if all is well.

        Any thread; never waits.
        """

    def abort(self) -> None:
        """End all work that is queued, done or not, so that streams go on. Any thread."""

    def close(self) -> None:
        """Free everything; all work is done."""


class DeviceLibrary(Protocol):
    """A library of collectives for one kind of device: what the entry points return.

    It may have a method ``discard(unique_id)``, which is called at the first member where nobody
    will connect by what `unique_id` has returned.
    """

    name: str  # As log and timeline show it, such as "NCCL".
    device_kind: str  # The device type of tensors, such as "cuda".
    # Whether two members of a communicator may use one device.
    shares_devices: bool

    def supports(self, collective: str, dtype: str, op: ReduceOp | None) -> bool:
        """Return whether it runs a collective: a method of `Communicator`, with no op if none.

        It is asked at `init` for each method, each of hvdlite's names of dtypes ("bfloat16") and
        each operation. Averages are asked for as sums, which hvdlite scales.
        """

    def context(self, device: Any, local_rank: int) -> Context:
        """Return the context of a framework's `device`; of that of `local_rank` for None."""

    def unique_id(self) -> bytes:
        """Return what `connect` needs, at the first member; hvdlite carries it to the others."""

    def connect(self, unique_id: bytes, index: int, size: int, context: Any) -> Communicator:
        """Connect the member at `index` with the others, which call this too; may wait for them.

        Whatever it raises lets all members stage their tensors.

        `context` is what the method `context` has returned.

        Called in a thread of its own, for one communicator of a rank at a time.
        """


class DeviceInput(Protocol):
    """A tensor that is ready when an event has occurred."""

    device: Any  # Of the framework.
    ready: Event
    buffer: Buffer

    def new_result(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return a new tensor, allocated here, and its `HostBuffer` with a `DeviceOutput`."""


class DeviceOutput(Protocol):
    """A tensor that is written."""

    buffer: Buffer  # The tensor's own memory, or of its size where that is not contiguous.
    address: int  # Where the tensor's memory begins.

    def unpack(self) -> None:
        """Copy `buffer` to the tensor unless it is its memory. Called within `Context.run`."""

    def written_by(self, event: Event) -> None:
        """Remember the event after which the tensor may be read."""
