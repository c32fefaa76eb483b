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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.kernels import Arithmetic, convert, scale
from hvdlite.common.transport.base import Pending, Transport

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


# A ring as a pipeline: chunks go around it in steps, cut into pieces.
#
# All collectives of `ring` but alltoall and broadcast are a `RingPlan`, which a `RingRun` executes.
# The memory in use depends on DEPTH, AHEAD and the size of a piece, but not on that of the tensors.
#
# Partial sums are sent in the dtype of the tensors. If that is a 16-bit float, each member widens
# the sum to float32, adds its part, and rounds once before it sends the sum on.


@dataclass(frozen=True, kw_only=True)
class RingPlan(Pipeline):
    """One run around the ring: `reduce_steps`, which add, then `gather_steps`, which copy."""

    ring_order: RingOrder
    reduce_steps: int
    gather_steps: int
    shift: int = 0  # In step s, member i sends chunk (i - s - shift) mod N.

    @cached_property
    def steps(self) -> int:
        return self.reduce_steps + self.gather_steps

    def chunk(self, step: int) -> int:
        """Return the chunk that is received in `step`. The one sent is the chunk of step - 1."""
        return (self.ring_order.index - step - 1 - self.shift) % len(self.ring_order.order)

    def run(self, transport: Transport) -> None:
        RingRun(transport, self).run()


class RingRun:
    """The execution of a `RingPlan` by one member."""

    def __init__(self, transport: Transport, plan: RingPlan) -> None:
        self._transport = transport
        self._plan = plan
        self._arithmetic = plan.arithmetic
        self._next, self._previous = plan.ring_order.rank(1), plan.ring_order.rank(-1)
        self._free: list[Array] = []
        self._sends: deque[tuple[Pending, Array]] = deque()
        # Sums of 16-bit floats are made here; allocated when the first one is.
        self._wide: Array | None = None

    def run(self) -> None:
        """Execute the plan. Every member of the ring must do the same."""
        plan = self._plan
        messages = plan.messages()
        posted: deque[tuple[Array, Pending]] = deque()
        for step, piece in plan.schedule():
            if step == START:
                plan.before(piece)
                self._start(piece)
                continue
            while len(posted) < AHEAD and (message := next(messages, None)) is not None:
                buffer = self._buffer(plan.chunk(message[0]), message[1])
                posted.append((buffer, self._transport.irecv(self._previous, buffer)))
            buffer, pending = posted.popleft()
            self._transport.wait([pending])
            self._receive(step, piece, buffer)
            if step == plan.steps - 1:
                plan.after(piece)
        self._transport.wait([pending for pending, _ in self._sends])

    def _start(self, piece: int) -> None:
        """Send a piece of the chunk that this member is the first to send."""
        chunk = self._plan.chunk(START)
        buffer = self._buffer(chunk, piece)
        for stretch, values in self._values(chunk, piece, buffer):
            if not self._plan.reduce_steps:
                np.copyto(stretch, values)
                continue
            wide = self._widened(stretch)
            self._arithmetic.load(wide, values)
            if wide is not stretch:
                convert(stretch, wide)
        self._send(buffer)

    def _receive(self, step: int, piece: int, buffer: Array) -> None:
        """Add to the sum that has come, or copy the result out, and send it on."""
        plan, chunk = self._plan, self._plan.chunk(step)
        if step < plan.reduce_steps:
            last = step == plan.reduce_steps - 1
            for stretch, values in self._values(chunk, piece, buffer):
                wide = self._widened(stretch)
                if wide is not stretch:
                    convert(wide, stretch)
                self._arithmetic.absorb(wide, values)
                if last:
                    scale(wide, self._arithmetic.reduction.postscale)
                if wide is not stretch:
                    convert(stretch, wide)
        if step >= plan.reduce_steps - 1:
            plan.targets[chunk].unpack(piece * plan.length, buffer)
        if step < plan.steps - 1:
            self._send(buffer)
        else:
            self._release(buffer)

    def _values(self, chunk: int, piece: int, buffer: Array) -> Iterator[tuple[Array, Array]]:
        """Yield stretches of `buffer`, each with this member's values for it."""
        start, offset = piece * self._plan.length, 0
        for view in self._plan.sources[chunk].views(start, start + buffer.size):
            yield buffer[offset : offset + view.size], view
            offset += view.size

    def _widened(self, stretch: Array) -> Array:
        """Return the accumulator for `stretch`, which is itself if it has the dtype for it."""
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
        plan = self._plan
        block = self._free.pop() if self._free else np.empty(plan.length, plan.wire_dtype)
        return block[: max(0, min(plan.length, plan.sizes[chunk] - piece * plan.length))]

    def _release(self, buffer: Array) -> None:
        block = buffer.base
        assert block is not None  # it is a view of what `_buffer` made
        self._free.append(block)
