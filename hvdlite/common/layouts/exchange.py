"""Who sends what to whom while a tensor goes from one layout to another.

Each rank knows the parts of all ranks, so that no rank has to ask. With 4 ranks, from rows by two
(ranks 0 and 1 hold the upper half) to the whole tensor:

    rank 0 <- 2    rank 1 <- 3    rank 2 <- 0    rank 3 <- 1

Of ranks that hold the same part, each receiver takes another one; ranks 0 and 2 are then one
group, 1 and 3 another. This module never sees a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hvdlite.common.layouts.layout import Box, Layout, axes_of
from hvdlite.common.layouts.transfer import intersection, volume


@dataclass(frozen=True)
class Exchange:
    """What a rank does so that it holds its part under another layout.

    `members`: the ranks that exchange something with each other, with this one; only this one
    where it has all that it needs. `sends` and `receives` have a part for each member, or None, in
    indices of what this rank holds and of what it will hold. `is_gather`: all members send all
    that they hold to all.
    """

    shape: tuple[int, ...]
    members: tuple[int, ...]
    sends: tuple[Box | None, ...]
    receives: tuple[Box | None, ...]
    is_gather: bool

    @property
    def is_local(self) -> bool:
        return len(self.members) == 1


@lru_cache(maxsize=1 << 12)
def same_parts(held: Layout, wanted: Layout, shape: tuple[int, ...]) -> bool:
    """Return whether all ranks hold the same parts under two layouts."""
    return all(held.box(shape, rank) == wanted.box(shape, rank) for rank in range(held.ranks))


@lru_cache(maxsize=1 << 12)
def exchange(held: Layout, wanted: Layout, shape: tuple[int, ...], rank: int) -> Exchange:
    """Return what a rank does while a tensor of `shape` goes from `held` to `wanted`."""
    routes = _routes(held, wanted, shape)
    members = _connected(routes, rank)
    own, goal = held.box(shape, rank), wanted.box(shape, rank)
    return Exchange(
        tuple(stop - start for start, stop in goal),
        members,
        tuple(_inside(routes[each].get(rank), own) for each in members),
        tuple(_inside(routes[rank].get(each), goal) for each in members),
        all(
            routes[each].get(source) == held.box(shape, source)
            for each in members
            for source in members
        ),
    )


@lru_cache(maxsize=1 << 12)
def _routes(held: Layout, wanted: Layout, shape: tuple[int, ...]) -> list[dict[int, Box]]:
    """Return for each rank the ranks that it has parts from, itself among them."""
    boxes = [held.box(shape, rank) for rank in range(held.ranks)]
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        holders.setdefault(box, []).append(rank)
    routes: list[dict[int, Box]] = []
    for rank, own in enumerate(boxes):
        goal = wanted.box(shape, rank)
        number = holders[own].index(rank)
        found: dict[int, Box] = {}
        for box, ranks in holders.items():
            common = intersection(box, goal)
            if volume(common) and common is not None:
                found[rank if box == own else ranks[number % len(ranks)]] = common
        routes.append(found)
    return routes


@lru_cache(maxsize=1 << 16)
def missing_by_link(
    held: Layout, wanted: Layout, shape: tuple[int, ...], host_of: tuple[int, ...]
) -> tuple[int, int]:
    """Return the most elements that a rank receives from its own host, and from other hosts."""
    inside = between = 0
    for rank, sources in enumerate(_routes(held, wanted, shape)):
        near = far = 0
        for source, box in sources.items():
            if host_of[source] != host_of[rank]:
                far += volume(box)
            elif source != rank:
                near += volume(box)
        inside, between = max(inside, near), max(between, far)
    return inside, between


def _connected(routes: Sequence[dict[int, Box]], rank: int) -> tuple[int, ...]:
    """Return the ranks that this one exchanges with, and those that these exchange with."""
    neighbours: list[set[int]] = [set() for _ in routes]
    for receiver, sources in enumerate(routes):
        for source in sources:
            neighbours[receiver].add(source)
            neighbours[source].add(receiver)
    found, left = {rank}, [rank]
    while left:
        new = neighbours[left.pop()] - found
        found |= new
        left.extend(new)
    return tuple(sorted(found))


def _inside(box: Box | None, outer: Box) -> Box | None:
    if box is None:
        return None
    return tuple((a - first, b - first) for (a, b), (first, _) in zip(box, outer, strict=True))


# Partial sums: ranks whose coordinates differ only on some axes of the device matrix hold summands.


@lru_cache(maxsize=1 << 12)
def along(matrix: tuple[int, ...], positions: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks whose coordinates differ from those of `rank` only at these positions."""
    coordinates = [coordinates_of(matrix, each) for each in range(math.prod(matrix))]
    fixed = [each for each in range(len(matrix)) if each not in positions]
    return tuple(
        each
        for each, found in enumerate(coordinates)
        if all(found[at] == coordinates[rank][at] for at in fixed)
    )


