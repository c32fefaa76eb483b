"""A trip of data around a ring of ranks: what the collectives of `ring` have in common.

Chunks are cut into pieces, and the pieces follow each other around the ring: piece p makes step s
in wave s + p // DEPTH. The order of the messages is the same for all: by wave; in it, the later
steps first. So while a piece is added, others are being sent and received, and the memory that is
held does not depend on the size of the tensors.

Partial sums travel in the type of the tensors. Where that is a 16-bit type, each member widens what
comes, adds to it in float32, and rounds once before it passes the sum on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.kernels import Arithmetic, convert, scale
from hvdlite.common.transport.base import Pending, Transport

DEPTH = 2  # pieces that start together
AHEAD = 4  # receives that are posted before they are waited for
START = -1  # stands for the step of a piece that nobody sends to this member first


class Chunk(Protocol):
    """Part of the tensors, such as a `Chain`; only single pieces of it are asked for."""

    size: int  # elements

    def views(self, start: int, stop: int) -> Iterator[Array]:
        """The elements [start, stop), in order."""

    def unpack(self, start: int, buffer: Array) -> None:
        """Copy `buffer` into the elements from `start` on."""


def nothing(piece: int) -> None:
    """What there is to do before and after a piece, by default."""


@dataclass(frozen=True)
class RingOrder:
    """The ring as one member sees it."""

    order: tuple[int, ...]  # positions of the members, host by host
    ranks: tuple[int, ...]  # their global ranks
    index: int  # the place of this member in `order`

    @classmethod
    def of(cls, members: Members) -> RingOrder:
        """The ring through all members of `members`."""
        order = tuple(member for host in members.topology.hosts for member in host)
        ranks = tuple(members.ranks[member] for member in order)
        return cls(order, ranks, order.index(members.index))

    def rank(self, distance: int) -> int:
        """The global rank `distance` places after this one."""
        return self.ranks[(self.index + distance) % len(self.ranks)]


@dataclass(frozen=True)
class Plan:
    """One trip around the ring: `reduce_steps`, then `gather_steps`."""

    ring_order: RingOrder
    sources: Sequence[Chunk]  # the chunks of the input that this member has; empty: not its own
    targets: Sequence[Chunk]  # the chunks of the output that this member wants
    arithmetic: Arithmetic  # of the reduce steps; the gather steps copy its output
    reduce_steps: int
    gather_steps: int
    shift: int  # in step s, member i sends chunk (i - s - shift) mod N
    piece_bytes: int  # on the wire, where the last piece of a chunk may be smaller
    before: Callable[[int], None] = nothing  # called with a piece when its sources are needed
    after: Callable[[int], None] = nothing  # called with a piece when its targets are complete
    fewest_pieces: int = 0  # for rings that have to keep in step

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return self.reduce_steps + self.gather_steps

    def chunk(self, step: int) -> int:
        """The chunk that is received in `step`; the one sent is that of step - 1."""
        return (self.ring_order.index - step - 1 - self.shift) % len(self.ring_order.order)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every chunk."""
        pairs = zip(self.sources, self.targets, strict=True)
        return [max(source.size, target.size) for source, target in pairs]

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        """What travels."""
        return self.arithmetic.output_dtype

    @cached_property
    def length(self) -> int:
        """Elements of a piece."""
        return max(1, self.piece_bytes // self.wire_dtype.itemsize)

    @cached_property
    def pieces(self) -> int:
        """Pieces of the largest chunk; others may end in empty ones."""
        return max(-(-max(self.sizes) // self.length), self.fewest_pieces)

    def schedule(self) -> Iterator[tuple[int, int]]:
        """(step, piece) of all that a member does, in order; START is the step of a start."""
        started = 0
        for step, piece in self.messages():
            # All that must have started before this can come from the others.
            while started < min(self.pieces, (step + piece // DEPTH + 1) * DEPTH):
                yield START, started
                started += 1
            yield step, piece

    def watch(self) -> None:
        """Call `before` and `after` as the members of the ring do, without being one."""
        for step, piece in self.schedule():
            if step == START:
                self.before(piece)
            elif step == self.steps - 1:
                self.after(piece)

    def messages(self) -> Iterator[tuple[int, int]]:
        """(step, piece) of all messages in the order in which everybody sends them."""
        groups = -(-self.pieces // DEPTH)
        for wave in range(groups + self.steps - 1):
            for step in range(min(wave, self.steps - 1), max(-1, wave - groups), -1):
                first = (wave - step) * DEPTH
                for piece in range(first, min(first + DEPTH, self.pieces)):
                    yield step, piece


class RingRun:
    """A `Plan` under way."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
        self._transport = transport
        self._plan = plan
        self._arithmetic = plan.arithmetic
        self._next, self._previous = plan.ring_order.rank(1), plan.ring_order.rank(-1)
        self._free: list[Array] = []
        self._sends: deque[tuple[Pending, Array]] = deque()
        self._wide: Array | None = None  # where sums are made that do not travel as they are

    def run(self) -> None:
        """Make the trip; all members must."""
        plan = self._plan
        messages = plan.messages()
        posted: deque[tuple[Array, Pending]] = deque()
        for step, piece in plan.schedule():
            if step == START:
                plan.before(piece)
                self._start(piece)
                continue
            while len(posted) < AHEAD and (message := next(messages, None)) is not None:
                posted.append(self._post(*message))
            buffer, pending = posted.popleft()
            self._transport.wait([pending])
            self._receive(step, piece, buffer)
            if step == plan.steps - 1:
                plan.after(piece)
        self._transport.wait([pending for pending, _ in self._sends])

    def _post(self, step: int, piece: int) -> tuple[Array, Pending]:
        buffer = self._buffer(self._plan.chunk(step), piece)
        return buffer, self._transport.irecv(self._previous, buffer)

    def _start(self, piece: int) -> None:
        """Send a piece of the chunk that nobody sends to this member first."""
        chunk = self._plan.chunk(START)
        buffer = self._buffer(chunk, piece)
        for stretch, values in self._own(chunk, piece, buffer):
            if self._plan.reduce_steps:
                self._load(stretch, values)
            else:
                np.copyto(stretch, values)
        self._send(buffer)

    def _receive(self, step: int, piece: int, buffer: Array) -> None:
        """Add to what has come, or copy it out, and pass it on."""
        plan, chunk = self._plan, self._plan.chunk(step)
        if step < plan.reduce_steps:
            last = step == plan.reduce_steps - 1
            for stretch, values in self._own(chunk, piece, buffer):
                self._add(stretch, values, last)
        if step >= plan.reduce_steps - 1:
            plan.targets[chunk].unpack(piece * plan.length, buffer)
        if step < plan.steps - 1:
            self._send(buffer)
        else:
            self._release(buffer)

    def _own(self, chunk: int, piece: int, buffer: Array) -> Iterator[tuple[Array, Array]]:
        """Stretches of `buffer`, each with this member's own values for it."""
        start, offset = piece * self._plan.length, 0
        for view in self._plan.sources[chunk].views(start, start + buffer.size):
            yield buffer[offset : offset + view.size], view
            offset += view.size

    # -- arithmetic of a stretch

    def _load(self, stretch: Array, values: Array) -> None:
        """The first partial sum."""
        wide = self._widened(stretch)
        self._arithmetic.load(wide, values)
        if wide is not stretch:
            convert(stretch, wide)

    def _add(self, stretch: Array, values: Array, last: bool) -> None:
        """Add `values` to the partial sum in `stretch`; the `last` sum is postscaled as well."""
        wide = self._widened(stretch)
        if wide is not stretch:
            convert(wide, stretch)
        self._arithmetic.absorb(wide, values)
        if last:
            scale(wide, self._arithmetic.reduction.postscale)
        if wide is not stretch:
            convert(stretch, wide)

    def _widened(self, stretch: Array) -> Array:
        """An accumulator for `stretch`: itself, if that is of the type."""
        if stretch.dtype == self._arithmetic.accumulator:
            return stretch
        if self._wide is None:
            self._wide = np.empty(self._plan.length, self._arithmetic.accumulator)
        return self._wide[: stretch.size]

    # -- buffers

    def _send(self, buffer: Array) -> None:
        self._sends.append((self._transport.isend(self._next, buffer), buffer))
        while self._sends and self._sends[0][0].done():
            self._release(self._sends.popleft()[1])

    def _buffer(self, chunk: int, piece: int) -> Array:
        """A buffer for this piece, of the size that it has."""
        plan = self._plan
        block = self._free.pop() if self._free else np.empty(plan.length, plan.wire_dtype)
        return block[: max(0, min(plan.length, plan.sizes[chunk] - piece * plan.length))]

    def _release(self, buffer: Array) -> None:
        block = buffer.base
        assert block is not None  # it is a view of what `_buffer` made
        self._free.append(block)
