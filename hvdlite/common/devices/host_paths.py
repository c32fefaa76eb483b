"""What members of a device collective exchange through the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.backend_choice import Backends, choose
from hvdlite.common.collectives.base import Array, Backend, Members, Reduction


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
