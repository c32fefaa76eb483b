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
from typing import Any, Generic, TypeVar

from hvdlite.common.api.call_checks import members_of
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


class Arrays(Generic[T]):
    """What a halo does with the arrays of one framework. All of it is differentiable."""

    def convert(self, array: T) -> T:
        """Return what the user gave as an array of the framework."""
        return array

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
                raise HorovodInternalError(
                    f"halo: ranks disagree on the widths: member {sender} of the set has sent "
                    f"{int(rows)} entries of its edge, and member {position}, this rank, wants "
                    f"{number}. Give the same before and after on all ranks",
                    job_goes_on=True,
                )

    def halo(
        self,
        x: T,
        dim: int,
        before: int,
        after: int,
        process_set: ProcessSet = global_process_set,
        *,
        fill: float | None = 0.0,
        name: str | None = None,
    ) -> T:
        """Return the slice `x` of a larger array between the edges of its neighbours' slices.

        The larger array is cut along `dim`, and its slices lie on the ranks of `process_set` in
        their order. `before` entries come from the rank before this one and `after` entries from
        the one behind it; all ranks give the same numbers. Beyond the whole array there is `fill`,
        the zeros of a padded convolution; None adds nothing there. Slices may differ along `dim`
        only; in a graph of TensorFlow, their number of dimensions is known.

        Differentiable where the framework is: the gradients of the edges go back to the ranks that
        own them, and are added there. Backward must reach this call on all ranks.

        Raises `ValueError` for numbers that are negative or wider than the slice, and for a
        dimension that is not there; `HorovodInternalError` where ranks disagree.
        """
        runtime = for_collective()
        members = members_of(runtime, "halo", process_set)
        position, last = members.index(runtime.rank), len(members) - 1
        array = self.convert(x)
        shape = self.shape(array)
        _check(shape, dim, before, after, name)
        dim %= len(shape)
        if before == after == 0:
            return array
        above: list[T] = []
        below: list[T] = []
        if last > 0:
            splits, wanted, slices = _edges(len(members), position, before, after)
            whole = (slice(None),) * dim
            edges = [self.part(array, (*whole, each)) for each in slices]
            sent = self.concatenate([self.move(edge, dim, 0) for edge in edges], 0)
            rows, received = self.exchange(sent, splits, name, process_set)
            self.expect(received, wanted, position)
            if position > 0:
                above = [self.move(self.part(rows, (slice(0, before),)), 0, dim)]
            if position < last:
                start = before if position > 0 else 0
                below = [self.move(self.part(rows, (slice(start, start + after),)), 0, dim)]
        if position == 0 and fill is not None:
            above = [self.border(array, dim, before, fill)]
        if position == last and fill is not None:
            below = [self.border(array, dim, after, fill)]
        return self.concatenate([*above, array, *below], dim)


def _edges(
    members: int, position: int, before: int, after: int
) -> tuple[list[int], list[int], list[slice]]:
    """Return how many entries go to each member, and come from it; and the indices of the first.

    These are along the dimension, in the order of members.
    """
    splits, wanted = [0] * members, [0] * members
    slices: list[slice] = []
    if position > 0:
        splits[position - 1], wanted[position - 1] = after, before
        slices.append(slice(0, after))
    if position < members - 1:
        splits[position + 1], wanted[position + 1] = before, after
        slices.append(slice(-before, None) if before else slice(0, 0))
    return splits, wanted, slices


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
