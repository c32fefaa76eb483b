"""Broadcasts of many numpy arrays in few flat buffers: the values of weights, of any framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.common.api.forms import Forms
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.elastic.source import Source
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter
from hvdlite.common.runtime.state import for_collective

PIECE_BYTES = 64 << 20  # The most that a flat buffer takes, unless one array is larger.

_forms: Forms[Array] = Forms(EngineRunner(NumpyAdapter()))


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
        for number, piece in enumerate(_pieces(arrays, indices)):
            flat = _packed([arrays[i] for i in piece], is_root)
            part = f"{name}.{dtype.name}.{number}"
            flat = _forms.broadcast_(flat, source.root_rank, part, source.process_set)
            if not is_root:
                received = _unpacked(flat, [arrays[i] for i in piece])
                results = _with(results, piece, received)
    return results


def _pieces(arrays: Sequence[Array], indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of neighbours that fit in a buffer."""
    piece: list[int] = []
    size_bytes = 0
    for index in indices:
        if piece and size_bytes + arrays[index].nbytes > PIECE_BYTES:
            yield piece
            piece, size_bytes = [], 0
        piece.append(index)
        size_bytes += arrays[index].nbytes
    if size_bytes:
        yield piece


def _packed(arrays: Sequence[Array], with_values: bool) -> Array:
    if not with_values:
        return np.empty(sum(array.nbytes for array in arrays), np.uint8)
    return np.concatenate([np.ravel(array).view(np.uint8) for array in arrays])


def _unpacked(flat: Array, like: Sequence[Array]) -> list[Array]:
    ends = np.cumsum([array.nbytes for array in like]).tolist()
    starts = [0, *ends[:-1]]
    return [
        flat[start:end].view(array.dtype).reshape(array.shape)
        for start, end, array in zip(starts, ends, like, strict=True)
    ]


def _with(results: list[Any], piece: Sequence[int], received: Sequence[Array]) -> list[Any]:
    for index, array in zip(piece, received, strict=True):
        results[index] = array
    return results