def coordinates_of(matrix: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return where a rank stands in a device matrix."""
    found: list[int] = []
    for length in reversed(matrix):
        rank, index = divmod(rank, length)
        found.append(index)
    return tuple(reversed(found))


def repeated(layout: Layout) -> tuple[int, ...]:
    """Return the positions of the device matrix along which ranks hold the same part."""
    matrix = layout.device_matrix
    used = {axis for entry in range(len(layout.tensor_map)) for axis in axes_of(layout, entry)}
    return tuple(at for at, n in enumerate(matrix) if n > 1 and len(matrix) - 1 - at not in used)


@lru_cache(maxsize=1 << 12)
def scattered(
    held: Layout, positions: tuple[int, ...], wanted: Layout, shape: tuple[int, ...]
) -> bool:
    """Return whether each rank wants an equal part, and only it, of the sum of its group."""
    for rank in range(held.ranks):
        group = along(held.device_matrix, positions, rank)
        whole = held.box(shape, rank)
        parts = {wanted.box(shape, each) for each in group}
        sizes = {volume(part) for part in parts}
        if len(parts) < len(group) or len(sizes) > 1 or sum(map(volume, parts)) != volume(whole):
            return False
        if any(intersection(part, whole) != part for part in parts):
            return False
    return True


def part_of(held: Layout, wanted: Layout, shape: tuple[int, ...], rank: int, of: int) -> Box:
    """Return the part that `of` wants, in indices of what `rank` holds."""
    found = _inside(wanted.box(shape, of), held.box(shape, rank))
    assert found is not None
    return found


# Meshes: the fewest axes on which several layouts can be told.


def simplified(layout: Layout) -> Layout:
    """Return the layout with axes of length 1 left out, and neighbours that are always cut alike
    made one axis."""
    last = len(layout.device_matrix) - 1
    cut: dict[int, tuple[int, int]] = {}
    for dimension in range(len(layout.tensor_map)):
        for order, axis in enumerate(axes_of(layout, dimension)):
            cut[last - axis] = (dimension, order)
    matrix: list[int] = []
    uses: list[tuple[int, int] | None] = []
    previous: tuple[int, int] | None = (-1, 0)
    for at, length in enumerate(layout.device_matrix):
        if length == 1:
            continue
        use = cut.get(at)
        joined = use is None and previous is None
        if use is not None and previous is not None:
            joined = use[0] == previous[0] and use[1] == previous[1] + 1
        if joined:
            matrix[-1] *= length
        else:
            matrix.append(length)
            uses.append(use)
        previous = use
    if not matrix:
        matrix.append(1)
        uses.append(None)
    entries = [
        sorted((use[1], len(matrix) - 1 - at) for at, use in enumerate(uses) if use and use[0] == d)
        for d in range(len(layout.tensor_map))
    ]
    return Layout(
        matrix,
        [
            -1 if not found else found[0][1] if len(found) == 1 else [axis for _, axis in found]
            for found in entries
        ],
        layout.uneven,
    )


def coarsest_mesh(layouts: Sequence[Layout], ranks: int) -> tuple[int, ...]:
    """Return the shape of the mesh with the fewest axes on which all layouts fit.

    Where two of them exclude each other, as cuts by 2 and by 3 of 6 ranks, the later one is left
    out. One rank has a mesh of one axis.
    """
    borders = {ranks}
    for layout in layouts:
        product, own = 1, set()
        for length in simplified(layout).device_matrix:
            product *= length
            own.add(product)
        joined = sorted((borders | own) - {1})
        if all(b % a == 0 for a, b in itertools.pairwise(joined)):
            borders = set(joined)
    order = sorted(borders)
    return tuple(b // a for a, b in zip([1, *order], order, strict=False)) or (1,)
