"""A leader's count: it passes on what all ranks below it have, so that rank 0 hears it once.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdlite.common.base.bitsets import NO_NUMBERS, NumberSet, mask_of
from hvdlite.common.collectives.table import ROWS, Effect
from hvdlite.common.decisions.bit_readiness import Arrival, BitReadiness
from hvdlite.common.decisions.grouped import GroupSizes
from hvdlite.common.decisions.request_readiness import Alike, RequestReadiness, earliest
from hvdlite.common.plain.messages import (
    NO_BIT,
    Departed,
    Eviction,
    Order,
    Report,
    Request,
    Response,
    Segment,
)
from hvdlite.common.plain.process_set_table import GLOBAL_ID, ProcessSetTable, unflatten


class _Set:
    """What a leader knows of one process set."""

    def __init__(self, members: int) -> None:
        self._everyone = NumberSet.of_mask(members)  # in the form in which it is passed on
        self.asked = RequestReadiness(members)
        self.bits = BitReadiness(members)
        self.sizes = GroupSizes()
        self.late: set[int | str] = set()  # passed on incomplete: the rest goes at once
        self._known = NO_NUMBERS  # the bits that the members remember
        self.bit_of: dict[str, int] = {}  # what the members remember, by name
        self.name_of: dict[int, str] = {}  # and by bit
        # Nothing is held: a member has shut down, so that nothing will be complete ...
        self.departed = False
        # ... or a rank below has joined: its join must not overtake what it has reported before.
        self.joined = False

    @property
    def passes_all(self) -> bool:
        """Whether nothing is held here until all ranks below have it."""
        return self.departed or self.joined

    def add_bits(self, bits: NumberSet, ranks: int, now: float) -> list[Arrival]:
        """What is to be passed on. Bits that were evicted are reported again, in full."""
        bits &= self._known
        arrivals = self.bits.add(bits, ranks, now)
        if self.passes_all:
            arrivals += self.bits.take(bits)
        elif self.late:
            arrivals += self.bits.take(NumberSet.of(bit for bit in bits if bit in self.late))
        return arrivals

    def add(self, request: Request, ranks: int, now: float) -> Alike:
        """What is to be passed on."""
        requests = self.asked.add(request, ranks, now)
        if self.passes_all or request.name in self.late:
            return requests or self.asked.take(request.name)
        return requests

    def ranks(self, mask: int) -> NumberSet:
        """The ranks of a mask, which is mostly that of all members."""
        return self._everyone if mask == self._everyone.mask else NumberSet.of_mask(mask)

    def remember(self, request: Request, bit: int) -> None:
        """The members remember the answer for `request` under `bit`."""
        self.bit_of[request.name], self.name_of[bit] = bit, request.name
        self._known |= NumberSet.of((bit,))
        if request.group:
            self.sizes.remember(request, bit)

    def forget(self, bit: int) -> None:
        """The members forget a bit."""
        self._known -= NumberSet.of((bit,))
        self.sizes.forget(bit)
        self.bits.discard(bit)
        self.late.discard(bit)
        name = self.name_of.pop(bit, None)
        if name is not None and self.bit_of[name] == bit:
            del self.bit_of[name]


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
        bits = NumberSet.of(report.bits)
        self._pass_bits(state, report.process_set_id, state.add_bits(bits, ranks, now))
        for group in state.sizes.uneven(bits):
            self._pass_group(state, report.process_set_id, group)
        for request in report.requests:
            self._receive_request(state, report.process_set_id, ranks, request, now)

    def note(self, order: Order) -> None:
        """An order passes by on its way to the ranks below."""
        if isinstance(order, Eviction):
            state = self._sets.get(order.process_set_id)
            if state is not None:
                state.forget(order.bit)
        elif isinstance(order, Departed):
            self._note_departure(order.rank)
        elif isinstance(order, Segment):
            for item in order.items:
                self._note_item(order.process_set_id, item)

    def _note_departure(self, rank: int) -> None:
        for number, state in self._sets.items():
            if rank in self._table.members(number):
                state.departed = True
                self._pass_partial(state, number, float("inf"))

    def flush(self, before: float) -> None:
        """Pass on what has waited since before `before`: rank 0 shall know who is late."""
        for number, state in self._sets.items():
            state.late |= self._pass_partial(state, number, before)

    @property
    def oldest(self) -> float | None:
        """Since when the oldest incomplete tensor waits."""
        sets = self._sets.values()
        return earliest(each for s in sets for each in (s.bits.oldest, s.asked.oldest))

    def take_reports(self) -> tuple[Report, ...]:
        """What to send up now; each report is given once."""
        outgoing, self._outgoing = self._outgoing, []
        return tuple(outgoing)

    def _receive_request(
        self, state: _Set, number: int, ranks: int, request: Request, now: float
    ) -> None:
        if ROWS[request.collective].effect is Effect.JOIN:
            self._pass_partial(state, number, float("inf"))
            state.joined = True
            self._pass(state, number, {request: ranks})
            return
        name = request.name
        bit = state.bit_of.get(name)
        if bit is not None:  # some ranks may send the bit: rank 0 has to hear of both
            state.late |= {bit, name}
            self._pass_bits(state, number, state.bits.take(NumberSet.of((bit,))))
        self._pass(state, number, state.add(request, ranks, now))
        if request.group and state.sizes.is_uneven(request.group, request.group_size):
            self._pass_group(state, number, request.group)

    def _pass_group(self, state: _Set, number: int, group: str) -> None:
        """Pass on what is held of a group of which ranks have different numbers of tensors."""
        self._pass_bits(state, number, state.bits.take(state.sizes.bits_of(group)))
        for request, _, _ in list(state.asked.waiting()):
            if request.group == group:
                self._pass(state, number, state.asked.take(request.name))

    def _pass(self, state: _Set, number: int, requests: Alike) -> None:
        for request, mask in requests.items():
            self._append(Report(number, state.ranks(mask), (), (request,)))

    def _pass_bits(self, state: _Set, number: int, arrivals: list[Arrival]) -> None:
        for mask, bits in arrivals:
            self._append(Report(number, state.ranks(mask), bits))

    def _append(self, report: Report) -> None:
        """Send it up, as part of the last report where that is of the same ranks."""
        if self._outgoing:
            last = self._outgoing[-1]
            alike = last.ranks is report.ranks and last.process_set_id == report.process_set_id
            if alike and not (last.requests and report.bits):  # bits come first
                bits = NumberSet.of(last.bits) | NumberSet.of(report.bits)
                requests = last.requests + report.requests
                self._outgoing[-1] = last._replace(bits=bits, requests=requests)
                return
        self._outgoing.append(report)

    def _pass_partial(self, state: _Set, number: int, before: float) -> set[int | str]:
        """Pass on what has waited since before `before`: which bits and names."""
        arrivals = state.bits.take_partial(before)
        asked = state.asked.take_partial(before)
        self._pass_bits(state, number, arrivals)
        for requests in asked:
            self._pass(state, number, requests)
        late: set[int | str] = {bit for _, bits in arrivals for bit in bits}
        return late | {next(iter(requests)).name for requests in asked}

    def _note_item(self, number: int, item: Response | int) -> None:
        state = self._sets.get(number)
        if state is None:
            return
        if isinstance(item, int):
            state.late.discard(item)
            state.sizes.note_answered_bit(item)
            return
        request = item.request
        state.late.discard(request.name)
        if request.group and not item.error:
            state.sizes.note_answer(request.group)
        if item.bit != NO_BIT:
            state.remember(request, item.bit)
        effect = ROWS[request.collective].effect
        if effect is Effect.NONE:
            return
        if item.error:
            return
        if effect is Effect.JOIN:
            state.joined = False
        elif effect is Effect.ADD_SET:
            for ranks in unflatten(item.first_dims):
                self._sets[self._table.add(ranks)] = _Set(mask_of(ranks) & self._below)
        elif effect is Effect.REMOVE_SET:
            for removed in item.first_dims:
                self._table.remove(removed)
                del self._sets[removed]
