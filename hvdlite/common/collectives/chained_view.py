"""Several flat arrays seen as one: what lets tensors be cut into pieces across their borders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from hvdlite.common.collectives.base import Array


class Chain:
    """Flat arrays of one dtype, one behind the other; nothing is copied."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = [array for array in arrays if array.size]
        self._ends = list(accumulate(array.size for array in self._arrays))
        self.size = self._ends[-1] if self._ends else 0

    def views(self, start: int, stop: int) -> Iterator[Array]:
        """The elements [start, stop) as views of the arrays they lie in."""
        index = bisect_right(self._ends, start)
        while start < stop:
            array, end = self._arrays[index], self._ends[index]
            offset = end - array.size
            yield array[start - offset : min(stop, end) - offset]
            start, index = end, index + 1

    def pack(self, start: int, buffer: Array) -> None:
        """Copy the elements from `start` on into `buffer`, as many as it holds."""
        offset = 0
        for view in self.views(start, start + buffer.size):
            np.copyto(buffer[offset : offset + view.size], view)
            offset += view.size

    def copy(self, start: int, stop: int) -> Array:
        """The elements [start, stop), of which there must be some, in a new array."""
        return np.concatenate(list(self.views(start, stop)))

    def unpack(self, start: int, buffer: Array) -> None:
        """Copy `buffer` into the elements from `start` on."""
        offset = 0
        for view in self.views(start, start + buffer.size):
            np.copyto(view, buffer[offset : offset + view.size])
            offset += view.size

    def copy_to(self, target: Chain) -> None:
        """Copy all elements into those of `target`."""
        start = 0
        for view in self.views(0, self.size):
            target.unpack(start, view)
            start += view.size


def even_part(size: int, parts: int, part: int) -> slice:
    """The `part`-th of `parts` nearly equal parts of `size` elements."""
    return slice(size * part // parts, size * (part + 1) // parts)


def even_chain(arrays: Sequence[Array], parts: int, part: int) -> Chain:
    """The `part`-th of `parts` nearly equal parts of every array.

    Where an element goes depends on its place in its own array alone.
    """
    return Chain([array[even_part(array.size, parts, part)] for array in arrays])


def member_chain(arrays: Sequence[Array], counts: Sequence[Sequence[int]], member: int) -> Chain:
    """The part of every array that belongs to `member`, where array t has counts[t][i] for i."""
    chosen = []
    for array, sizes in zip(arrays, counts, strict=True):
        start = sum(sizes[:member])
        chosen.append(array[start : start + sizes[member]])
    return Chain(chosen)
