"""The execution of a `Schedule` by one member, piece by piece.

Of every piece that is under way a member has its sums so far, and the results that have come. Sums
have the accumulator's dtype. Those of a 16-bit float are rounded when they are sent, and widened
when they have come, so that each member rounds once. `pipeline` says in which order pieces and
rounds follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.between_hosts.pipeline import AHEAD, START, Pipeline, RingOrder
from hvdlite.common.collectives.between_hosts.schedules import Move, Schedule
from hvdlite.common.collectives.kernels import convert
from hvdlite.common.transport.base import Pending, Transport


@dataclass(frozen=True, kw_only=True)
class ScheduledPlan(Pipeline):
    """An allreduce by a schedule, or one half of it."""

    ring_order: RingOrder
    schedule_of_member: Schedule

    @property
    def steps(self) -> int:
        return len(self.schedule_of_member.rounds)

    def run(self, transport: Transport) -> None:
        ScheduleRun(transport, self).run()


class _Piece:
    """One piece of all blocks at this member, in the order of the layout."""

    def __init__(self, sums: Array, result: Array) -> None:
        self._sums, self._result = sums, result
        self.ends = [0]  # Where the blocks begin, and the last one ends.
        self.sends: list[Pending] = []

    def sums(self, start: int, stop: int) -> Array:
        return self._sums[self.ends[start] : self.ends[stop]]

    def result(self, start: int, stop: int) -> Array:
        return self._result[self.ends[start] : self.ends[stop]]


class ScheduleRun:
    """The execution of a `ScheduledPlan` by one member."""

    def __init__(self, transport: Transport, plan: ScheduledPlan) -> None:
        self._transport = transport
        self._plan = plan
        self._layout = plan.schedule_of_member.layout
        self._rounds = plan.schedule_of_member.rounds
        self._arithmetic = plan.arithmetic
        self._pieces: dict[int, _Piece] = {}  # Those under way.
        self._done: deque[_Piece] = deque()  # Their memory is used again when they are sent.
        self._free: list[Array] = []  # Buffers for partial sums that come.
        self._wide: Array | None = None

    def run(self) -> None:
        """Execute the plan. Every member must do the same."""
        plan = self._plan
        receives = self._receives()
        posted: deque[tuple[Array, Pending]] = deque()
        for step, piece in plan.schedule():
            if step == START:
                plan.before(piece)
                self._load(piece)
                self._send(0, piece)
                continue
            for move in self._rounds[step].receives:
                while len(posted) < AHEAD and (receive := next(receives, None)) is not None:
                    posted.append(receive)
                buffer, pending = posted.popleft()
                self._transport.wait([pending])
                if move.partial:
                    self._merge(move, self._pieces[piece], buffer)
            current = self._pieces[piece]
            for start, stop in self._rounds[step].finished:
                self._arithmetic.store(current.result(start, stop), current.sums(start, stop))
            if step + 1 < plan.steps:
                self._send(step + 1, piece)
            else:
                self._unpack(piece)
                plan.after(piece)
        for done in self._done:
            self._transport.wait(done.sends)

    def _receives(self) -> Iterator[tuple[Array, Pending]]:
        """Start to receive everything that comes, in order: each when it is asked for."""
        for step, number in self._plan.messages():
            for move in self._rounds[step].receives:
                buffer = self._piece(number).result(move.start, move.stop)
                if move.partial:
                    buffer = self._buffer(buffer.size)
                rank = self._plan.ring_order.ranks[move.peer]
                yield buffer, self._transport.irecv(rank, buffer)

    def _load(self, number: int) -> None:
        """Begin with this member's values."""
        piece, start = self._piece(number), number * self._plan.length
        for place, block in enumerate(self._layout):
            sums, offset, source = piece.sums(place, place + 1), 0, self._plan.sources[block]
            for view in source.views(start, min(start + sums.size, source.size)):
                self._arithmetic.load(sums[offset : offset + view.size], view)
                offset += view.size

    def _send(self, step: int, number: int) -> None:
        piece = self._pieces[number]
        for move in self._rounds[step].sends:
            body = piece.result(move.start, move.stop)
            if move.partial:
                sums = piece.sums(move.start, move.stop)
                if sums.dtype == body.dtype and not move.mutual:
                    body = sums
                else:
                    body = np.empty(sums.size, body.dtype)
                    convert(body, sums)
                    if move.mutual:
                        convert(sums, body)
            rank = self._plan.ring_order.ranks[move.peer]
            piece.sends.append(self._transport.isend(rank, body))

    def _merge(self, move: Move, piece: _Piece, buffer: Array) -> None:
        """Add partial sums that have come."""
        sums, values = piece.sums(move.start, move.stop), buffer
        if buffer.dtype != sums.dtype:
            if self._wide is None or self._wide.size < buffer.size:
                self._wide = np.empty(buffer.size, sums.dtype)
            values = self._wide[: buffer.size]
            convert(values, buffer)
        if move.mutual and move.peer < self._plan.ring_order.index:
            self._arithmetic.merge(values, sums)
            np.copyto(sums, values)
        else:
            self._arithmetic.merge(sums, values)
        block = buffer.base
        assert block is not None  # It is a view of what `_buffer` made.
        self._free.append(block)

    def _unpack(self, number: int) -> None:
        piece, start = self._pieces.pop(number), number * self._plan.length
        for place, block in enumerate(self._layout):
            if self._plan.targets[block].size:
                self._plan.targets[block].unpack(start, piece.result(place, place + 1))
        self._done.append(piece)

    # -- memory

    def _piece(self, number: int) -> _Piece:
        piece = self._pieces.get(number)
        if piece is None:
            plan, start = self._plan, number * self._plan.length
            if self._done and all(send.done() for send in self._done[0].sends):
                piece = self._done.popleft()
            else:
                size = sum(min(plan.length, each) for each in plan.sizes)
                result = sums = np.empty(size, plan.wire_dtype)
                if plan.schedule_of_member.reduces:
                    sums = np.empty(size, self._arithmetic.accumulator)
                piece = _Piece(sums, result)
            sizes = (max(0, min(plan.length, plan.sizes[each] - start)) for each in self._layout)
            piece.ends = [0, *accumulate(sizes)]
            piece.sends = []
            self._pieces[number] = piece
        return piece

    def _buffer(self, size: int) -> Array:
        """Return memory for `size` elements of what is sent."""
        block = self._free.pop() if self._free else None
        if block is None or block.size < size:
            block = np.empty(size, self._plan.wire_dtype)
        return block[:size]
