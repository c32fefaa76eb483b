"""`halo`: the edges of the neighbours' slices, written once for the arrays of any framework.

An array that is cut along one dimension lies on the members of a process set, in their order. With
``before=1, after=2``, and "." for the fill beyond the whole array:

    | rank 0         | rank 1         | rank 2         |
    |   a b c d      |   e f g h      |   i j k l      |  the slices
    | . a b c d e f  | d e f g h i j  | h i j k l . .  |  the results

Each member sends its first `after` entries to the one before it, and its last `before` entries to
the one behind it, in one alltoall. The adjoint of the alltoall sends the gradients of the edges
back to where these came from, and the adjoint of the slicing adds them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NoReturn, TypeVar

from hvdlite.common.api.call_checks import members_of
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.state import for_collective

T = TypeVar("T")


class Arrays(Generic[T]):
    """What a halo does with the arrays of one framework. All of it is differentiable."""

    def shape(self, array: T) -> Sequence[int | None]:
        """Return the sizes of the dimensions; None: not known in a graph."""
        raise NotImplementedError

    def part(self, array: T, index: tuple[Any, ...]) -> T:
        """Return ``array[index]``."""
        part: T = array[index]  # type: ignore[index]
        return part

    def move(self, array: T, dim: int, to: int) -> T:
        """Return the array with one dimension in another place."""
        raise NotImplementedError

    def concatenate(self, arrays: Sequence[T], dim: int) -> T:
        """Return the arrays in a row along a dimension."""
        raise NotImplementedError

    def border(self, array: T, dim: int, width: int, value: float) -> T:
        """Return an array like this one, with `width` entries of one value along a dimension."""
        raise NotImplementedError

    def exchange(
        self, rows: T, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[T, Any]:
        """Return what alltoall does: the rows that have come, and how many from each member."""
        raise NotImplementedError

    def expect(self, received: Any, wanted: list[int], position: int) -> None:
        """Raise `HorovodInternalError` unless so many rows have come from each member."""
        for sender, (rows, number) in enumerate(zip(received, wanted, strict=True)):
            if rows != number:
                refuse(f"member {sender} of the set has sent {int(rows)}", position, number)


def refuse(sent: str, position: int, wanted: object) -> NoReturn:
    """Raise the error for an edge of another width than this rank has asked for."""
    raise HorovodInternalError(
        f"halo: ranks disagree on the widths: {sent} entries of its edge, and member {position}, "
        f"this rank, wants {wanted}. Give the same before and after on all ranks",
        job_goes_on=True,
    )


def halo(
    arrays: Arrays[T],
    array: T,
    dim: int,
    before: int,
    after: int,
    process_set: ProcessSet,
    fill: float | None,
    name: str | None,
) -> T:
    """Return the array between the edges of its neighbours. Raises `ValueError`."""
    runtime = for_collective()
    members = members_of(runtime, "halo", process_set)
    position, last = members.index(runtime.rank), len(members) - 1
    shape = arrays.shape(array)
    _check(shape, dim, before, after, name)
    dim %= len(shape)
    if before == after == 0:
        return array
    above: list[T] = []
    below: list[T] = []
    if last > 0:
        edges = _Edges(len(members), position, before, after)
        rows, received = arrays.exchange(
            edges.collect(arrays, array, dim), edges.splits, name, process_set
        )
        arrays.expect(received, edges.wanted, position)
        if position > 0:
            above = [arrays.move(arrays.part(rows, (slice(0, before),)), 0, dim)]
        if position < last:
            start = before if position > 0 else 0
            below = [arrays.move(arrays.part(rows, (slice(start, start + after),)), 0, dim)]
    if position == 0 and fill is not None:
        above = [arrays.border(array, dim, before, fill)]
    if position == last and fill is not None:
        below = [arrays.border(array, dim, after, fill)]
    return arrays.concatenate([*above, array, *below], dim)


class _Edges:
    """What one member sends and gets."""

    def __init__(self, members: int, position: int, before: int, after: int) -> None:
        self.splits, self.wanted = [0] * members, [0] * members
        # The indices along the dimension of what goes to the neighbours, in the order of members.
        self._slices: list[slice] = []
        if position > 0:
            self.splits[position - 1], self.wanted[position - 1] = after, before
            self._slices.append(slice(0, after))
        if position < members - 1:
            self.splits[position + 1], self.wanted[position + 1] = before, after
            self._slices.append(slice(-before, None) if before else slice(0, 0))

    def collect(self, arrays: Arrays[T], array: T, dim: int) -> T:
        """Return what goes to the neighbours, as rows."""
        whole = (slice(None),) * dim
        edges = [arrays.part(array, (*whole, each)) for each in self._slices]
        return arrays.concatenate([arrays.move(edge, dim, 0) for edge in edges], 0)


def _check(
    shape: Sequence[int | None], dim: int, before: int, after: int, name: str | None
) -> None:
    what = "halo" if name is None else f"halo '{name}'"
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"{what}: an array of shape {tuple(shape)} has no dimension {dim}")
    size = shape[dim]
    for word, width in (("before", before), ("after", after)):
        if not isinstance(width, int) or isinstance(width, bool) or width < 0:
            raise ValueError(f"{what}: {word}={width!r} must be an int of 0 or more")
        if size is not None and width > size:
            raise ValueError(
                f"{what}: {word}={width} is wider than the slice, of shape {tuple(shape)} with "
                f"{size} entries along dimension {dim}: an edge comes from one neighbour. Cut the "
                "array into fewer slices"
            )
