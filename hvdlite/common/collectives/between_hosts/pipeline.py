"""The pipeline of a collective between hosts: pieces of the blocks follow each other through steps.

A collective cuts all tensors into blocks, and takes a number of steps with each of them. Blocks are
cut into pieces; piece p of every block makes step s in wave s + p // DEPTH. With two steps,
DEPTH = 2 and pieces 0 to 5, the messages (step: pieces) of one member are

    wave     0        1        2        3
    step 0   0 1      2 3      4 5
    step 1            0 1      2 3      4 5

Within a wave the later step comes first, so that a piece that is nearly done does not wait for one
that begins. Every member sends and receives in this order, which is why messages carry no numbers.
While one piece is added, others are sent and received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.transport.base import Transport

DEPTH = 2  # Pieces of one step in one wave.
AHEAD = 4  # Receives are posted before they are waited for, so that no message waits in the kernel.
START = -1  # The step of the chunk that this member is the first to send.


class Chunk(Protocol):
    """Part of the tensors, such as a `Chain`. A run reads and writes it piece by piece."""

    size: int  # elements

    def views(self, start: int, stop: int) -> Iterator[Array]:
        """Yield views of the elements [start, stop), in order."""

    def unpack(self, start: int, buffer: Array) -> None:
        """Copy `buffer` into the elements from `start` on."""


def nothing(piece: int) -> None:
    """Do nothing: the default of `Pipeline.before` and `Pipeline.after`."""


@dataclass(frozen=True)
class RingOrder:
    """The order of the members around a ring, as one of them sees it."""

    order: tuple[int, ...]  # positions of the members, host by host
    ranks: tuple[int, ...]  # their global ranks
    index: int  # the place of this member in `order`

    @classmethod
    def of(cls, members: Members) -> RingOrder:
        order = tuple(member for host in members.topology.hosts for member in host)
        ranks = tuple(members.ranks[member] for member in order)
        return cls(order, ranks, order.index(members.index))

    def rank(self, distance: int) -> int:
        """Return the global rank `distance` places after this member."""
        return self.ranks[(self.index + distance) % len(self.ranks)]


@dataclass(frozen=True, kw_only=True)
class Pipeline(ABC):
    """One collective between hosts, as one of its members sees it."""

    sources: Sequence[Chunk]  # The blocks of this member's input; those it does not have are empty.
    targets: Sequence[Chunk]  # The blocks of its output; those that it does not want are empty.
    arithmetic: Arithmetic
    length: int  # Elements of a piece of a block; the last piece may be smaller.
    before: Callable[[int], None] = nothing  # Is called with a piece when its sources are needed.
    after: Callable[[int], None] = nothing  # Is called with a piece when its targets are complete.
    fewest_pieces: int = 0  # Pipelines that run side by side have the same number of pieces.

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps."""

    @abstractmethod
    def run(self, transport: Transport) -> None:
        """Execute all of it. Every member must do the same."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of every block."""
        pairs = zip(self.sources, self.targets, strict=True)
        return [max(source.size, target.size) for source, target in pairs]

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        return self.arithmetic.output_dtype

    @cached_property
    def pieces(self) -> int:
        """Number of pieces of the largest block; smaller blocks end in empty pieces."""
        return max(-(-max(self.sizes) // self.length), self.fewest_pieces)

    def schedule(self) -> Iterator[tuple[int, int]]:
        """Yield (step, piece) of every action of a member, in order."""
        started = 0
        for step, piece in self.messages():
            # The previous member can only send this message after it got pieces from its own.
            while started < min(self.pieces, (step + piece // DEPTH + 1) * DEPTH):
                yield START, started
                started += 1
            yield step, piece

    def watch(self) -> None:
        """Call `before` and `after` when the members do, without being one."""
        for step, piece in self.schedule():
            if step == START:
                self.before(piece)
            elif step == self.steps - 1:
                self.after(piece)

    def messages(self) -> Iterator[tuple[int, int]]:
        """Yield (step, piece) of every message in the order in which all members send them."""
        rounds = -(-self.pieces // DEPTH)
        for wave in range(rounds + self.steps - 1):
            for step in range(min(wave, self.steps - 1), max(-1, wave - rounds), -1):
                first = (wave - step) * DEPTH
                for piece in range(first, min(first + DEPTH, self.pieces)):
                    yield step, piece
