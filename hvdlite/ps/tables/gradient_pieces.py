"""Gradients of a step that come piece by piece, as backward has them.

A piece is where it begins in which block, and its elements. Pieces are sent while backward still
runs; the push itself then has what is left, and says that pieces have gone before. A server that
has not all of them, as it has started in between, lets the worker send all of the push.

[Note: attempts] Every attempt of a worker to make a step has a number of its own, which its pieces
and its push carry: pieces that come late, of a step that is done again, of a process that was
killed or of an older layout, are never put together with those of another attempt.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array, Block

# In the body of a push: where its payloads belong; the attempt; whether it is the push itself.
PIECE, ATTEMPT, LAST = "piece", "attempt", "last"


class Piece(NamedTuple):
    """Elements of a block, from `start` on."""

    block: int
    start: int
    stop: int


class Assembly:
    """What a server has of one attempt of a worker to make a step."""

    def __init__(self, clock: int, attempt: int, blocks: Sequence[Block]) -> None:
        self.clock, self.attempt = clock, attempt
        self._arrays = [block.new() for block in blocks]
        self._here: set[Piece] = set()

    def add(self, message: Message) -> None:
        """Take pieces; those that were here before come with the same elements.

        Raises ValueError for a piece that lies in no block.
        """
        places = message.body[PIECE]
        for (block, start), payload in zip(places, message.payloads, strict=True):
            if not 0 <= block < len(self._arrays):
                raise ValueError(f"a piece is of block {block} of {len(self._arrays)}")
            array = self._arrays[block]
            elements = np.frombuffer(payload, array.dtype)
            piece = Piece(block, start, start + elements.size)
            if not 0 <= start <= piece.stop <= array.size:
                raise ValueError(f"a block has {array.size} elements, and a piece is {piece}")
            array[start : piece.stop] = elements
            self._here.add(piece)

    def gradients(self) -> list[Array] | None:
        """Return the gradients of all blocks; None where pieces are missing."""
        have = sum(piece.stop - piece.start for piece in self._here)
        return self._arrays if have == sum(array.size for array in self._arrays) else None


class Assemblies:
    """What a server has of the pushes of all workers, for the blocks of one layout."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._of: dict[int, Assembly] = {}

    def add(self, worker: int, message: Message) -> None:
        """Take pieces; those of another attempt are forgotten."""
        attempt = message.body.get(ATTEMPT, 0)
        found = self._of.get(worker)
        if found is None or (found.clock, found.attempt) != (message.clock, attempt):
            found = self._of[worker] = Assembly(message.clock, attempt, self._blocks)
        found.add(message)

    def take(self, worker: int, message: Message) -> list[Array] | None:
        """Return the gradients when the last message has come; None: pieces are missing."""
        self.add(worker, message)
        return self._of.pop(worker).gradients()

    def forget(self, worker: int) -> None:
        self._of.pop(worker, None)
