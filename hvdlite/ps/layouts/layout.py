"""Which server keeps which part of which tensor: decisions that every process makes alike.

A tensor that is larger than a part is cut into parts that are as even as can be. Parts are placed
in falling size, each on the server with the fewest bytes so far: the rule of the longest processing
time first (Graham 1969), whose largest load is at most 4/3 of the best one, and nearly even where
parts are many. Hashes of names, which others use, leave it to luck.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

PART_BYTES = 4_096_000


class Part(NamedTuple):
    """The elements `start` to `stop` of the flat tensor `key`, which `server` keeps."""

    key: int
    start: int
    stop: int
    server: int


@dataclass(frozen=True)
class Layout:
    """The parts of all tensors, sorted; `itemsizes` has the bytes of an element of each tensor."""

    parts: tuple[Part, ...]
    itemsizes: tuple[int, ...]
    num_servers: int

    @classmethod
    def of(
        cls, parts: Iterable[Sequence[Any]], num_servers: int, itemsizes: Sequence[int] = ()
    ) -> Layout:
        """Return the layout of parts as messages have them: the fields of each."""
        return cls(tuple(Part(*part) for part in parts), tuple(itemsizes), num_servers)

    def bytes_of(self, part: Part) -> int:
        return (part.stop - part.start) * self.itemsizes[part.key]

    def loads(self) -> list[int]:
        """Return the bytes that each server keeps."""
        loads = [0] * self.num_servers
        for part in self.parts:
            loads[part.server] += self.bytes_of(part)
        return loads

    def parts_of(self, server: int) -> list[Part]:
        """Return the parts that one server keeps, sorted."""
        return [part for part in self.parts if part.server == server]


def cut(size: int, most: int) -> list[tuple[int, int]]:
    """Cut `size` elements into ranges of at most `most`; the first ranges have one more.

    A tensor without elements has one range, so that its server knows it.
    """
    count = max(1, -(-size // most))
    base, longer = divmod(size, count)
    stops = [0]
    for number in range(count):
        stops.append(stops[-1] + base + (number < longer))
    return [*pairwise(stops)]


def place(
    sizes: Sequence[int],
    itemsizes: Sequence[int],
    num_servers: int,
    part_bytes: int | None = PART_BYTES,
    before: Layout | None = None,
) -> Layout:
    """Return the layout of tensors of these sizes, in elements; `part_bytes` None keeps them whole.

    The keys of the tensors go on where those of `before` end, whose parts stay where they are.
    """
    old = before or Layout((), (), num_servers)
    first = len(old.itemsizes)
    cuts = [
        (key, start, stop)
        for key, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True), first)
        for start, stop in cut(size, max(1, size if part_bytes is None else part_bytes // itemsize))
    ]
    every = (*old.itemsizes, *itemsizes)
    placed = _fill(cuts, every, old.loads())
    return Layout(tuple(sorted((*old.parts, *placed))), every, num_servers)


def _fill(
    cuts: Iterable[tuple[int, int, int]], itemsizes: Sequence[int], loads: Sequence[int]
) -> list[Part]:
    """Place ranges in falling size on the server with the fewest bytes, the lowest number first."""
    heap = [(load, server) for server, load in enumerate(loads)]
    heapq.heapify(heap)
    placed = []
    falling = sorted(cuts, key=lambda each: (-(each[2] - each[1]) * itemsizes[each[0]], each))
    for key, start, stop in falling:
        load, server = heap[0]
        placed.append(Part(key, start, stop, server))
        heapq.heapreplace(heap, (load + (stop - start) * itemsizes[key], server))
    return placed


def rebalance(layout: Layout, num_servers: int) -> Layout:
    """Return a layout for another number of servers that moves few bytes.

    The parts of servers that go are placed anew. Then the fullest server gives its largest part
    that is smaller than the difference to the emptiest one, until no part is: loads then differ by
    less than a part.
    """
    homeless = []
    kept: list[list[tuple[int, Part]]] = [[] for _ in range(num_servers)]  # With their bytes.
    for part in layout.parts:
        if part.server < num_servers:
            kept[part.server].append((layout.bytes_of(part), part))
        else:
            homeless.append((part.key, part.start, part.stop))
    loads = [sum(size for size, _ in parts) for parts in kept]
    for part in _fill(homeless, layout.itemsizes, loads):
        size = layout.bytes_of(part)
        kept[part.server].append((size, part))
        loads[part.server] += size
    for parts in kept:
        parts.sort()
    while True:
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        difference = loads[fullest] - loads[emptiest]
        at = bisect_left(kept[fullest], difference, key=itemgetter(0)) - 1
        if at < 0 or not kept[fullest][at][0]:
            break
        size, part = kept[fullest].pop(at)
        insort(kept[emptiest], (size, part._replace(server=emptiest)))
        loads[fullest] -= size
        loads[emptiest] += size
    every = sorted(part for parts in kept for _, part in parts)
    return Layout(tuple(every), layout.itemsizes, num_servers)
