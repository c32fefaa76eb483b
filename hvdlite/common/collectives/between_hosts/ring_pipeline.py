"""A ring as a pipeline: chunks go around it in steps, cut into the pieces of `pipeline`.

All collectives of `ring` but alltoall and broadcast are a `Plan`, which a `RingRun` executes. The
memory in use depends on DEPTH, AHEAD and the size of a piece, but not on the size of the tensors.

Partial sums are sent in the dtype of the tensors. If that is a 16-bit float, each member widens the
sum to float32, adds its part, and rounds once before it sends the sum on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.between_hosts.pipeline import AHEAD, START, Pipeline, RingOrder
from hvdlite.common.collectives.kernels import convert, scale
from hvdlite.common.transport.base import Pending, Transport


@dataclass(frozen=True, kw_only=True)
class Plan(Pipeline):
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
    """The execution of a `Plan` by one member."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
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
        """Send a piece of the chunk that this member is the first to send."""
        chunk = self._plan.chunk(START)
        buffer = self._buffer(chunk, piece)
        for stretch, values in self._values(chunk, piece, buffer):
            if self._plan.reduce_steps:
                self._load(stretch, values)
            else:
                np.copyto(stretch, values)
        self._send(buffer)

    def _receive(self, step: int, piece: int, buffer: Array) -> None:
        """Add to the sum that has come, or copy the result out, and send it on."""
        plan, chunk = self._plan, self._plan.chunk(step)
        if step < plan.reduce_steps:
            last = step == plan.reduce_steps - 1
            for stretch, values in self._values(chunk, piece, buffer):
                self._add(stretch, values, last)
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

    # -- arithmetic of a stretch

    def _load(self, stretch: Array, values: Array) -> None:
        """Make the first partial sum, of this member's values alone."""
        wide = self._widened(stretch)
        self._arithmetic.load(wide, values)
        if wide is not stretch:
            convert(stretch, wide)

    def _add(self, stretch: Array, values: Array, last: bool) -> None:
        """Add `values` to the partial sum in `stretch`, and postscale the `last` sum."""
        wide = self._widened(stretch)
        if wide is not stretch:
            convert(wide, stretch)
        self._arithmetic.absorb(wide, values)
        if last:
            scale(wide, self._arithmetic.reduction.postscale)
        if wide is not stretch:
            convert(stretch, wide)

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
