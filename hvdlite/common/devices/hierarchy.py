"""Allreduce on devices of several hosts in three steps, where a setting asks for it.

    the library, inside each host    reducescatter    each rank has its part of the sums of the host
    host backends, between hosts     allreduce        of the parts, by way of memory of the host
    the library, inside each host    allgather        all have the whole

It is for hosts whose devices are connected with each other, and not with those of other hosts. The
engine waits for the first step, as for a tensor that goes through host memory; meanwhile it
negotiates, and hears of failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.backend_choice import Backends, choose
from hvdlite.common.collectives.base import Array, Backend, Members, Reduction
from hvdlite.common.devices.collectives import DeviceRun, Work, fused
from hvdlite.common.devices.communicators import Layers
from hvdlite.common.devices.finalizer import LONGEST_SLEEP, SHORTEST_SLEEP, described, ignore
from hvdlite.common.devices.interface import Communicator, Event, HostMemory
from hvdlite.common.transport.base import do_nothing

# -- what members of a device collective exchange through the host


class HostPaths:
    """The host's backends, inside of a segment of a device. Engine thread."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def gather(self, members: Members, text: bytes) -> list[bytes]:
        """Return what each member gives, of any length."""
        length = np.array([len(text)], np.int64)
        lengths = np.empty(members.size, np.int64)
        self._allgather(members, length, lengths, [1] * members.size)
        counts = lengths.tolist()
        whole = np.empty(sum(counts), np.uint8)
        self._allgather(members, np.frombuffer(text, np.uint8), whole, counts)
        ends = np.cumsum(lengths).tolist()
        return [whole[end - size : end].tobytes() for end, size in zip(ends, counts, strict=True)]

    def exchange_counts(self, members: Members, counts: Sequence[int]) -> list[int]:
        """Send a number to each member; return theirs."""
        received = np.empty(members.size, np.int64)
        self._backend("alltoall", np.dtype(np.int64), members).alltoall(
            members, np.array(counts, np.int64), [1] * members.size, lambda _: received, _silent
        )
        result: list[int] = received.tolist()
        return result

    def allreduce(self, members: Members, array: Array, op: ReduceOp) -> None:
        """Reduce an array, in place."""
        backend = self._backend("allreduce", array.dtype, members, op)
        backend.allreduce(members, [array], [array], Reduction(op), _silent)

    def _allgather(
        self, members: Members, given: Array, whole: Array, counts: Sequence[int]
    ) -> None:
        if whole.size:
            backend = self._backend("allgather", whole.dtype, members)
            backend.allgather(members, [given], [whole], [counts], _silent)

    def _backend(
        self,
        collective: str,
        dtype: np.dtype[np.generic],
        members: Members,
        op: ReduceOp = ReduceOp.SUM,
    ) -> Backend:
        return choose(self._backends, collective, dtype, op, members)


def _silent(activity: str) -> AbstractContextManager[object]:
    """Show nothing in the timeline."""
    return nullcontext()


class HierarchicalAllreduce:
    """Runs allreduces in layers. Engine thread."""

    def __init__(
        self,
        host: HostPaths,
        negotiate: Callable[[], None],
        on_error: Callable[[HorovodInternalError], None],
    ) -> None:
        """Call `negotiate` while the device works; an error of it ends the wait.

        An error of the library is given to `on_error`, after which `negotiate` raises the reason:
        the library of another rank may have failed first.
        """
        self._host, self._negotiate, self._on_error = host, negotiate, on_error
        # By context, which the plane keeps, and dtype.
        self._memory: dict[tuple[int, str], HostMemory] = {}

    def prepare(self, run: DeviceRun, layers: Layers) -> Work:
        """Allocate; return what reduces the segment over all members, but for the queued end.

        That raises what `negotiate` and the backends raise.
        """
        communicator = layers.communicator
        assert communicator is not None
        reduction = run.reduction
        size = layers.local.size
        what = described(run.operands[0].response.request, run.members)
        sources = [operand.source for operand in run.operands]
        targets = [operand.target(operand.response.request.shape) for operand in run.operands]
        part = -(-sum(target.numel() for target in targets) // size)
        whole, places = fused(run, targets, part * size)
        mine = run.buffer("part", part)
        memory = self._host_memory(run, part)

        def inside() -> None:
            run.copy(places, sources)
            run.scale(whole, reduction.prescale)
            communicator.reducescatter(whole, mine, reduction.reduce_op, run.stream)
            run.context.copy([memory.buffer[:part]], [mine])

        def back() -> None:
            run.context.copy([mine], [memory.buffer[:part]])
            communicator.allgather(mine, whole, run.stream)
            run.scale(whole, reduction.postscale)
            run.copy(targets, places)

        def reduce() -> None:
            run.context.run(run.stream, inside)
            self._wait(run.context.record(run.stream), communicator, what)
            self._host.allreduce(layers.cross, memory.array[:part], reduction.reduce_op)
            run.context.run(run.stream, back)

        return reduce

    def _host_memory(self, run: DeviceRun, count: int) -> HostMemory:
        dtype = run.operands[0].response.request.dtype
        key = id(run.context), dtype
        known = self._memory.get(key)
        if known is None or known.array.size < count:
            known = self._memory[key] = run.context.host_memory(count, dtype)
        return known

    def _wait(self, event: Event, communicator: Communicator, what: str) -> None:
        """Sleep until the device has come to `event`, and negotiate."""
        pause = SHORTEST_SLEEP
        while True:
            # An event also occurs when the library has given up: that is asked afterwards.
            done = event.query()
            reason = communicator.async_error()
            if reason:
                self._on_error(HorovodInternalError(f"{what}: {reason}"))
            elif done:
                return
            self._negotiate()
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_SLEEP)

    def close(self) -> None:
        """Forget the memory, and the engine."""
        self._memory.clear()
        self._negotiate = do_nothing
        self._on_error = ignore
