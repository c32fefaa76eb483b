"""A trip of data around a ring of ranks: what the collectives of `ring` have in common.

Chunks are cut into pieces, and the pieces follow each other around the ring: piece p makes step s
in wave s + p // DEPTH. The order of the messages is the same for all: by wave; in it, the later
steps first. So while a piece is added, others are being sent and received, and the memory that is
held does not depend on the size of the tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvdlite.common.collectives.base import Array, Group
from hvdlite.common.collectives.chain import Chain
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.transport.base import Pending, Transport

DEPTH = 2  # pieces that start together
AHEAD = 4  # receives that are posted before they are waited for


@dataclass(frozen=True)
class Circle:
    """The ring as one member sees it."""

    order: tuple[int, ...]  # positions in the group, host by host
    ranks: tuple[int, ...]  # their global ranks
    index: int  # the place of this member in `order`

    @classmethod
    def of(cls, group: Group) -> Circle:
        """The ring through all members of `group`."""
        order = tuple(member for host in group.topology.hosts for member in host)
        ranks = tuple(group.members[member] for member in order)
        return cls(order, ranks, order.index(group.index))

    def rank(self, distance: int) -> int:
        """The global rank `distance` places after this one."""
        return self.ranks[(self.index + distance) % len(self.ranks)]


@dataclass(frozen=True)
class Plan:
    """One trip around the ring: `reduce_steps`, then `gather_steps`."""

    circle: Circle
    sources: Sequence[Chain]  # the chunks of the input that this member has; empty: not its own
    targets: Sequence[Chain]  # the chunks of the output that this member wants
    arithmetic: Arithmetic  # of the reduce steps; the gather steps copy its output
    reduce_steps: int
    gather_steps: int
    shift: int  # in step s, member i sends chunk (i - s - shift) mod N

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return self.reduce_steps + self.gather_steps

    def chunk(self, step: int) -> int:
        """The chunk that is received in `step`; the one sent is that of step - 1."""
        return (self.circle.index - step - 1 - self.shift) % len(self.circle.order)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every chunk."""
        pairs = zip(self.sources, self.targets, strict=True)
        return [max(source.size, target.size) for source, target in pairs]

    def wire_dtype(self, step: int) -> np.dtype[Any]:
        """What travels in `step`."""
        reduced = step < self.reduce_steps
        return self.arithmetic.accumulator if reduced else self.arithmetic.output_dtype

    def messages(self, pieces: int) -> Iterator[tuple[int, int]]:
        """(step, piece) of all messages in the order in which everybody sends them."""
        groups = -(-pieces // DEPTH)
        for wave in range(groups + self.steps - 1):
            for step in range(min(wave, self.steps - 1), max(-1, wave - groups), -1):
                first = (wave - step) * DEPTH
                for piece in range(first, min(first + DEPTH, pieces)):
                    yield step, piece


class Trip:
    """A `Plan` under way."""

    def __init__(self, transport: Transport, plan: Plan, piece_bytes: int) -> None:
        self._transport = transport
        self._plan = plan
        self._arithmetic = plan.arithmetic
        self._length = max(1, piece_bytes // plan.wire_dtype(0).itemsize)
        self._next, self._previous = plan.circle.rank(1), plan.circle.rank(-1)
        self._free: list[Array] = []
        self._sends: deque[tuple[Pending, Array]] = deque()
        self._buffer_bytes = piece_bytes

    def run(self) -> None:
        """Make the trip; all members must."""
        pieces = max(-(-size // self._length) for size in self._plan.sizes)
        messages = self._plan.messages(pieces)
        posted: deque[tuple[int, int, Array, Pending]] = deque()
        started = 0
        for step, piece in self._plan.messages(pieces):
            while len(posted) < AHEAD and (message := next(messages, None)) is not None:
                posted.append(self._post(*message))
            while started < min(pieces, self._last_start(step, piece)):
                self._start(started)
                started += 1
            *_, buffer, pending = posted.popleft()
            self._transport.wait([pending])
            self._receive(step, piece, buffer)
        self._transport.wait([pending for pending, _ in self._sends])

    def _last_start(self, step: int, piece: int) -> int:
        """How many pieces must have started before (step, piece) can come from the others."""
        return (step + piece // DEPTH + 1) * DEPTH

    def _size(self, chunk: int, piece: int) -> int:
        return max(0, min(self._length, self._plan.sizes[chunk] - piece * self._length))

    def _post(self, step: int, piece: int) -> tuple[int, int, Array, Pending]:
        size = self._size(self._plan.chunk(step), piece)
        buffer = self._buffer(size, self._plan.wire_dtype(step))
        return step, piece, buffer, self._transport.irecv(self._previous, buffer)

    def _start(self, piece: int) -> None:
        """Send a piece of the chunk that nobody sends to this member first."""
        plan, chunk = self._plan, self._plan.chunk(-1)
        buffer = self._buffer(self._size(chunk, piece), plan.wire_dtype(0))
        if plan.reduce_steps:
            for stretch, values in self._own(chunk, piece, buffer):
                self._arithmetic.load(stretch, values)
        else:
            plan.sources[chunk].pack(piece * self._length, buffer)
        self._send(buffer)

    def _receive(self, step: int, piece: int, buffer: Array) -> None:
        """Add to what has come, or copy it out, and pass it on."""
        plan, chunk = self._plan, self._plan.chunk(step)
        if step < plan.reduce_steps:
            for stretch, values in self._own(chunk, piece, buffer):
                self._arithmetic.absorb(stretch, values)
        if step == plan.reduce_steps - 1:
            buffer = self._finished(buffer)
        if step >= plan.reduce_steps - 1:
            plan.targets[chunk].unpack(piece * self._length, buffer)
        if step < plan.steps - 1:
            self._send(buffer)
        else:
            self._release(buffer)

    def _own(self, chunk: int, piece: int, buffer: Array) -> Iterator[tuple[Array, Array]]:
        """Stretches of `buffer`, each with this member's own values for it."""
        start, offset = piece * self._length, 0
        for view in self._plan.sources[chunk].views(start, start + buffer.size):
            yield buffer[offset : offset + view.size], view
            offset += view.size

    def _finished(self, buffer: Array) -> Array:
        """The result as it is sent around: postscaled and rounded."""
        if self._arithmetic.plain_output:
            return buffer
        output = self._buffer(buffer.size, self._arithmetic.output_dtype)
        self._arithmetic.store(output, buffer)
        self._release(buffer)
        return output

    def _send(self, buffer: Array) -> None:
        self._sends.append((self._transport.isend(self._next, buffer), buffer))
        while self._sends and self._sends[0][0].done():
            self._release(self._sends.popleft()[1])

    def _buffer(self, size: int, dtype: np.dtype[Any]) -> Array:
        """A buffer of `size` elements; all are cut from blocks of one size, used again."""
        block = self._free.pop() if self._free else np.empty(self._buffer_bytes, np.uint8)
        return block[: size * dtype.itemsize].view(dtype)

    def _release(self, buffer: Array) -> None:
        block: Any = buffer.base
        while block.base is not None:
            block = block.base
        self._free.append(block)
