"""A leader's count: it passes on what all ranks below it have, so that rank 0 hears it once.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdlite.common.collectives.table import ROWS, Effect
from hvdlite.common.messages import (
    NO_BIT,
    Departed,
    Eviction,
    Order,
    Report,
    Request,
    Response,
    Segment,
)
from hvdlite.common.process_set_table import GLOBAL_ID, ProcessSetTable, unflatten
from hvdlite.common.readiness import Readiness, mask_of, oldest, ranks_of


class _Set:
    """What a leader knows of one process set."""

    def __init__(self, members: int) -> None:
        self.readiness: Readiness[int | str] = Readiness(members)
        self.requests: dict[str, list[tuple[int, Request]]] = {}
        self.late: set[int | str] = set()  # passed on incomplete: the rest goes at once
        self.bits: dict[str, int] = {}  # what the members remember, by name
        self.passes_all = False  # a member has shut down: nothing will be complete

    def add(self, key: int | str, ranks: int, now: float) -> int:
        """Who is to be passed on for `key`, as bits: 0 while it is incomplete."""
        if self.passes_all or key in self.late:
            return self.readiness.take(key) | ranks
        return self.readiness.add(key, ranks, now)


class Aggregator:
    """Reports of the ranks below in, fewer reports out; orders pass by and are noted."""

    def __init__(self, size: int, below: Iterable[int]) -> None:
        self._below = mask_of(below)
        self._table = ProcessSetTable(size)
        self._sets = {GLOBAL_ID: _Set(self._below)}
        self._outgoing: list[Report] = []

    def receive(self, report: Report, now: float) -> None:
        """Count a report of a rank below, at `now` seconds."""
        state = self._sets.get(report.process_set_id)
        if state is None:
            return
        ranks = mask_of(report.ranks)
        bits: dict[int, list[int]] = {}
        for bit in report.bits:
            arrived = state.add(bit, ranks, now)
            if arrived:
                bits.setdefault(arrived, []).append(bit)
        for arrived, numbers in bits.items():
            self._pass_bits(report.process_set_id, arrived, numbers)
        for request in report.requests:
            self._receive_request(state, report.process_set_id, ranks, request, now)

    def note(self, order: Order) -> None:
        """An order passes by on its way to the ranks below."""
        if isinstance(order, Eviction):
            state = self._sets.get(order.process_set_id)
            if state is not None:
                state.readiness.discard(order.bit)
                state.late.discard(order.bit)
                state.bits = {n: bit for n, bit in state.bits.items() if bit != order.bit}
        elif isinstance(order, Departed):
            self._note_departure(order.rank)
        elif isinstance(order, Segment):
            for item in order.items:
                self._note_item(order.process_set_id, item)

    def _note_departure(self, rank: int) -> None:
        for number, state in self._sets.items():
            if rank in self._table.members(number):
                state.passes_all = True
                for key, arrived in state.readiness.take_partial(float("inf")):
                    self._pass(state, number, key, arrived)

    def flush(self, before: float) -> None:
        """Pass on what has waited since before `before`: rank 0 shall know who is late."""
        for number, state in self._sets.items():
            for key, arrived in state.readiness.take_partial(before):
                state.late.add(key)
                self._pass(state, number, key, arrived)

    @property
    def oldest(self) -> float | None:
        """Since when the oldest incomplete tensor waits."""
        return oldest(state.readiness for state in self._sets.values())

    def take_reports(self) -> tuple[Report, ...]:
        """What to send up now; each report is given once."""
        outgoing, self._outgoing = self._outgoing, []
        return tuple(outgoing)

    def _receive_request(
        self, state: _Set, number: int, ranks: int, request: Request, now: float
    ) -> None:
        if ROWS[request.collective].effect is Effect.JOIN:
            for key, arrived in state.readiness.excuse(ranks):
                self._pass(state, number, key, arrived)
            self._outgoing.append(Report(number, ranks_of(ranks), (), (request,)))
            return
        name = request.name
        state.requests.setdefault(name, []).append((ranks, request))
        bit = state.bits.get(name)
        if bit is not None:  # some ranks may send the bit: rank 0 has to hear of both
            state.late |= {bit, name}
            arrived = state.readiness.take(bit)
            if arrived:
                self._pass_bits(number, arrived, [bit])
        arrived = state.add(name, ranks, now)
        if arrived:
            self._pass(state, number, name, arrived)

    def _pass(self, state: _Set, number: int, key: int | str, arrived: int) -> None:
        if isinstance(key, int):
            self._pass_bits(number, arrived, [key])
            return
        alike: dict[Request, int] = {}
        for ranks, request in state.requests.pop(key, []):
            alike[request] = alike.get(request, 0) | ranks
        for request, ranks in alike.items():
            self._outgoing.append(Report(number, ranks_of(ranks), (), (request,)))

    def _pass_bits(self, number: int, arrived: int, bits: list[int]) -> None:
        self._outgoing.append(Report(number, ranks_of(arrived), tuple(bits)))

    def _note_item(self, number: int, item: Response | int) -> None:
        state = self._sets.get(number)
        if state is None:
            return
        if isinstance(item, int):
            state.late.discard(item)
            return
        request = item.request
        state.late.discard(request.name)
        if item.bit != NO_BIT:
            state.bits[request.name] = item.bit
        effect = ROWS[request.collective].effect
        if effect is Effect.NONE:
            return
        if item.error:
            return
        if effect is Effect.JOIN:
            state.readiness.expect_all()
        elif effect is Effect.ADD_SET:
            for ranks in unflatten(item.first_dims):
                self._sets[self._table.add(ranks)] = _Set(mask_of(ranks) & self._below)
        elif effect is Effect.REMOVE_SET:
            for removed in item.first_dims:
                self._table.remove(removed)
                del self._sets[removed]
