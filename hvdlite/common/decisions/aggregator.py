"""The aggregator of a leader: merges the reports of the ranks below it into fewer reports.

A leader is the first rank of its host. It holds a tensor until all ranks below it have it, then
passes it on in one report, so that the work of rank 0 does not grow with the ranks of a host. Five
cases must not be held, as nobody would ever complete them here, or as rank 0 must decide:

* a tensor that waits for long: rank 0 names the ranks that miss it (`flush`);
* everything while a rank below has joined, or a member has shut down;
* a tensor that some ranks report by bit and others in full;
* a group of which ranks have different sizes;
* a message that a rank would receive from any rank: rank 0 tells it who has sent first.

See the theory of operation in coordinator.py. This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdlite.common.base.bitsets import NO_NUMBERS, NumberSet, mask_of
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.decisions.bit_readiness import Arrival, BitReadiness
from hvdlite.common.decisions.grouped import GroupSizes
from hvdlite.common.decisions.process_sets import change_sets
from hvdlite.common.decisions.request_readiness import RanksByRequest, RequestReadiness, earliest
from hvdlite.common.decisions.sender_searches import senders
from hvdlite.common.requests.messages import (
    NO_BIT,
    Carried,
    Departed,
    Eviction,
    Order,
    Report,
    Request,
    Response,
    Segment,
)
from hvdlite.common.requests.process_set_table import ProcessSetTable


class _LeaderSetState:
    """What the ranks below this leader have reported in one process set."""

    def __init__(self, members: int) -> None:
        # All members below, in the form of reports: mostly the ranks of a report are just these.
        self._all_members = NumberSet.of_mask(members)
        self.requests = RequestReadiness(members)
        self.bits = BitReadiness(members)
        self.sizes = GroupSizes()
        self.carried: dict[int, list[Carried]] = {}  # The data of bits that are held, by bit.
        # Bits and names that were passed on incomplete. Their later reports are passed on at once,
        # until the coordinator has answered.
        self.late: set[int | str] = set()
        # What the members remember: the bits, and the bit of each name and the reverse.
        self._known = NO_NUMBERS
        self.bit_of: dict[str, int] = {}
        self.name_of: dict[int, str] = {}
        # Set when a member has shut down: nothing of the set will ever be complete.
        self.departed = False
        # Set from a join below to the end of the join: a join must not overtake earlier reports.
        self.joined = False

    @property
    def passes_all(self) -> bool:
        """Whether nothing is held here until all ranks below have it."""
        return self.departed or self.joined

    def keep(self, carried: Iterable[Carried]) -> None:
        """Keep the data of bits until these are passed on. Those of unknown bits are dropped."""
        for each in carried:
            if each.bit in self.name_of:
                self.carried.setdefault(each.bit, []).append(each)

    def add_bits(self, bits: NumberSet, ranks: int, now: float) -> list[Arrival]:
        """Count `bits`; return the arrivals to pass on.

        Unknown bits were evicted meanwhile, and are dropped: their ranks report them again in full.
        """
        bits &= self._known
        arrivals = self.bits.add(bits, ranks, now)
        if self.passes_all:
            arrivals += self.bits.pop(bits)
        elif self.late:
            arrivals += self.bits.pop(NumberSet.of(bit for bit in bits if bit in self.late))
        return arrivals

    def add(self, request: Request, ranks: int, now: float) -> RanksByRequest:
        """Count a request; return the requests for its name if they are to be passed on."""
        requests = self.requests.add(request, ranks, now)
        if self.passes_all or request.name in self.late:
            return requests or self.requests.pop(request.name)
        return requests

    def ranks(self, mask: int) -> NumberSet:
        """Return the ranks of a mask; one shared object for all members, which encodes once."""
        return self._all_members if mask == self._all_members.mask else NumberSet.of_mask(mask)

    def remember(self, request: Request, bit: int) -> None:
        """Record that the members remember the answer for `request` under `bit`."""
        self.bit_of[request.name], self.name_of[bit] = bit, request.name
        self._known |= NumberSet.of((bit,))
        if request.group:
            self.sizes.remember(request, bit)

    def forget(self, bit: int) -> None:
        self._known -= NumberSet.of((bit,))
        self.sizes.forget(bit)
        self.bits.discard(bit)
        self.carried.pop(bit, None)
        self.late.discard(bit)
        name = self.name_of.pop(bit, None)
        if name is not None and self.bit_of[name] == bit:
            del self.bit_of[name]


class Aggregator:
    """Reports of the ranks below in, fewer reports out. Used by the engine thread of a leader."""

    def __init__(
        self, size: int, below: Iterable[int], sets: Iterable[tuple[int, ...]] = ()
    ) -> None:
        """Merge the reports of the ranks `below`, which include this rank.

        The process sets are `sets` at first; see `ProcessSetTable`.
        """
        self._below = mask_of(below)
        # The aggregator reads the orders that pass by, and so knows sets and bits as members do.
        self._table = ProcessSetTable(size, sets)
        self._sets = {
            process_set_id: _LeaderSetState(mask_of(ranks) & self._below)
            for process_set_id, ranks in self._table.all().items()
        }
        # The next reports to rank 0, until `pop_reports`.
        self._outgoing: list[Report] = []

    def receive(self, report: Report, now: float) -> None:
        """Count a report of a rank below, at `now` seconds."""
        state = self._sets.get(report.process_set_id)
        if state is None:
            return
        ranks = mask_of(report.ranks)
        bits = NumberSet.of(report.bits)
        state.keep(report.carried)
        self._pass_bits(state, report.process_set_id, state.add_bits(bits, ranks, now))
        for group in state.sizes.uneven(bits):
            self._pass_group(state, report.process_set_id, group)
        for request in report.requests:
            self._receive_request(state, report.process_set_id, ranks, request, now)

    def note(self, order: Order) -> None:
        """Record an order that passes by on its way to the ranks below."""
        if isinstance(order, Eviction):
            state = self._sets.get(order.process_set_id)
            if state is not None:
                state.forget(order.bit)
        elif isinstance(order, Departed):
            for process_set_id, each in self._sets.items():
                if order.rank in self._table.members(process_set_id):
                    each.departed = True
                    self._pass_partial(each, process_set_id, float("inf"))
        elif isinstance(order, Segment):
            for item in order.items:
                self._note_item(order.process_set_id, item)

    def flush(self, before: float) -> None:
        """Pass on tensors that wait since before `before`, so that rank 0 can name late ranks."""
        for process_set_id, state in self._sets.items():
            state.late |= self._pass_partial(state, process_set_id, before)

    @property
    def oldest(self) -> float | None:
        """Since when the oldest incomplete tensor waits, in seconds; None without any."""
        sets = self._sets.values()
        return earliest(time for s in sets for time in (s.bits.oldest, s.requests.oldest))

    def pop_reports(self) -> tuple[Report, ...]:
        """Return what to send up now; each report is returned once."""
        outgoing, self._outgoing = self._outgoing, []
        return tuple(outgoing)

    def _receive_request(
        self, state: _LeaderSetState, process_set_id: int, ranks: int, request: Request, now: float
    ) -> None:
        if SPECS[request.collective].effect is Effect.JOIN:
            self._pass_partial(state, process_set_id, float("inf"))
            state.joined = True
            self._pass(state, process_set_id, {request: ranks})
            return
        if SPECS[request.collective].effect is Effect.RELEASE_SET:
            self._pass(state, process_set_id, {request: ranks})
            return
        if SPECS[request.collective].effect is Effect.FIND_SENDER:
            for message in senders(request):
                state.late.add(message)
                self._pass(state, process_set_id, state.requests.pop(message))
            self._pass(state, process_set_id, {request: ranks})
            return
        name = request.name
        bit = state.bit_of.get(name)
        if bit is not None:
            # Other ranks may report the bit, and the two would never complete each other here.
            # Rank 0 compares them, and evicts the bit if they differ.
            state.late |= {bit, name}
            self._pass_bits(state, process_set_id, state.bits.pop(NumberSet.of((bit,))))
        self._pass(state, process_set_id, state.add(request, ranks, now))
        if request.group and state.sizes.is_uneven(request.group, request.group_size):
            self._pass_group(state, process_set_id, request.group)

    def _pass_group(self, state: _LeaderSetState, process_set_id: int, group: str) -> None:
        """Pass on all held tensors of a group of which ranks have different sizes."""
        self._pass_bits(state, process_set_id, state.bits.pop(state.sizes.bits_of(group)))
        for request, _, _ in list(state.requests.waiting()):
            if request.group == group:
                self._pass(state, process_set_id, state.requests.pop(request.name))

    def _pass(self, state: _LeaderSetState, process_set_id: int, requests: RanksByRequest) -> None:
        for request, mask in requests.items():
            self._append(Report(process_set_id, state.ranks(mask), (), (request,)))

    def _pass_bits(
        self, state: _LeaderSetState, process_set_id: int, arrivals: list[Arrival]
    ) -> None:
        for mask, bits in arrivals:
            carried: tuple[Carried, ...] = ()
            if state.carried:
                carried = tuple(each for bit in bits for each in state.carried.pop(bit, ()))
            self._append(Report(process_set_id, state.ranks(mask), bits, carried=carried))

    def _append(self, report: Report) -> None:
        """Add a report to the outgoing ones, merged into the last one if the ranks are the same.

        A receiver counts the bits of a report before its requests, so bits are never merged into a
        report with requests: they would overtake them.
        """
        if self._outgoing:
            last = self._outgoing[-1]
            same = last.ranks is report.ranks and last.process_set_id == report.process_set_id
            if same and not (last.requests and report.bits):
                bits = NumberSet.of(last.bits) | NumberSet.of(report.bits)
                requests = last.requests + report.requests
                carried = last.carried + report.carried
                self._outgoing[-1] = last._replace(bits=bits, requests=requests, carried=carried)
                return
        self._outgoing.append(report)

    def _pass_partial(
        self, state: _LeaderSetState, process_set_id: int, before: float
    ) -> set[int | str]:
        """Pass on tensors that wait since before `before`; return their bits and names."""
        arrivals = state.bits.pop_overdue(before)
        overdue = state.requests.pop_overdue(before)
        self._pass_bits(state, process_set_id, arrivals)
        for requests in overdue:
            self._pass(state, process_set_id, requests)
        late: set[int | str] = {bit for _, bits in arrivals for bit in bits}
        return late | {next(iter(requests)).name for requests in overdue}

    def _note_item(self, process_set_id: int, item: Response | int) -> None:
        """Record an answer: a bit that is announced, a join that is complete, sets that change."""
        state = self._sets.get(process_set_id)
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
        effect = SPECS[request.collective].effect
        if effect is Effect.NONE or item.error:
            return
        if effect is Effect.JOIN:
            state.joined = False
        else:
            made, gone, _ = change_sets(self._table, item)
            for added in made:
                members = mask_of(self._table.members(added)) & self._below
                self._sets[added] = _LeaderSetState(members)
            for removed in gone:
                del self._sets[removed]
