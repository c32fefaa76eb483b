"""The coordinator: counts which ranks have which tensor, and orders what all ranks run.

Theory of operation
===================

Ranks report tensors in any order, since threads and data differ between ranks. A collective can
start only when every member of its process set has it, and all ranks must start collectives in one
order, or they would wait for each other forever. So rank 0 decides the order. It receives reports,
and sends orders, which every rank executes in the same sequence:

    first time: a request               rank 1                  rank 0
      Report(requests=(a,))               | ----- a ------------> |  a misses rank 0
                                          |                       |  rank 0 has a: complete
      Segment(Response(a, bit=7))         | <---- a is bit 7 ---- |  sent to all ranks

    next time: the bit                    | ----- {7} ----------> |
      a steady step is one small int set  | <---- Segment(7) ---- |

1. Counting. `RequestReadiness` counts new tensors by name, `BitReadiness` counts cached ones by
   bit. Both store sets of ranks and sets of bits as integers, so that a report of many tensors by
   many ranks costs a few operations. Leaders of hosts count with the same classes and pass on one
   report for all ranks below them (see `Aggregator`).

2. Answering. When the last rank has a tensor, `answer` compares the requests. A disagreement fails
   this tensor on every rank, and nothing else. An agreed answer gets a bit in the cache.

3. Ordering. Answers collect until `pop_orders`, which fuses them into segments. One sequence holds
   the segments of all process sets. Each rank skips those it is no member of, so overlapping
   process sets cannot deadlock.

4. Evictions. A changed request, or a full cache, evicts a bit. The eviction can cross a report:

                                        rank 1                  rank 0
      rank 1 reports bit 7                | -- {7} ---. .-------- |  rank 0 evicts bit 7
                                          |            X          |
      rank 1 executes the eviction        | <- Evict(7) '-------> |  bit 7 is unknown: ignored
      it reports again, in full           | ----- a ------------> |

   A bit is never given twice, so a late bit is always recognised. Reports that were counted under
   the bit are dropped as well, since their ranks send the requests again.

5. Joins. A rank that calls join() counts as ready for everything, and contributes neutral data. Its
   join must not overtake a tensor that it has reported before: a joined rank would be answered for
   as one without data. Connections keep their order, and leaders pass on all they hold before a
   join, so only an eviction can break the rule: what was reported under the evicted bit arrives
   later than the join. Therefore a join carries how many joins and evictions its rank has executed:

                                        rank 1                  rank 0
      a bit, then join(evictions=4)       | -- {7}, join(4) ----> |  5 bits are evicted: the bit is
                                          | <---- Evict(7) ------ |  unknown, the join is ignored
      the tensor again, then join(5)      | -- a, join(5) ------> |  a is counted, then the join

   If a rank has joined already, and an eviction drops a tensor that it had reported before, the
   rank is no longer excused until its join comes again. When all members have joined, the join is
   answered, and all are expected again. See [Note: eras and join] in runtime.py for what a join
   means to names, and [Note: who decides while a rank has joined] in auto_segments.py.

6. Departures. A rank that shuts down sends Depart after all its reports. Rank 0 answers what is
   complete, fails what now can never complete, and sends Departed, which ends the rank's part:

                                        rank 1                  rank 0
      shutdown()                          | ----- Depart(1) ----> |  incomplete tensors fail
      rank 1 executes orders up to here   | <---- Departed(1) --- |  later requests of its sets fail

7. Groups. Tensors of a grouped call are held until the whole group is complete, then ordered
   together. If one fails, all fail. Ranks with groups of different sizes use different tensor names
   and would wait forever, so `Groups` compares the sizes as they are reported.

8. Parties. A request can name the ranks that make it: two that exchange a message, or the members
   of a set that they form. It waits for these alone, and fails as soon as one of them has joined or
   shut down without making it. Its answer has its place in the one sequence all the same.

9. Messages from any rank. The receiver asks which of the messages that it could receive next has
   been sent, and is told the sender of the first one. Then it receives from this rank as usual.
   Leaders pass these messages on at once, also where both ranks are below them.

This module never sends, sleeps or reads a clock: its decisions depend only on the reports and on
the times that are passed with them. Simulations and tests run it without a job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from hvdlite.common.base.bitsets import NumberSet, lowest, mask_of, numbers_of
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.decisions.bit_readiness import Arrival
from hvdlite.common.decisions.crossed_programs import crossed
from hvdlite.common.decisions.fusion import next_segments
from hvdlite.common.decisions.process_sets import ProcessSetState, change_sets
from hvdlite.common.decisions.request_readiness import (
    RanksByRequest,
    answer,
    by_rank,
    departure_error,
    earliest,
    join_error,
)
from hvdlite.common.decisions.sender_searches import SenderSearches, senders
from hvdlite.common.decisions.stall_inspector import Waiting
from hvdlite.common.requests.messages import (
    NO_BIT,
    Departed,
    DeviceRuns,
    Eviction,
    Figures,
    Order,
    Report,
    Request,
    Response,
    Retune,
    Segment,
)
from hvdlite.common.requests.process_set_table import GLOBAL_ID, ProcessSetTable, flatten

_MOST_CUTS = 256  # That are remembered: each step has a few.

# It adds up, for a request of these ranks, the data by rank.
AddUp = Callable[[Request, Sequence[int], Mapping[int, bytes]], bytes]


class Coordinator:
    """Reports in, orders out. Used by the engine thread of rank 0."""

    def __init__(
        self,
        size: int,
        *,
        cache_capacity: int,
        threshold_bytes: int,
        keep_groups: bool = False,
        sets: Iterable[tuple[int, ...]] = (),
        add_up: AddUp | None = None,
    ) -> None:
        """Begin with process `sets`; see `ProcessSetTable`.

        Data that came inside requests are added by `add_up`, or left to the ranks without it.
        """
        self._add_up = add_up
        self._capacity = cache_capacity
        self._threshold_bytes = threshold_bytes
        self._keep_groups = keep_groups
        self._table = ProcessSetTable(size, sets)
        self._sets = {each: self._new_set(each) for each in self._table.all()}
        # The next orders, until `pop_orders`. Segments are cut from the ready responses only then,
        # so that everything that came together can be fused.
        self._ready: list[Response] = []
        self._of_removed: list[Response] = []  # Those of them whose set was removed since.
        self._answered: list[Segment] = []  # Those with results.
        self._evictions: list[Eviction] = []
        self._departures: list[Departed] = []
        self._new_settings: list[Retune | Figures | DeviceRuns] = []
        # The (process set id, bit) that members know: later segments name only the bit.
        self._announced: set[tuple[int, int]] = set()
        # The segments of answers that were cut before, by the ids of these, which are kept. Only
        # those of which members know all bits, until a bit or a threshold changes.
        self._cut: dict[tuple[int, ...], tuple[list[Response], list[Order]]] = {}
        # The ranks that have shut down, as a mask, and in order with their reasons: errors blame
        # the first one.
        self._departed = 0
        # The uses of formed sets that these ranks have released, as a mask, and not all members.
        self._released: dict[Request, int] = {}
        self._searches = SenderSearches()
        self._departed_order: dict[int, str] = {}

    def receive(self, report: Report, now: float) -> None:
        """Count what some ranks have ready, at `now` seconds."""
        state = self._sets.get(report.process_set_id)
        if state is None:  # The set was removed: its members know, and have failed the tensor.
            return
        ranks = mask_of(report.ranks)
        # An unknown bit has crossed its eviction: the ranks send the request again, in full.
        bits = state.cache.known(NumberSet.of(report.bits))
        answers = len(self._ready) + len(self._answered)
        for each in report.carried:
            if each.bit in bits:
                state.carried.setdefault(each.bit, {})[each.rank] = each.data
        # Bits precede requests, because a join, which is a request, must come last.
        if bits and state.mask & self._departed:
            for bit in bits:
                self._refuse(state, state.cache.peek(bit)[0].request)
        elif bits:
            self._receive_bits(state, bits, ranks, now)
        for request in report.requests:
            if SPECS[request.collective].effect is Effect.RELEASE_SET:
                self._released[request] = self._released.get(request, 0) | ranks
                self._answer_releases()
            elif state.needed(request) & self._departed:
                self._refuse(state, request)
            else:
                self._receive_request(state, ranks, request, now)
        if len(self._ready) + len(self._answered) > answers:
            state.progress = now

    def depart(self, rank: int, reason: str = "") -> None:
        """Record that `rank` shuts down: tensors that need it fail, now and later.

        Their errors say the `reason`, such as the exception that ends the rank.
        """
        self._departed |= 1 << rank
        self._departed_order[rank] = reason
        for state in self._sets.values():
            if state.mask & self._departed:
                self._fail_all(state)
        self._fail_searches()
        self._answer_releases()
        self._departures.append(Departed(rank))

    def retune(self, retune: Retune) -> None:
        """Decide by these settings from now on, and order all ranks to follow."""
        self._cut.clear()
        self._threshold_bytes = retune.fusion_threshold_bytes
        self._capacity = retune.cache_capacity
        for state in self._sets.values():
            state.cache.capacity = retune.cache_capacity
            for bit in state.cache.overflow():
                self._evict(state, bit)
        self._new_settings.append(retune)

    def announce(self, order: Figures | DeviceRuns) -> None:
        """Order all ranks to choose algorithms, or devices, by what rank 0 knows."""
        self._new_settings.append(order)

    def pop_orders(self) -> tuple[Order, ...]:
        """Return what all ranks execute next, in this sequence; each order is returned once."""
        pending = self._ready, self._answered, self._evictions, self._departures, self._new_settings
        if not any(pending):
            return ()
        # Nobody has joined, nor left the set, before a tensor for which all members had data.
        orders: list[Order] = [*self._answered, *self._segments(self._ready)]
        # Evictions follow the segments, which may name the bits that are evicted. Departures follow
        # both, since the rank executes all orders before its own departure.
        orders += self._evictions
        orders += self._departures
        orders += self._new_settings
        self._ready, self._evictions, self._departures, self._new_settings = [], [], [], []
        self._of_removed = []
        self._answered = []
        return tuple(orders)

    @property
    def oldest(self) -> float | None:
        """Since when the oldest incomplete tensor or join waits, in seconds; None without any."""
        sets = self._sets.values()
        times = (time for s in sets for time in (s.bits.oldest, s.requests.oldest))
        joins = (s.progress for s in sets if s.join is not None)
        return earliest((*times, *joins, self._searches.oldest))

    def waiting(self) -> Iterator[Waiting]:
        """Yield every incomplete tensor and every incomplete join, for the stall inspector.

        A join may wait for as long as the other ranks make progress.
        """
        for state in self._sets.values():
            for request, missing, since in state.waiting():
                yield Waiting(request.name, tuple(numbers_of(missing)), since)
            if state.join is not None:
                joined = state.bits.absent
                others = tuple(numbers_of(state.mask & ~joined))
                yield Waiting("join", others, state.progress, tuple(numbers_of(joined)))
        for search, possible, since in self._searches.waiting():
            yield Waiting(search.name, tuple(numbers_of(possible)), since, one_is_enough=True)

    def _new_set(self, process_set_id: int) -> ProcessSetState:
        members = self._table.members(process_set_id)
        return ProcessSetState(process_set_id, members, self._capacity)

    # -- arrivals

    def _receive_bits(
        self, state: ProcessSetState, bits: NumberSet, ranks: int, now: float
    ) -> None:
        errors: dict[str, str] = {}
        for group_bits in state.cache.groups(bits):
            request = state.cache.peek(next(iter(group_bits)))[0].request
            errors[request.group] = state.groups.disagreement(ranks, request, len(group_bits))
        for arrival in state.bits.add(bits, ranks, now):
            self._complete_bits(state, arrival)
        for name, error in errors.items():
            self._fail_group(state, name, error)

    def _receive_request(
        self, state: ProcessSetState, ranks: int, request: Request, now: float
    ) -> None:
        if SPECS[request.collective].effect is Effect.JOIN:
            self._join(state, ranks, request, now)
            return
        if SPECS[request.collective].effect is Effect.FIND_SENDER:
            self._find_sender(state, request, now)
            return
        bit = state.cache.find(request.name)
        if bit is not None:
            # A rank may report a cached request in full, as it was sent before the answer came.
            # A request that differs from the cached one of its rank makes the bit invalid.
            if not ranks & ~state.cache.peek(bit)[1].get(request, 0):
                self._receive_bits(state, NumberSet.of((bit,)), ranks, now)
                return
            self._evict(state, bit)
        error = ""
        if request.group:
            error = state.groups.disagreement(ranks, request, 1)
        requests = state.requests.add(request, ranks, now)
        if requests:
            self._complete(state, requests)
        elif request.parties:
            self._fail_joined(state, request)
            search = self._searches.sent(request.name)
            if search is not None:
                self._find_sender(state, search, now)
        self._fail_group(state, request.group, error)

    def _find_sender(self, state: ProcessSetState, search: Request, now: float) -> None:
        """Answer a search by the first of its messages that has been sent, or keep it."""
        for message, sender in senders(search).items():
            if message in state.requests:
                self._ready.append(Response(search, first_dims=(sender,)))
                return
        self._searches.add(search, now)
        self._fail_searches()

    def _join(self, state: ProcessSetState, ranks: int, request: Request, now: float) -> None:
        """Excuse `ranks` from all tensors, unless their join has crossed an eviction.

        Section 5 of the theory of operation explains the counts in the shape of the request.
        """
        if request.shape != (state.joins, state.evictions) or not ranks & ~state.bits.absent:
            return
        state.join = request
        state.last_joined = ranks.bit_length() - 1
        state.progress = now
        for arrival in state.bits.excuse(ranks):
            self._complete_bits(state, arrival)
        for requests in state.requests.excuse(ranks):
            self._complete(state, requests)
        for waiting, _, _ in list(state.requests.waiting()):
            if waiting.parties:
                self._fail_joined(state, waiting)
        self._fail_searches()
        if state.bits.all_absent:
            state.expect(state.mask)
            state.joins += 1
            self._ready.append(Response(request, last_joined=state.last_joined))

    # -- answers

    def _complete_bits(self, state: ProcessSetState, arrival: Arrival) -> None:
        """Answer cached tensors that all members have, except those that joined."""
        use, whole = state.cache.use, arrival.ranks == state.mask
        for bit in arrival.bits:
            response = use(bit)
            data = state.carried.pop(bit, None) if state.carried else None
            if data is not None and whole and self._answer_carried(state, response, data):
                continue
            if not whole:  # The answer differs where a joined rank has no rows, or was the root.
                requests, ranks = state.cache.peek(bit)[1], arrival.ranks
                present = {each: mask & ranks for each, mask in requests.items() if mask & ranks}
                partial = answer(present, state.members)
                if partial != response._replace(bit=NO_BIT):
                    response = partial
            if response.request.group:
                self._ready += state.groups.hold(response)
            else:
                self._ready.append(response)

    def _answer_carried(
        self, state: ProcessSetState, response: Response, data: Mapping[int, bytes]
    ) -> bool:
        """Answer with the result, if the data of all members came with the requests."""
        if self._add_up is None or len(data) < len(state.members) or response.request.group:
            return False
        if state.mask & state.bits.absent:
            return False
        result = self._add_up(response.request, state.members, data)
        self._answered.append(self._segment([response])._replace(result=result))
        return True

    def _complete(self, state: ProcessSetState, requests: RanksByRequest) -> None:
        """Answer a new tensor that all members have, except those that joined."""
        response = answer(requests, state.members)
        if response.error:
            grouped = {request.group: request for request in requests if request.group}
            for group in grouped:
                state.groups.fail(group, response)
            if grouped and not response.request.group:  # Else the group would stay open.
                response = response._replace(request=next(iter(grouped.values())))
        elif SPECS[response.request.collective].cacheable:
            response = state.cache.remember(response, requests)
            for bit in state.cache.overflow():
                self._evict(state, bit)
        if not response.error and SPECS[response.request.collective].changes_sets:
            response = self._apply(response, requests)
        self._ready += state.groups.hold(response)

    def _answer_releases(self) -> None:
        """Answer the releases that all members have made; those who have shut down need not.

        Nobody waits for a release, so it is no tensor that could stall.
        """
        for request, ranks in [*self._released.items()]:
            if not mask_of(request.parties) & ~(ranks | self._departed):
                del self._released[request]
                self._ready.append(self._apply(Response(request), {}))

    def _apply(self, response: Response, requests: RanksByRequest) -> Response:
        """Change the process sets as the answer says; it fails where the table refuses.

        Ranks may add or remove several sets in one collective, as each names its own part of a
        communicator.
        """
        effect = SPECS[response.request.collective].effect
        if effect is Effect.ADD_SET:
            sets = list(dict.fromkeys(request.shape for request, _ in by_rank(requests)))
            try:
                for ranks in sets:
                    self._table.check(ranks)
            except ValueError as error:
                return response._replace(error=str(error))
            response = response._replace(first_dims=flatten(sets))
        elif effect is Effect.REMOVE_SET:
            removed = dict.fromkeys(request.root_rank for request, _ in by_rank(requests))
            response = response._replace(first_dims=tuple(removed))
        made, gone, _ = change_sets(self._table, response)
        self._sets |= {each: self._new_set(each) for each in made}
        if gone:
            self._forget_sets(gone)
        return response

    def _forget_sets(self, gone: Collection[int]) -> None:
        for process_set_id in gone:
            del self._sets[process_set_id]
        # The id may be given to another set, for which these would be wrong.
        self._of_removed += [each for each in self._ready if each.request.process_set_id in gone]
        self._evictions = [e for e in self._evictions if e.process_set_id not in gone]
        self._announced = {key for key in self._announced if key[0] not in gone}
        self._cut.clear()

    # -- failures

    def _fail_all(self, state: ProcessSetState) -> None:
        """Fail the incomplete tensors of a set that need a rank which has shut down."""
        waiting = [request for request, _, _ in state.waiting()]
        unanswered = [request for request in waiting if state.needed(request) & self._departed]
        unanswered += [response.request for response in state.groups.pop_held()]
        if state.join is not None:
            unanswered.append(state.join)
            state.expect(state.mask)
        for request in unanswered:
            self._fail_waiting(state, request, self._departure_error(state, request))

    def _refuse(self, state: ProcessSetState, request: Request) -> None:
        """Fail a tensor that was reported after a rank that it needs has shut down."""
        self._ready.append(Response(request, error=self._departure_error(state, request)))

    def _fail_joined(self, state: ProcessSetState, request: Request) -> None:
        """Fail a request of some ranks if one that has not made it has joined: it never will."""
        missing = state.requests.missing(request.name) & state.bits.absent
        if missing:
            self._fail_waiting(state, request, join_error(lowest(missing), request))

    def _fail_searches(self) -> None:
        """Fail the searches for which nobody is left who could send."""
        joined = self._sets[GLOBAL_ID].bits.absent
        for search in self._searches.pop_hopeless(self._departed, joined):
            error = join_error(search.shape[0], search)
            for rank, reason in self._departed_order.items():
                if rank in search.shape + search.parties:
                    error = departure_error(rank, search, reason)
                    break
            self._ready.append(Response(search, error=error))

    def _fail_waiting(self, state: ProcessSetState, request: Request, error: str) -> None:
        """Answer an incomplete tensor with an error, and forget its counts."""
        bit = state.cache.find(request.name)
        if bit is not None:
            state.bits.discard(bit)
            state.carried.pop(bit, None)
        state.requests.pop(request.name)
        self._ready.append(Response(request, error=error))

    def _fail_group(self, state: ProcessSetState, group: str, error: str) -> None:
        """Fail the incomplete tensors of a group if ranks disagree on the size of the group."""
        if error:
            for request, _, _ in list(state.waiting()):
                if request.group == group:
                    self._fail_waiting(state, request, error)

    def fail_crossed(self, before: float) -> None:
        """Fail collectives of programs that wait for each other since `before`."""
        for state in self._sets.values():
            for request, error in crossed(state.waiting(), before):
                self._fail_waiting(state, request, error)

    def _departure_error(self, state: ProcessSetState, request: Request) -> str:
        needed = state.needed(request)
        first = next(rank for rank in self._departed_order if needed >> rank & 1)
        return departure_error(first, request, self._departed_order[first])

    # -- orders

    def _evict(self, state: ProcessSetState, bit: int) -> None:
        """Forget a bit, and order the members to forget it and to report its tensor again."""
        for arrival in state.bits.pop(NumberSet.of((bit,))):
            # A joined rank among them reports the tensor again, and its join after it.
            state.expect(arrival.ranks & state.bits.absent)
        self._cut.clear()
        state.carried.pop(bit, None)
        state.evictions += 1
        state.cache.forget(bit)
        self._announced.discard((state.process_set_id, bit))
        self._evictions.append(Eviction(state.process_set_id, bit))

    def _segments(self, ready: list[Response]) -> list[Order]:
        """Cut answers into segments; a step has the answers of the last one in the same order."""
        key = tuple(map(id, ready))
        known = self._cut.get(key)
        if known is not None:
            return [*known[1]]
        segments = next_segments(ready, self._threshold_bytes, self._keep_groups)
        orders: list[Order] = [self._segment(responses) for responses in segments]
        if ready and all(type(item) is int for order in orders for item in order.items):  # type: ignore[union-attr]
            if len(self._cut) >= _MOST_CUTS:
                self._cut.clear()
            self._cut[key] = ready, [*orders]
        return orders

    def _segment(self, responses: list[Response]) -> Segment:
        process_set_id = responses[0].request.process_set_id
        items = tuple(self._item(process_set_id, response) for response in responses)
        return Segment(process_set_id, items)

    def _item(self, process_set_id: int, response: Response) -> Response | int:
        """Return what a segment holds for a response: only the bit if the members know it."""
        if response.bit == NO_BIT:
            return response
        if self._of_removed and any(response is each for each in self._of_removed):
            return response
        key = (process_set_id, response.bit)
        if key in self._announced:
            return response.bit
        self._announced.add(key)
        return response
