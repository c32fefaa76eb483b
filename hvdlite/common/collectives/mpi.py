"""Collectives of the MPI library itself: one call each, waited for without spinning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.ring import RingBackend
from hvdlite.common.collectives.chained_view import Chain, member_chain
from hvdlite.common.collectives.kernels import scale
from hvdlite.common.transport.mpi import MpiTransport

# MPI's names of the types of which every MPI library can make sums; bool is left to the ring.
TYPES = {
    "uint8": "UINT8_T",
    "int8": "INT8_T",
    "uint16": "UINT16_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
OPERATIONS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
MOST_ELEMENTS = 1 << 26  # in one call: far below MPI's limit of 2^31 counts or bytes


class MpiBackend(RingBackend):
    """All collectives as MPI has them, of the types that MPI has.

    What is more than MPI can count is left to the ring it is built on.
    """

    name = "MPI"

    def __init__(self, transport: MpiTransport) -> None:
        super().__init__(transport)
        self._mpi = transport

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support the dtypes in `TYPES` among more than one member, and never Adasum.

        MPI may lose a NaN in Min and Max, so those of floats are left to the ring.
        """
        if dtype.kind == "f" and reduce_op in (ReduceOp.MIN, ReduceOp.MAX):
            return False
        return members.size > 1 and dtype.name in TYPES and reduce_op in OPERATIONS

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        with activity("MPI_ALLREDUCE"):
            self._reduce(members, Chain(inputs), Chain(outputs), reduction)

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.reducescatter`: one reduction to each member."""
        with activity("MPI_REDUCESCATTER"):
            for member in range(members.size):
                source = member_chain(inputs, counts, member)
                target = Chain(outputs) if member == members.index else None
                self._reduce(members, source, target, reduction, member)

    def _reduce(
        self,
        members: Members,
        source: Chain,
        target: Chain | None,
        reduction: Reduction,
        root: int | None = None,
    ) -> None:
        """Reduce to `root`, or to all; `target` is where this member wants the result."""
        comm = self._mpi.subcommunicator(members.ranks)
        op = getattr(self._mpi.mpi, OPERATIONS[reduction.reduce_op])
        for start in range(0, source.size, MOST_ELEMENTS):
            operand = source.copy(start, min(start + MOST_ELEMENTS, source.size))
            scale(operand, reduction.prescale)
            result = np.empty_like(operand)
            send, receive = self._message(operand), self._message(result)
            if root is None:
                request = comm.Iallreduce(send, receive, op)
            else:
                request = comm.Ireduce(send, receive, op, root)
            self._mpi.finish(request, members.ranks)
            if target is not None:
                scale(result, reduction.postscale)
                target.unpack(start, result)

    def allgather(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        activity: Activity,
    ) -> None:
        """See `Backend.allgather`: one broadcast from each member."""
        with activity("MPI_ALLGATHER"):
            for member in range(members.size):
                target = member_chain(outputs, counts, member)
                if member == members.index:
                    Chain(inputs).copy_to(target)
                for view in target.views(0, target.size):
                    self._broadcast(members, view, member)

    def broadcast(
        self, members: Members, arrays: Sequence[Array], root: int, activity: Activity
    ) -> None:
        with activity("MPI_BROADCAST"):
            for array in arrays:
                self._broadcast(members, array, root)

    def _broadcast(self, members: Members, array: Array, root: int) -> None:
        comm = self._mpi.subcommunicator(members.ranks)
        for start in range(0, array.size, MOST_ELEMENTS):
            message = self._message(array[start : start + MOST_ELEMENTS])
            self._mpi.finish(comm.Ibcast(message, root), members.ranks)

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        """See `Backend.alltoall`. More than MPI can count go member by member."""
        comm = self._mpi.subcommunicator(members.ranks)
        with activity("MPI_ALLTOALL"):
            matrix = np.empty((members.size, members.size), np.int64)
            row = np.array(send_counts, np.int64)
            self._mpi.finish(comm.Iallgather(row, matrix), members.ranks)
            received = [int(count) for count in matrix[:, members.index]]
            output = allocate(received)
            if max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()) > MOST_ELEMENTS:
                self._exchange(members, array, send_counts, output, received)
                return
            send = self._message(array, send_counts)
            receive = self._message(output, received)
            self._mpi.finish(comm.Ialltoallv(send, receive), members.ranks)

    def _message(self, array: Array, counts: Sequence[int] | None = None) -> list[Any]:
        """Describe `array` to mpi4py; `counts` are the elements for, or from, each member."""
        mpi_type = getattr(self._mpi.mpi, TYPES[array.dtype.name])
        if counts is None:
            return [array, array.size, mpi_type]
        starts = [0, *accumulate(counts)][:-1]
        return [array, list(counts), starts, mpi_type]
