"""Layouts as the placements of PyTorch's DTensor, in numbers alone.

A mesh has the shape of the device matrix. A placement says for one axis of the mesh, from the
left, which dimension it cuts; None stands for `Replicate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.common.layouts.layout import WHOLE, Layout, axes_of

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
