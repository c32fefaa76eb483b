"""The coordinator: counts who has which tensor, checks that they agree, and orders what to run.

One total order over all process sets, decided here and followed by every rank, is what keeps
overlapping process sets from waiting for each other. This module never sends, sleeps or reads a
clock: it is a function of the reports it is given and the times that come with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hvdlite.common.base.bitsets import NumberSet, lowest, mask_of, numbers_of
from hvdlite.common.collectives.table import ROWS, Effect, disagreement
from hvdlite.common.decisions.bit_readiness import Arrival, BitReadiness
from hvdlite.common.decisions.fusion import next_segments
from hvdlite.common.decisions.grouped import Groups
from hvdlite.common.decisions.request_readiness import Alike, RequestReadiness, earliest, everyone
from hvdlite.common.decisions.response_cache import CoordinatorCache
from hvdlite.common.decisions.stall_inspector import Waiting
from hvdlite.common.plain.messages import (
    NO_BIT,
    NO_RANK,
    Departed,
    Eviction,
    Order,
    Report,
    Request,
    Response,
    Retune,
    Segment,
)
from hvdlite.common.plain.process_set_table import GLOBAL_ID, ProcessSetTable, flatten


class _Set:
    """What the coordinator knows of one process set."""

    def __init__(self, number: int, members: tuple[int, ...], cache_capacity: int) -> None:
        self.number = number
        self.members = members
        self.mask = mask_of(members)
        self.asked = RequestReadiness(self.mask)
        self.bits = BitReadiness(self.mask)
        self.cache = CoordinatorCache(cache_capacity)
        self.groups = Groups(len(members))
        self.last_joined = NO_RANK
        self.join: Request | None = None  # while some members have joined, and not all
        self.joins = 0  # how many times all members have joined
        self.evictions = 0  # how many bits its members were told to forget
        self.progress = 0.0  # when a tensor was answered or a rank joined last

    def expect(self, ranks: int) -> None:
        """These members no longer count as joined."""
        self.bits.expect(ranks)
        self.asked.expect(ranks)
        if not self.bits.absent:
            self.join = None

    def waiting(self) -> Iterator[tuple[Request, int, float]]:
        """What some ranks have and others have not: a request, who is missing, and since when."""
        for bit, missing, since in self.bits.waiting():
            yield self.cache.peek(bit)[0].request, missing, since
        yield from self.asked.waiting()


class Coordinator:
    """Reports in, orders out."""

    def __init__(
        self, size: int, *, cache_capacity: int, threshold_bytes: int, keep_groups: bool = False
    ) -> None:
        self._capacity = cache_capacity
        self._threshold_bytes = threshold_bytes
        self._keep_groups = keep_groups
        self._table = ProcessSetTable(size)
        self._sets = {GLOBAL_ID: self._new_set(GLOBAL_ID)}
        self._ready: list[Response] = []
        self._announced: set[tuple[int, int]] = set()  # (process set, bit) that members know
        self._evictions: list[Eviction] = []
        self._departures: list[Departed] = []
        self._retunes: list[Retune] = []
        self._departed = 0  # ranks, as bits
        self._leavers: list[int] = []  # the same, in the order of leaving: the first is to blame

    def receive(self, report: Report, now: float) -> None:
        """Take in what some ranks have ready, at `now` seconds."""
        state = self._sets.get(report.process_set_id)
        if state is None:  # removed meanwhile: its members know, and have failed the tensor
            return
        ranks = mask_of(report.ranks)
        # Bits that are not known were evicted meanwhile: the ranks send them again, in full.
        bits = state.cache.known(NumberSet.of(report.bits))
        if state.mask & self._departed:
            self._refuse(state, bits, report.requests)
            return
        answers = len(self._ready)
        if bits:
            self._receive_bits(state, bits, ranks, now)
        for request in report.requests:
            self._receive_request(state, ranks, request, now)
        if len(self._ready) > answers:
            state.progress = now

    def depart(self, rank: int) -> None:
        """`rank` shuts down: what waits for it fails, now and later."""
        self._departed |= 1 << rank
        self._leavers.append(rank)
        for state in self._sets.values():
            if state.mask & self._departed:
                self._fail_all(state)
        self._departures.append(Departed(rank))

    def retune(self, retune: Retune) -> None:
        """Decide by these settings from now on, and let all ranks follow."""
        self._threshold_bytes = retune.fusion_threshold_bytes
        self._capacity = retune.cache_capacity
        for state in self._sets.values():
            state.cache.capacity = retune.cache_capacity
            for bit in state.cache.overflow():
                self._evict(state, bit)
        self._retunes.append(retune)

    def take_orders(self) -> tuple[Order, ...]:
        """What all ranks shall do next, in this order; each order is given once."""
        if not (self._ready or self._evictions or self._departures or self._retunes):
            return ()
        segments = next_segments(self._ready, self._threshold_bytes, self._keep_groups)
        orders: list[Order] = [self._segment(responses) for responses in segments]
        orders += self._evictions
        orders += self._departures
        orders += self._retunes
        self._ready, self._evictions, self._departures, self._retunes = [], [], [], []
        return tuple(orders)

    @property
    def oldest(self) -> float | None:
        """Since when the oldest incomplete tensor waits."""
        sets = self._sets.values()
        times = (each for s in sets for each in (s.bits.oldest, s.asked.oldest))
        joins = (s.progress for s in sets if s.join is not None)
        return earliest((*times, *joins))

    def waiting(self) -> Iterator[Waiting]:
        """Every tensor that some ranks have and others have not, and the joins that wait.

        A join may wait for as long as the other ranks make progress.
        """
        for state in self._sets.values():
            for request, missing, since in state.waiting():
                yield Waiting(request.name, tuple(numbers_of(missing)), since)
            if state.join is not None:
                joined = state.bits.absent
                others = tuple(numbers_of(state.mask & ~joined))
                yield Waiting("join", others, state.progress, tuple(numbers_of(joined)))

    def _new_set(self, number: int) -> _Set:
        return _Set(number, self._table.members(number), self._capacity)

    # -- arrivals

    def _receive_bits(self, state: _Set, bits: NumberSet, ranks: int, now: float) -> None:
        errors: dict[str, str] = {}
        for group in state.cache.groups(bits):
            request = state.cache.peek(next(iter(group)))[0].request
            errors[request.group] = state.groups.disagreement(ranks, request, len(group))
        for arrival in state.bits.add(bits, ranks, now):
            self._complete_bits(state, arrival)
        for name, error in errors.items():
            self._fail_group(state, name, error)

    def _receive_request(self, state: _Set, ranks: int, request: Request, now: float) -> None:
        if ROWS[request.collective].effect is Effect.JOIN:
            self._join(state, ranks, request, now)
            return
        bit = state.cache.find(request.name)
        if bit is not None:
            if not ranks & ~state.cache.peek(bit)[1].get(request, 0):
                self._receive_bits(state, NumberSet.of((bit,)), ranks, now)
                return
            self._evict(state, bit)
        error = ""
        if request.group:
            error = state.groups.disagreement(ranks, request, 1)
        requests = state.asked.add(request, ranks, now)
        if requests:
            self._complete(state, requests)
        self._fail_group(state, request.group, error)

    def _join(self, state: _Set, ranks: int, request: Request, now: float) -> None:
        """`ranks` have joined, and what they reported before has come.

        A join says how many joins and evictions its rank knew of. One that has crossed an eviction
        does not count: tensors may have been reported before it under a bit that was forgotten.
        The rank sends them again, and the join after them.
        """
        if request.shape != (state.joins, state.evictions) or not ranks & ~state.bits.absent:
            return
        state.join = request
        state.last_joined = ranks.bit_length() - 1
        state.progress = now
        for arrival in state.bits.excuse(ranks):
            self._complete_bits(state, arrival)
        for requests in state.asked.excuse(ranks):
            self._complete(state, requests)
        if state.bits.all_absent:
            state.expect(state.mask)
            state.joins += 1
            self._ready.append(Response(request, last_joined=state.last_joined))

    # -- answers

    def _complete_bits(self, state: _Set, arrival: Arrival) -> None:
        """All ranks of `state` have the tensors, or have joined."""
        for bit in arrival.bits:
            response = state.cache.use(bit)
            if arrival.ranks != state.mask:
                response = self._answer_some(state, response, arrival.ranks)
            self._ready += state.groups.hold(response)

    def _complete(self, state: _Set, requests: Alike) -> None:
        """All ranks of `state` have asked for the tensor, or have joined."""
        response = self._answer(state, requests)
        if response.error:
            for group in {request.group for request in requests if request.group}:
                state.groups.poison(group, response)
        elif ROWS[response.request.collective].cacheable:
            response = state.cache.remember(response, requests)
            for bit in state.cache.overflow():
                self._evict(state, bit)
        self._ready += state.groups.hold(self._apply(response, requests))

    def _answer_some(self, state: _Set, response: Response, ranks: int) -> Response:
        """The answer to what only `ranks` have ready: the remembered one, where it is the same."""
        requests = state.cache.peek(response.bit)[1]
        own = {request: mask & ranks for request, mask in requests.items() if mask & ranks}
        answer = self._answer(state, own)
        return response if answer == response._replace(bit=NO_BIT) else answer

    def _answer(self, state: _Set, requests: Alike) -> Response:
        (request, ranks), *others = _by_rank(requests)
        for other, other_ranks in others:
            why = disagreement((lowest(ranks), request), (lowest(other_ranks), other))
            if why:
                return Response(request, error=why)
        row = ROWS[request.collective]
        if not row.scalars and not request.shape:
            return Response(
                request, error=f"{row.name} '{request.name}': a tensor without dimensions has "
                "no rows; reshape it to (1,)",
            )  # fmt: skip
        if row.rooted and not everyone(requests) >> request.root_rank & 1:
            return Response(
                request, error=f"{row.name} '{request.name}': root rank {request.root_rank} "
                "has joined and has no data to give",
            )  # fmt: skip
        if not row.varying_rows:
            return Response(request)
        rows = {rank: r.shape[0] for r, ranks in requests.items() for rank in numbers_of(ranks)}
        return Response(request, first_dims=tuple(rows.get(rank, 0) for rank in state.members))

    def _apply(self, response: Response, requests: Alike) -> Response:
        """Let the answer change the process sets; it fails where the table refuses."""
        effect = ROWS[response.request.collective].effect
        if response.error or effect is Effect.NONE:
            return response
        if effect is Effect.ADD_SET:
            return self._add_sets(response, requests)
        numbers = tuple(dict.fromkeys(request.root_rank for request, _ in _by_rank(requests)))
        for number in numbers:
            self._table.remove(number)
            del self._sets[number]
        self._evictions = [each for each in self._evictions if each.process_set_id not in numbers]
        self._announced = {each for each in self._announced if each[0] not in numbers}
        return response._replace(first_dims=numbers)

    def _add_sets(self, response: Response, requests: Alike) -> Response:
        sets = list(dict.fromkeys(request.shape for request, _ in _by_rank(requests)))
        try:
            for ranks in sets:
                self._table.check(ranks)
        except ValueError as error:
            return response._replace(error=str(error))
        for ranks in sets:
            number = self._table.add(ranks)
            self._sets[number] = self._new_set(number)
        return response._replace(first_dims=flatten(sets))

    def _fail_all(self, state: _Set) -> None:
        """A member has shut down: what its set has begun will never be complete."""
        unanswered = [request for request, _, _ in state.waiting()]
        unanswered += [response.request for response in state.groups.take_held()]
        if state.join is not None:
            unanswered.append(state.join)
            state.expect(state.mask)
        for request in unanswered:
            self._fail_waiting(state, request, self._departure_error(state, request))

    def _refuse(self, state: _Set, bits: NumberSet, requests: Iterable[Request]) -> None:
        """A member has shut down before this was reported."""
        for request in (*(state.cache.peek(bit)[0].request for bit in bits), *requests):
            self._ready.append(Response(request, error=self._departure_error(state, request)))

    def _fail_waiting(self, state: _Set, request: Request, error: str) -> None:
        """Nobody can complete this any more, for the reason that is given."""
        bit = state.cache.find(request.name)
        if bit is not None:
            state.bits.discard(bit)
        state.asked.take(request.name)
        self._ready.append(Response(request, error=error))

    def _fail_group(self, state: _Set, group: str, error: str) -> None:
        """Fail what waits of a group of which ranks have different numbers of tensors."""
        if error:
            for request, _, _ in list(state.waiting()):
                if request.group == group:
                    self._fail_waiting(state, request, error)

    def _departure_error(self, state: _Set, request: Request) -> str:
        first = next(rank for rank in self._leavers if state.mask >> rank & 1)
        return (
            f"{request.collective} '{request.name}': rank {first} has been shut down "
            "and cannot take part any more"
        )

    def _evict(self, state: _Set, bit: int) -> None:
        for arrival in state.bits.take(NumberSet.of((bit,))):
            # Of these, the joined ones report the tensor again, and then that they have joined.
            state.expect(arrival.ranks & state.bits.absent)
        state.evictions += 1
        state.cache.forget(bit)
        self._announced.discard((state.number, bit))
        self._evictions.append(Eviction(state.number, bit))

    def _segment(self, responses: list[Response]) -> Segment:
        number = responses[0].request.process_set_id
        return Segment(number, tuple(self._item(number, response) for response in responses))

    def _item(self, number: int, response: Response) -> Response | int:
        if response.bit == NO_BIT:
            return response
        if (number, response.bit) in self._announced:
            return response.bit
        self._announced.add((number, response.bit))
        return response


def _by_rank(requests: Alike) -> list[tuple[Request, int]]:
    """The requests, with their ranks; the one of the first rank first."""
    return sorted(requests.items(), key=lambda item: lowest(item[1]))
