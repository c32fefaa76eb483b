"""The coordinator: counts who has which tensor, checks that they agree, and orders what to run.

One total order over all process sets, decided here and followed by every rank, is what keeps
overlapping process sets from waiting for each other. This module never sends, sleeps or reads a
clock: it is a function of the reports it is given and the times that come with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hvdlite.common.collectives.table import ROWS, Effect, disagreement
from hvdlite.common.fusion import next_segments
from hvdlite.common.groups import Groups
from hvdlite.common.messages import (
    NO_BIT,
    NO_RANK,
    Departed,
    Eviction,
    Order,
    Report,
    Request,
    Response,
    Segment,
)
from hvdlite.common.process_set_table import GLOBAL_ID, ProcessSetTable, flatten
from hvdlite.common.readiness import Readiness, mask_of, oldest, ranks_of
from hvdlite.common.response_cache import CoordinatorCache
from hvdlite.common.stall import Waiting


class _Set:
    """What the coordinator knows of one process set."""

    def __init__(self, number: int, members: tuple[int, ...], cache_capacity: int) -> None:
        self.number = number
        self.members = members
        self.mask = mask_of(members)
        self.readiness: Readiness[int | str] = Readiness(self.mask)  # by bit, or by name
        self.requests: dict[str, dict[int, Request]] = {}
        self.cache = CoordinatorCache(cache_capacity)
        self.groups = Groups(len(members))
        self.last_joined = NO_RANK

    def request(self, key: int | str) -> Request:
        """A request for the tensor that `readiness` counts under `key`."""
        if isinstance(key, int):
            return self.cache.peek(key)[0].request
        return next(iter(self.requests[key].values()))


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
        self._departed = 0  # ranks, as bits
        self._leavers: list[int] = []  # the same, in the order of leaving: the first is to blame

    def receive(self, report: Report, now: float) -> None:
        """Take in what some ranks have ready, at `now` seconds."""
        state = self._sets.get(report.process_set_id)
        if state is None:  # removed meanwhile: its members know, and have failed the tensor
            return
        ranks = mask_of(report.ranks)
        for bit in report.bits:
            if bit in state.cache:  # else evicted meanwhile: the ranks send it again, in full
                request = state.request(bit)
                error = self._group_error(state, report.ranks, request)
                self._arrive(state, bit, ranks, now)
                self._fail_group(state, request.group, error)
        for request in report.requests:
            error = self._group_error(state, report.ranks, request)
            for rank in report.ranks:
                self._receive_request(state, rank, request, now)
            self._fail_group(state, request.group, error)

    def depart(self, rank: int) -> None:
        """`rank` shuts down: what waits for it fails, now and later."""
        self._departed |= 1 << rank
        self._leavers.append(rank)
        for state in self._sets.values():
            if state.mask & self._departed:
                for key, _, _ in list(state.readiness.waiting()):
                    self._fail_waiting(state, key)
        self._departures.append(Departed(rank))

    def take_orders(self) -> tuple[Order, ...]:
        """What all ranks shall do next, in this order; each order is given once."""
        if not (self._ready or self._evictions or self._departures):
            return ()
        segments = next_segments(self._ready, self._threshold_bytes, self._keep_groups)
        orders: list[Order] = [self._segment(responses) for responses in segments]
        orders += self._evictions
        orders += self._departures
        self._ready, self._evictions, self._departures = [], [], []
        return tuple(orders)

    @property
    def oldest(self) -> float | None:
        """Since when the oldest incomplete tensor waits."""
        return oldest(state.readiness for state in self._sets.values())

    def waiting(self) -> Iterator[Waiting]:
        """Every tensor that some ranks have and others have not."""
        for state in self._sets.values():
            for key, missing, since in state.readiness.waiting():
                yield Waiting(state.request(key).name, ranks_of(missing), since)

    def _new_set(self, number: int) -> _Set:
        return _Set(number, self._table.members(number), self._capacity)

    # -- arrivals

    def _receive_request(self, state: _Set, rank: int, request: Request, now: float) -> None:
        if ROWS[request.collective].effect is Effect.JOIN:
            self._join(state, rank, request)
            return
        bit = state.cache.find(request.name)
        if bit is not None:
            if state.cache.peek(bit)[1].get(rank) == request:
                self._arrive(state, bit, 1 << rank, now)
                return
            self._evict(state, bit)
        state.requests.setdefault(request.name, {})[rank] = request
        self._arrive(state, request.name, 1 << rank, now)

    def _arrive(self, state: _Set, key: int | str, ranks: int, now: float) -> None:
        if state.readiness.add(key, ranks, now):
            self._complete(state, key)
        elif state.mask & self._departed:
            self._fail_waiting(state, key)

    def _join(self, state: _Set, rank: int, request: Request) -> None:
        state.last_joined = rank
        for key, _ in state.readiness.excuse(1 << rank):
            self._complete(state, key)
        if state.readiness.all_absent:
            state.readiness.expect_all()
            self._ready.append(Response(request, last_joined=rank))
        elif state.mask & self._departed:
            self._ready.append(Response(request, error=self._departure_error(state, request)))

    # -- answers

    def _complete(self, state: _Set, key: int | str) -> None:
        """All ranks of `state` have the tensor, or have joined."""
        if isinstance(key, int):
            self._ready += state.groups.hold(self._remembered(state, key))
            return
        requests = dict(sorted(state.requests.pop(key).items()))
        response = self._answer(state, requests)
        if response.error:
            for group in {request.group for request in requests.values() if request.group}:
                state.groups.poison(group, response)
        elif ROWS[response.request.collective].cacheable:
            response = state.cache.remember(response, requests)
            for bit in state.cache.overflow():
                self._evict(state, bit)
        self._ready += state.groups.hold(self._apply(response, requests))

    def _remembered(self, state: _Set, bit: int) -> Response:
        response = state.cache.use(bit)
        absent = state.readiness.absent
        if not absent:
            return response
        requests = state.cache.peek(bit)[1]
        present = {rank: each for rank, each in requests.items() if not absent >> rank & 1}
        now = self._answer(state, present)
        return response if now == response._replace(bit=NO_BIT) else now

    def _answer(self, state: _Set, requests: dict[int, Request]) -> Response:
        (rank, request), *others = requests.items()
        for other in others:
            why = disagreement((rank, request), other)
            if why:
                return Response(request, error=why)
        row = ROWS[request.collective]
        if not row.scalars and not request.shape:
            return Response(
                request, error=f"{row.name} '{request.name}': a tensor without dimensions has "
                "no rows; reshape it to (1,)",
            )  # fmt: skip
        if row.rooted and request.root_rank not in requests:
            return Response(
                request, error=f"{row.name} '{request.name}': root rank {request.root_rank} "
                "has joined and has no data to give",
            )  # fmt: skip
        if not row.varying_rows:
            return Response(request)
        dims = [requests[m].shape[0] if m in requests else 0 for m in state.members]
        return Response(request, first_dims=tuple(dims))

    def _apply(self, response: Response, requests: dict[int, Request]) -> Response:
        """Let the answer change the process sets; it fails where the table refuses."""
        effect = ROWS[response.request.collective].effect
        if response.error or effect is Effect.NONE:
            return response
        if effect is Effect.ADD_SET:
            return self._add_sets(response, requests)
        numbers = tuple(dict.fromkeys(request.root_rank for request in requests.values()))
        for number in numbers:
            self._table.remove(number)
            del self._sets[number]
        self._announced = {each for each in self._announced if each[0] not in numbers}
        return response._replace(first_dims=numbers)

    def _add_sets(self, response: Response, requests: dict[int, Request]) -> Response:
        sets = list(dict.fromkeys(request.shape for request in requests.values()))
        try:
            for ranks in sets:
                self._table.check(ranks)
        except ValueError as error:
            return response._replace(error=str(error))
        for ranks in sets:
            number = self._table.add(ranks)
            self._sets[number] = self._new_set(number)
        return response._replace(first_dims=flatten(sets))

    def _fail_waiting(self, state: _Set, key: int | str, error: str = "") -> None:
        """Nobody can complete this any more: a member has shut down, or there is an `error`."""
        request = state.request(key)
        state.readiness.discard(key)
        state.requests.pop(request.name, None)
        error = error or self._departure_error(state, request)
        self._ready.append(Response(request, error=error))

    def _group_error(self, state: _Set, ranks: Iterable[int], request: Request) -> str:
        if not request.group:
            return ""
        errors = [state.groups.disagreement(rank, request) for rank in ranks]
        return next(filter(None, errors), "")

    def _fail_group(self, state: _Set, group: str, error: str) -> None:
        """Fail what waits of a group of which ranks have different numbers of tensors."""
        if error:
            for key, _, _ in list(state.readiness.waiting()):
                if state.request(key).group == group:
                    self._fail_waiting(state, key, error)

    def _departure_error(self, state: _Set, request: Request) -> str:
        first = next(rank for rank in self._leavers if state.mask >> rank & 1)
        return (
            f"{request.collective} '{request.name}': rank {first} has been shut down "
            "and cannot take part any more"
        )

    def _evict(self, state: _Set, bit: int) -> None:
        state.readiness.discard(bit)
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
