"""The pieces in which many arrays or tensors are sent as flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

PIECE_BYTES = 64 << 20  # The most that a flat buffer takes, unless one array is larger.


class Sized(Protocol):
    """An array of numpy or a tensor."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


T = TypeVar("T", bound=Sized)


def in_pieces(arrays: Sequence[T]) -> Iterator[list[T]]:
    """Yield neighbours that fit in a buffer; nothing where no array has any element."""
    piece: list[T] = []
    size_bytes = 0
    for array in arrays:
        if piece and size_bytes + array.nbytes > PIECE_BYTES:
            yield piece
            piece, size_bytes = [], 0
        piece.append(array)
        size_bytes += array.nbytes
    if size_bytes:
        yield piece
