"""The interface of a backend, which runs negotiated segments over the transport.

A segment is a list of arrays, one for each tensor: flat, contiguous, and of one dtype. The input
and the output of a tensor may be the same memory. All members call the same method with the same
arguments in the same order. A backend raises `PeerLostError` when a member is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.requests.messages import Response
from hvdlite.common.transport.base import Transport

Array = NDArray[Any]
Activity = Callable[[str], AbstractContextManager[object]]  # a phase in the timeline


@dataclass(frozen=True)
class Members:
    """The members of a process set, as one of them sees it."""

    ranks: tuple[int, ...]  # global, ascending
    index: int  # this rank's position in `ranks`
    topology: Topology  # of the members, numbered by position

    @cached_property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Reduction:
    """How a segment is reduced. Average has become SUM with a postscale before it gets here."""

    reduce_op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


class Backend(Protocol):
    """One way to run collectives."""

    name: str  # a value of HVDLITE_ALLREDUCE in capitals, such as RING

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Return whether this backend can run the collective, the same on every member."""

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """Write the reduction of each input over all members to its output."""

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """Reduce tensor t over all members; member i gets ``counts[t][i]`` elements of it."""

    def allgather(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        activity: Activity,
    ) -> None:
        """Gather ``counts[t][i]`` elements of tensor t from member i, in the order of members."""

    def broadcast(
        self,
        members: Members,
        arrays: Sequence[Array],
        root: int,
        activity: Activity,
    ) -> None:
        """Copy each of `arrays` of the member at position `root` into those of all others."""

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        """Send the next ``send_counts[j]`` elements to member j.

        `allocate` is called once with the counts that come from each member (in elements) and
        gives the array to fill, ordered by member.
        """


BackendFactory = Callable[[Transport], Backend]


# -- tensors that are reduced in place, for backends in compiled code: addresses instead of arrays


class Operand(Protocol):
    """One tensor of a segment at one rank. A joined rank's has neutral input, and no reader."""

    response: Response
    splits: tuple[int, ...]  # alltoall: rows for each member
    received_splits: tuple[int, ...]  # alltoall: set by the run
    address: int | None  # see `Entry.address`
    count: int

    @property
    def input(self) -> Array:
        """The input, flat."""

    def output(self, shape: tuple[int, ...]) -> Array:
        """Return the output of this shape, flat; may be the input's memory."""


class InPlace(Sequence[Array]):
    """The flat arrays of tensors, which are their inputs and outputs.

    An array is made when it is asked for: it takes a microsecond, and as long again to tell its
    address.
    """

    def __init__(
        self, tensors: Sequence[Operand], addresses: list[int], dtype: np.dtype[Any]
    ) -> None:
        self._tensors, self.dtype, self.addresses = tensors, dtype, addresses
        self.sizes = [tensor.count for tensor in tensors]

    @classmethod
    def of(cls, tensors: Sequence[Operand], dtype: np.dtype[Any]) -> InPlace | None:
        """Return the arrays of `tensors`, of this dtype, if all of them have addresses."""
        addresses = [tensor.address for tensor in tensors]
        if None in addresses:
            return None
        return cls(tensors, [address for address in addresses if address is not None], dtype)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Array]:
        return (tensor.input for tensor in self._tensors)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [tensor.input for tensor in self._tensors[index]]
        return self._tensors[index].input
