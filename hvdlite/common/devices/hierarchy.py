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
from collections.abc import Callable

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.devices.collectives import DeviceRun, Work, fused
from hvdlite.common.devices.communicators import Layers
from hvdlite.common.devices.finalizer import LONGEST_SLEEP, SHORTEST_SLEEP, described, ignore
from hvdlite.common.devices.host_paths import HostPaths
from hvdlite.common.devices.interface import Communicator, Event, HostMemory
from hvdlite.common.transport.base import do_nothing


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
        self._host = host
        self._negotiate = negotiate
        self._on_error = on_error
        self._memory: dict[str, HostMemory] = {}  # By dtype.

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
        targets = [
            operand.target(run.shape_of(index)) for index, operand in enumerate(run.operands)
        ]
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
        known = self._memory.get(dtype)
        if known is None or known.array.size < count:
            known = self._memory[dtype] = run.context.host_memory(count, dtype)
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
