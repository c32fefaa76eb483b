"""What a server keeps of a table, as flat blocks: parts of one dtype and parameter group.

A push and a pull have one payload for each block, in which its parts lie one after another.

[Note: blocks] A block has no more bytes than BLOCK_BYTES, but for one of a single part. Whoever
receives a payload has it in memory of the C library, which gives memory back to the system that
is larger than some MiB: each of its pages would be a page fault in each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hvdlite.ps.layouts.layout import Layout, Part

Array = NDArray[Any]
BLOCK_BYTES = 8 << 20
SMALL_BYTES = 1 << 14


class TensorSpec(NamedTuple):
    """A tensor of a table, as every worker must declare it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: int = 0  # Of the optimizer's parameter groups.

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize


def specs_of_words(words: Iterable[Sequence[Any]]) -> list[TensorSpec]:
    """Return the tensors of a message, which has the fields of each."""
    return [TensorSpec(name, dtype, tuple(shape), group) for name, dtype, shape, group in words]


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; raise ValueError for one that cannot be sent."""
    if name == "bfloat16":
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except TypeError:  # A name that is none, as that of a text.
        dtype = np.dtype(object)
    if dtype.kind not in "fiu":
        raise ValueError(
            f"dtype {name} cannot be kept by a parameter server: give float or integer"
        )
    return dtype


@dataclass(frozen=True)
class Block:
    """Parts of one dtype and group that one server keeps, sorted."""

    dtype: str
    group: int
    parts: tuple[Part, ...]

    @cached_property
    def size(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @cached_property
    def places(self) -> list[tuple[int, int, int, int, int]]:
        """The key of each part, where it begins and ends in its tensor, and where in the block."""
        ends = [*accumulate(part.stop - part.start for part in self.parts)]
        starts = [0, *ends][: len(ends)]
        return [
            (part.key, part.start, part.stop, start, end)
            for part, start, end in zip(self.parts, starts, ends, strict=True)
        ]

    def new(self) -> Array:
        """Return memory for the block, which is not initialized."""
        return np.empty(self.size, dtype_of(self.dtype))

    def view(self, payload: Any) -> Array:
        """Return the array that a payload is; raise ValueError for one of another size."""
        array = np.frombuffer(payload, dtype_of(self.dtype))
        if array.size != self.size:
            raise ValueError(f"a payload has {array.size} elements, and its block has {self.size}")
        return array

    def gather(self, tensors: Sequence[Array], first_key: int, into: Array) -> None:
        """Copy the parts out of flat tensors, the first of which has the key `first_key`."""
        if self.parts:
            pieces = [
                tensors[key - first_key][start:stop] for key, start, stop, _, _ in self.places
            ]
            np.concatenate(pieces, out=into, casting="unsafe")

    def small_copy(self, tensors: Sequence[Array], first_key: int) -> bytes | None:
        """Return the payload of a block that is one small part; None for another block.

        It costs a third of what `gather` does, and no other thread gets its turn meanwhile.
        """
        if len(self.parts) != 1:
            return None
        key, start, stop, _, _ = self.places[0]
        part = tensors[key - first_key][start:stop]
        fits = part.nbytes <= SMALL_BYTES and part.dtype == dtype_of(self.dtype)
        return part.tobytes() if fits else None

    def gather_others(
        self, tensors: Sequence[Array], first_key: int, into: Array,
        here: Collection[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Copy the parts out that are not here: `here` says where others begin and end in it."""
        for key, start, stop, at, end in self.places:
            if (at, end) not in here:
                into[at:end] = tensors[key - first_key][start:stop]

    def scatter(self, block: Array, tensors: Sequence[Array], first_key: int) -> None:
        """Copy the parts back into flat tensors."""
        for key, start, stop, at, end in self.places:
            tensors[key - first_key][start:stop] = block[at:end]


def blocks_of(
    specs: Sequence[TensorSpec], first_key: int, layout: Layout, server: int
) -> list[Block]:
    """Return the blocks of a table that a server keeps; its keys begin with `first_key`."""
    found: dict[tuple[int, str], list[list[Part]]] = {}
    room: dict[tuple[int, str], int] = {}  # In the last block of each kind.
    for part in layout.parts_of(server):
        if not first_key <= part.key < first_key + len(specs):
            continue
        spec = specs[part.key - first_key]
        kind, nbytes = (spec.group, spec.dtype), (part.stop - part.start) * spec.itemsize
        if nbytes > room.get(kind, -1):
            found.setdefault(kind, []).append([])
            room[kind] = BLOCK_BYTES
        found[kind][-1].append(part)
        room[kind] -= nbytes
    return [
        Block(dtype, group, tuple(parts))
        for (group, dtype), blocks in sorted(found.items())
        for parts in blocks
    ]
