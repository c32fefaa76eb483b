"""Gradients that a worker sends to other hosts before its push: see `gradient_pieces`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.ps.connections.messages import Buffer
from hvdlite.ps.layouts.blocks import Array, Block, dtype_of
from hvdlite.ps.tables.gradient_pieces import ATTEMPT, LAST, PIECE, Piece

LEAST_BYTES = 1 << 18  # Smaller parts go with the push itself.
MOST_MISSES = 2


class Gone(NamedTuple):
    """What was sent to a server before the push."""

    attempt: int
    pieces: Collection[Piece]
    arrays: Mapping[int, Array]  # Of blocks: memory for all of each, with its pieces in it.


# What the message says besides of what is left of a push, and its payloads.
Rest = tuple[Mapping[str, Any], Sequence[Buffer]]


def rest_of(blocks: Sequence[Block], gone: Gone, payloads: Sequence[Buffer]) -> Rest:
    """Return what was not sent of a push, whose payloads are whole blocks."""
    places, left = [], []
    for number, (block, payload) in enumerate(zip(blocks, payloads, strict=True)):
        itemsize = dtype_of(block.dtype).itemsize
        sent = sorted((piece.start, piece.stop) for piece in gone.pieces if piece.block == number)
        at = 0
        for start, stop in [*sent, (block.size, block.size)]:
            if start > at:
                places.append([number, at])
                left.append(payload[at * itemsize : start * itemsize])
            at = stop
    return {PIECE: places, ATTEMPT: gone.attempt, LAST: True}, left


class EarlySender:
    """Chooses what a worker sends as soon as backward has it, to servers of other hosts.

    What was sent is compared with the gradients of the push, which may have been clipped, unscaled
    or added to since: then the whole push is sent, and after two of those in a row nothing is sent
    early. No piece is sent twice in an attempt. `blocks` are those of each server in one layout;
    `new` makes memory for one.
    """

    def __init__(
        self, blocks: Sequence[Sequence[Block]], first_key: int,
        new: Callable[[Block], Array] = Block.new,
    ) -> None:  # fmt: skip
        self.misses = 0
        self._blocks, self._new = blocks, new
        # By server and block: what is pushed of this step, as far as it was sent.
        self._arrays: dict[int, dict[int, Array]] = {}
        self._attempt = int.from_bytes(os.urandom(6), "big")
        # Parts that are large enough, by the number of their tensor: server, piece, and where it
        # begins in the tensor.
        self._parts: dict[int, list[tuple[int, Piece, int]]] = {}
        self._sent: dict[int, dict[Piece, tuple[int, int, Array]]] = {}  # By server.
        for server, own in enumerate(blocks):
            for number, block in enumerate(own):
                at = 0
                for part in block.parts:
                    size = part.stop - part.start
                    if size * dtype_of(block.dtype).itemsize >= LEAST_BYTES:
                        piece = Piece(number, at, at + size)
                        found = self._parts.setdefault(part.key - first_key, [])
                        found.append((server, piece, part.start))
                    at += size

    def wants(self, tensor: int) -> bool:
        """Return whether something of a tensor may be sent early."""
        return tensor in self._parts and self.misses < MOST_MISSES

    def pieces_of(
        self, tensor: int, gradient: Array, *, far: Collection[int]
    ) -> Iterator[tuple[int, Mapping[str, Any], memoryview]]:
        """Yield servers that are `far`, what a message says of a piece, and a copy of it.

        They lie where the push has them, which then copies no more than the rest. Threads may call
        this at the same time for different tensors, and none while a step ends.
        """
        if not self.wants(tensor):
            return
        for server, piece, start in self._parts[tensor]:
            if server in far and piece not in self._sent.get(server, ()):
                arrays, block = self._arrays.setdefault(server, {}), piece.block
                if (array := arrays.get(block)) is None:
                    # Another thread may have made it meanwhile, and its pieces lie there already:
                    # all have to get the same memory, as `setdefault` gives it in one operation.
                    array = arrays.setdefault(block, self._new(self._blocks[server][block]))
                copy = array[piece.start : piece.stop]
                own = gradient[start : start + copy.size]
                np.copyto(copy, own, casting="unsafe")  # Of another dtype, it is found at the end.
                self._sent.setdefault(server, {})[piece] = tensor, start, copy
                body = {PIECE: [[piece.block, piece.start]], ATTEMPT: self._attempt}
                yield server, body, memoryview(copy.view(np.uint8).data)

    def end(self, tensors: Sequence[Array]) -> dict[int, Gone]:
        """End the step, whose gradients are `tensors`; without any, the step is skipped.

        Return by server what was sent of them; a server that is not there is to get all of it.
        """
        sent, self._sent = self._sent, {}
        arrays, self._arrays = self._arrays, {}
        attempt, self._attempt = self._attempt, self._attempt + 1
        if not sent or not tensors:
            return {}
        for pieces in sent.values():
            for tensor, start, copy in pieces.values():
                own = tensors[tensor][start : start + copy.size]
                bits = f"u{own.itemsize}"  # A NaN is itself then, and 0.0 differs from -0.0.
                same = own.dtype == copy.dtype and np.array_equal(own.view(bits), copy.view(bits))
                if not same:
                    self.misses += 1
                    return {}
        self.misses = 0
        return {
            server: Gone(attempt, pieces.keys(), arrays[server]) for server, pieces in sent.items()
        }
