"""Several flat arrays seen as one, so that tensors can be cut into pieces across their borders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from hvdlite.common.collectives.base import Array


class Chain:
    """A view of flat arrays of one dtype, one behind the other."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = [array for array in arrays if array.size]
        self._ends = list(accumulate(array.size for array in self._arrays))
        self.size = self._ends[-1] if self._ends else 0

    def views(self, start: int, stop: int) -> Iterator[Array]:
        """Yield the elements [start, stop) as views of the arrays that hold them."""
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
        """Return a copy of the elements [start, stop), which must not be empty."""
        return np.concatenate(list(self.views(start, stop)))

    def unpack(self, start: int, buffer: Array) -> None:
        """Copy `buffer` into the elements from `start` on."""
        offset = 0
        for view in self.views(start, start + buffer.size):
            np.copyto(view, buffer[offset : offset + view.size])
            offset += view.size

    def copy_to(self, target: Chain) -> None:
        start = 0
        for view in self.views(0, self.size):
            target.unpack(start, view)
            start += view.size


def even_part(size: int, parts: int, part: int) -> slice:
    """Return where the `part`-th of `parts` nearly equal parts of `size` elements lies."""
    return slice(size * part // parts, size * (part + 1) // parts)


def even_chain(arrays: Sequence[Array], parts: int, part: int) -> Chain:
    """Chain the `part`-th of `parts` nearly equal parts of every array.

    The part an element belongs to depends on its place in its own array alone, and so does the
    order in which it is summed: fusion with other tensors does not change a bit of the result.
    """
    return Chain([array[even_part(array.size, parts, part)] for array in arrays])


def member_chain(arrays: Sequence[Array], counts: Sequence[Sequence[int]], member: int) -> Chain:
    """Chain the part of every array that belongs to `member`: counts[t][member] elements of t."""
    chosen = []
    for array, sizes in zip(arrays, counts, strict=True):
        start = sum(sizes[:member])
        chosen.append(array[start : start + sizes[member]])
    return Chain(chosen)
