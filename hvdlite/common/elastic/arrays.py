"""Broadcasts of many numpy arrays in few flat buffers: the values of weights, of any framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from hvdlite.common.api.objects import array_forms
from hvdlite.common.base.lists import split_by_bytes
from hvdlite.common.elastic.source import Source
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.tensors.numpy_adapter import Array


def copied(values: Array, kept: Array | None) -> Array:
    """Return a copy of an array, in the memory of one that was kept where it fits there."""
    if kept is None or (kept.shape, kept.dtype) != (values.shape, values.dtype):
        copy: Array = values.copy()
        return copy
    np.copyto(kept, values)
    return kept


# The pieces in which many arrays or tensors are sent as flat buffers.
PIECE_BYTES = 64 << 20  # The most that a flat buffer takes, unless one array is larger.


class Sized(Protocol):
    """An array of numpy or a tensor."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


T = TypeVar("T", bound=Sized)


def in_pieces(arrays: Sequence[T]) -> Iterator[list[T]]:
    """Yield neighbours that fit in a buffer; nothing where no array has any element."""
    if any(array.nbytes for array in arrays):
        yield from split_by_bytes(arrays, lambda array: array.nbytes, PIECE_BYTES)


def broadcast_arrays(arrays: Sequence[Array], name: str, source: Source) -> list[Any]:
    """Return the arrays of the root of the sync on all its ranks; blocks.

    Every rank gives arrays of the same shapes and dtypes in the same order; one buffer for each
    dtype is sent, in pieces. The root gets its own arrays back. Raises `HorovodInternalError`.
    """
    results: list[Any] = list(arrays)
    is_root = for_collective().rank == source.root_rank
    groups: dict[Any, list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(array.dtype, []).append(index)
    for dtype, indices in groups.items():
        rest = iter(indices)
        for number, piece in enumerate(in_pieces([arrays[i] for i in indices])):
            if is_root:
                flat = np.concatenate([np.ravel(array).view(np.uint8) for array in piece])
            else:
                flat = np.empty(sum(array.nbytes for array in piece), np.uint8)
            part = f"{name}.{dtype.name}.{number}"
            flat = array_forms.broadcast_(flat, source.root_rank, part, source.process_set)
            if is_root:
                continue
            start = 0
            for index, array in zip(islice(rest, len(piece)), piece, strict=True):
                values = flat[start : start + array.nbytes]
                results[index] = values.view(array.dtype).reshape(array.shape)
                start += array.nbytes
    return results
