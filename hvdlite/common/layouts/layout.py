"""A layout: how a tensor is cut among ranks, by a device matrix and a tensor map.

The device matrix D arranges the ranks, row by row. The tensor map M has one entry for each
dimension of the tensor: -1 leaves it whole, k cuts it along the axis of D that is the k-th from
the right. With D = [2, 2] and a tensor of 4 x 4:

    M = [1, 0]      columns 0:2   2:4       M = [1, -1]     columns 0:4
        rows 0:2    rank 0    rank 1            rows 0:2    ranks 0 and 1
        rows 2:4    rank 2    rank 3            rows 2:4    ranks 2 and 3

A tuple of axes cuts a dimension by the first of them, and each part by the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WHOLE = -1

Shape = tuple[int, ...]
# The part of a tensor that a rank holds: first index and end of each dimension.
Box = tuple[tuple[int, int], ...]
MapEntry = int | tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a tensor is cut among ``prod(device_matrix)`` ranks.

    `device_matrix` and `tensor_map` are sequences as the module describes. Dimensions must divide
    by the number of their parts, unless `uneven` is true: then parts are as large as those of
    DTensor, and the last ones smaller or empty. Raises `ValueError` for a matrix without positive
    numbers, and for entries of the map that are no axes of it or that name one twice.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[MapEntry, ...]
    uneven: bool = False

    def __init__(
        self,
        device_matrix: Iterable[int],
        tensor_map: Iterable[int | Sequence[int]],
        uneven: bool = False,
    ) -> None:
        entries = (tuple(each) if isinstance(each, Sequence) else each for each in tensor_map)
        object.__setattr__(self, "device_matrix", tuple(device_matrix))
        object.__setattr__(self, "tensor_map", tuple(entries))
        object.__setattr__(self, "uneven", uneven)
        positive = [
            isinstance(number, int) and not isinstance(number, bool) and number > 0
            for number in self.device_matrix
        ]
        if not positive or not all(positive):
            raise ValueError(f"{self}: a device matrix has positive numbers, at least one")
        axes = [axis for entry in self.tensor_map for axis in _axes(entry)]
        last = len(self.device_matrix) - 1
        for axis in axes:
            if not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis <= last:
                raise ValueError(f"{self}: {axis!r} of the tensor map is not in -1..{last}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"{self}: the tensor map cuts two dimensions along one axis")

    def __str__(self) -> str:
        entries = [list(each) if isinstance(each, tuple) else each for each in self.tensor_map]
        return f"layout D={list(self.device_matrix)}, M={entries}"

    @property
    def ranks(self) -> int:
        return math.prod(self.device_matrix)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        return tuple(
            math.prod(self.device_matrix[-1 - axis] for axis in _axes(entry))
            for entry in self.tensor_map
        )

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(cut == 1 for cut in self.cuts)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return the part of a tensor of `shape` that `rank` holds.

        Raises `ValueError` if the shape has another number of dimensions than the tensor map, or
        one that does not divide, and for a rank that the device matrix does not have.
        """
        self.check_shape(shape)
        if not 0 <= rank < self.ranks:
            raise ValueError(f"{self} has no rank {rank}")
        return tuple(
            self._interval(length, entry, rank)
            for length, entry in zip(shape, self.tensor_map, strict=True)
        )

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise `ValueError` if a tensor of `shape` cannot be cut so."""
        if len(shape) != len(self.tensor_map):
            raise ValueError(
                f"{self} is for {len(self.tensor_map)} dimensions; the shape is {tuple(shape)}"
            )
        for dimension, (length, cut) in enumerate(zip(shape, self.cuts, strict=True)):
            if length % cut and not self.uneven:
                raise ValueError(
                    f"{self}: dimension {dimension} of the shape {tuple(shape)} does not divide "
                    f"into {cut} parts"
                )

    def full_shape(self, local_shape: Sequence[int]) -> Shape:
        """Return the shape of a tensor whose parts have `local_shape`.

        Raises `ValueError` for another number of dimensions, and for an uneven layout that cuts.
        """
        if self.uneven and not self.is_whole:
            raise ValueError(f"{self} is uneven: its parts do not tell the shape of the tensor")
        if len(local_shape) != len(self.tensor_map):
            raise ValueError(
                f"{self} is for {len(self.tensor_map)} dimensions; a part has the shape "
                f"{tuple(local_shape)}"
            )
        return tuple(a * b for a, b in zip(local_shape, self.cuts, strict=True))

    def filled(self, ranks: int, repetition: str = "right") -> Layout:
        """Return this layout for `ranks` ranks: each part is held by several of them.

        They are neighbours with a `repetition` axis on the "right", as operators have it; on the
        "left", as data sets have it, all parts come one after the other, again and again.

        Raises `ValueError` if `ranks` is no multiple of the ranks of this layout.
        """
        if repetition not in ("left", "right"):
            raise ValueError(f"repetition is 'left' or 'right', not {repetition!r}")
        if ranks % self.ranks:
            raise ValueError(f"{self} has {self.ranks} ranks, which do not divide {ranks}")
        times = ranks // self.ranks
        if times == 1:
            return self
        if repetition == "left":
            return Layout((times, *self.device_matrix), self.tensor_map, self.uneven)
        entries = [
            tuple(axis + 1 for axis in _axes(entry))
            if isinstance(entry, tuple)
            else entry + (entry != WHOLE)
            for entry in self.tensor_map
        ]
        return Layout((*self.device_matrix, times), entries, self.uneven)

    def _interval(self, length: int, entry: MapEntry, rank: int) -> tuple[int, int]:
        start, stop = 0, length
        for axis in _axes(entry):
            parts = self.device_matrix[-1 - axis]
            index = rank // math.prod(self.device_matrix[len(self.device_matrix) - axis :]) % parts
            step = -(-(stop - start) // parts)
            start, stop = min(start + index * step, stop), min(start + (index + 1) * step, stop)
        return start, stop


def whole(dimensions: int, ranks: int = 1) -> Layout:
    """Return the layout in which each of `ranks` ranks holds the whole tensor."""
    return Layout((ranks,), (WHOLE,) * dimensions)


def from_cuts(cuts: Sequence[int], ranks: int, repetition: str = "right") -> Layout:
    """Return the layout that cuts dimension i into ``cuts[i]`` parts, the last ones fastest.

    The ranks that are left repeat the parts. Raises `ValueError` if `ranks` is no multiple of the
    number of parts.
    """
    last = len(cuts) - 1
    layout = Layout(cuts or (1,), [last - i if cut > 1 else WHOLE for i, cut in enumerate(cuts)])
    return layout.filled(ranks, repetition)


def axes_of(layout: Layout, dimension: int) -> tuple[int, ...]:
    """Return the axes, counted from the right, that cut a dimension."""
    return _axes(layout.tensor_map[dimension])


def _axes(entry: MapEntry) -> tuple[int, ...]:
    if isinstance(entry, tuple):
        return entry
    return () if entry == WHOLE else (entry,)


# Layouts as the placements of PyTorch's DTensor, in numbers alone.
#
# A mesh has the shape of the device matrix. A placement says for one axis of the mesh, from the
# left, which dimension it cuts; None stands for `Replicate`.


Placements = tuple[int | None, ...]


def to_placements(layout: Layout) -> Placements:
    """Return the dimension that each axis of the mesh cuts, or None.

    Raises `ValueError` where a dimension is cut along several axes that do not come in the order
    of the mesh: DTensor has no such placements.
    """
    axes = len(layout.device_matrix)
    placements: list[int | None] = [None] * axes
    for dimension in range(len(layout.tensor_map)):
        of_dimension = axes_of(layout, dimension)
        if list(of_dimension) != sorted(of_dimension, reverse=True):
            raise ValueError(
                f"{layout}: dimension {dimension} is cut along axes that are not in the order of "
                "the mesh, which DTensor cannot express"
            )
        for axis in of_dimension:
            placements[axes - 1 - axis] = dimension
    return tuple(placements)


def from_placements(
    mesh_shape: Sequence[int], placements: Sequence[int | None], dimensions: int
) -> Layout:
    """Return the layout of a DTensor with this number of dimensions; it may be uneven.

    Raises `ValueError` for another number of placements than the mesh has axes, and for a
    placement that cuts a dimension which the tensor does not have.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"a mesh of shape {tuple(mesh_shape)} needs {len(mesh_shape)} placements, not "
            f"{len(placements)}"
        )
    axes: list[list[int]] = [[] for _ in range(dimensions)]
    for index, dimension in enumerate(placements):
        if dimension is None:
            continue
        if not 0 <= dimension < dimensions:
            raise ValueError(
                f"placement {index} cuts dimension {dimension} of a tensor that has {dimensions}"
            )
        axes[dimension].append(len(mesh_shape) - 1 - index)
    entries = [each if len(each) > 1 else each[0] if each else WHOLE for each in axes]
    return Layout(mesh_shape, entries, uneven=True)


def on_mesh(layout: Layout, mesh_shape: Sequence[int]) -> Placements:
    """Return the placements of a layout on a finer mesh with as many ranks.

    Each axis of the device matrix is a group of neighbouring axes of the mesh. Raises `ValueError`
    where that cannot be, and as `to_placements`.
    """
    coarse = iter(to_placements(layout))
    axes = list(mesh_shape)
    placements: list[int | None] = []
    for parts in layout.device_matrix:
        dimension, product = next(coarse), 1
        while product < parts and axes and parts % (product * axes[0]) == 0:
            product *= axes.pop(0)
            placements.append(dimension)
        if product != parts:
            raise ValueError(
                f"a mesh of shape {tuple(mesh_shape)} has no neighbouring axes that make {parts} "
                f"parts, which {layout} needs: use a mesh of its prime factors, mesh()"
            )
    if any(axis != 1 for axis in axes):
        raise ValueError(
            f"{layout} has {layout.ranks} ranks, a mesh {tuple(mesh_shape)} has others"
        )
    return (*placements, *[None] * len(axes))


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number in rising order; (1,) for 1."""
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors) or (1,)
