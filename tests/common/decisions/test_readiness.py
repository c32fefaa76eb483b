"""Counting by the set gives what counting rank by rank and tensor by tensor gives."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import NumberSet, Tally, mask_of, numbers_of
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.bit_readiness import BitReadiness
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.decisions.grouped import Groups
from hvdlite.common.decisions.request_readiness import RequestReadiness
from hvdlite.common.decisions.response_cache import CoordinatorCache
from hvdlite.common.plain.messages import Report, Request, Response, Segment

RANKS = 6
JOIN = Request(0, "join", "join", shape=(0, 0))  # of a rank that has obeyed no order
FAR = [0, 1, 2, 4095, 4096, 10**9]  # bits on several pages
numbers = st.frozensets(st.one_of(st.integers(0, 70), st.sampled_from(FAR)))
some_bits = st.frozensets(st.sampled_from(FAR), min_size=1)
some_ranks = st.frozensets(st.integers(0, RANKS - 1), min_size=1)
# Few, so that the same are often reported again; some overlap.
sources = st.sampled_from([*map(frozenset, [(0, 1), (1, 2), (2, 3, 4, 5), (3, 4), (5,)])])


def request(name: str, **fields: object) -> Request:
    return Request(0, name, "allreduce", "float32", (4,), "cpu")._replace(**fields)  # type: ignore[arg-type]


@given(numbers, numbers)
def test_sets_of_numbers(first: frozenset[int], second: frozenset[int]) -> None:
    one, other = NumberSet.of(first), NumberSet.of(second)
    for ours, expected in [
        (one & other, first & second),
        (one | other, first | second),
        (one - other, first - second),
    ]:
        assert [*ours] == sorted(expected)
        assert len(ours) == len(expected) and bool(ours) == bool(expected)
        assert all(number in ours for number in expected)
    assert (one == other) == (first == second)
    low = {number for number in first if number < 10_000}
    assert [*numbers_of(mask_of(low))] == [*NumberSet.of_mask(mask_of(low))] == sorted(low)
    assert NumberSet.of(low).mask == sum(1 << number for number in low)


@given(st.lists(st.tuples(st.frozensets(st.integers(0, 9)), st.integers(0, 2000))))
def test_many_counts_at_once(additions: list[tuple[frozenset[int], int]]) -> None:
    tally, expected = Tally(), Counter(dict.fromkeys(range(10), 0))
    for numbers, amount in additions:
        tally.add(mask_of(numbers), amount)
        expected.update(dict.fromkeys(numbers, amount))
    for amount in {0, 1, *expected.values()}:
        having = {number for number, count in expected.items() if count == amount}
        assert set(numbers_of(tally.which(mask_of(range(10)), amount))) == having


class Naive:
    """One set of ranks for each bit, and every bit by itself."""

    def __init__(self) -> None:
        self.needed, self.absent = set(range(RANKS)), set[int]()
        self.ready: dict[int, set[int]] = {}
        self.since: dict[int, float] = {}

    def add(self, bits: frozenset[int], ranks: frozenset[int], now: float) -> dict[int, set[int]]:
        for bit in bits:
            self.ready.setdefault(bit, set()).update(ranks)
            self.since.setdefault(bit, now)
        return self.complete(bits)

    def complete(self, bits: frozenset[int]) -> dict[int, set[int]]:
        return self.pop({b for b in bits if self.ready[b] | self.absent == self.needed})

    def pop(self, bits: set[int] | frozenset[int]) -> dict[int, set[int]]:
        for bit in bits:
            self.since.pop(bit, None)
        return {bit: self.ready.pop(bit) for bit in bits if bit in self.ready}


actions = st.sampled_from(
    ["add", "add", "add", "add", "take", "discard", "partial", "excuse", "expect"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(actions, some_bits, sources), max_size=25))
def test_bits_are_counted_as_one_by_one(
    steps: list[tuple[str, frozenset[int], frozenset[int]]],
) -> None:
    """Also where reports overlap, and name a rank twice."""
    ours, naive = BitReadiness(mask_of(range(RANKS))), Naive()
    for now, (action, bits, ranks) in enumerate(steps):
        arrivals, expected = [], {}
        if action == "add":
            arrivals = ours.add(NumberSet.of(bits), mask_of(ranks), now)
            expected = naive.add(bits, ranks, now)
        elif action == "take":
            arrivals, expected = ours.pop(NumberSet.of(bits)), naive.pop(bits)
        elif action == "discard":
            ours.discard(min(bits))
            naive.pop({min(bits)})
        elif action == "partial":
            before = now / 2
            arrivals = ours.pop_overdue(before)
            expected = naive.pop({b for b, since in naive.since.items() if since < before})
        elif action == "excuse":
            arrivals = ours.excuse(mask_of(ranks))
            naive.absent |= ranks
            expected = naive.complete(frozenset(naive.ready))
        else:
            ours.expect(mask_of(ranks))
            naive.absent -= ranks
        got = {bit: set(numbers_of(ready)) for ready, done in arrivals for bit in done}
        assert got == expected
        assert {
            bit: (set(numbers_of(missing)), since) for bit, missing, since in ours.waiting()
        } == {
            bit: (naive.needed - ready - naive.absent, naive.since[bit])
            for bit, ready in naive.ready.items()
        }
        assert ours.oldest == min(naive.since.values(), default=None)
        assert ours.all_absent == (naive.absent == naive.needed)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=RANKS, max_size=RANKS),
    st.permutations(range(RANKS)),
    some_ranks,
)
def test_requests_that_are_alike_are_held_once(
    made: list[tuple[int, bool]], order: list[int], joined: frozenset[int]
) -> None:
    """`made`: the shape that each rank has; and whether it comes before the joined ones join."""
    readiness = RequestReadiness(mask_of(range(RANKS)))
    requests = [request("t", shape=(rows,)) for rows, _ in made]
    early = [rank for rank in order if made[rank][1]]
    done = [readiness.add(requests[rank], 1 << rank, 0.0) for rank in early]
    done += readiness.excuse(mask_of(joined))
    late = [rank for rank in order if not made[rank][1] and rank not in joined]
    done += [readiness.add(requests[rank], 1 << rank, 1.0) for rank in late]
    done = [alike for alike in done if alike]
    if not early and not late:
        assert not done
        return
    (alike,) = done
    came = [*early, *late]
    assert {rank: r for r, ranks in alike.items() for rank in numbers_of(ranks)} == {
        rank: requests[rank] for rank in came
    }
    assert len(alike) == len({requests[rank] for rank in came})
    assert readiness.oldest is None and "t" not in readiness


# -- what the coordinator says


def reported(ranks: dict[int, Request], splits: list[frozenset[int]]) -> list[Report]:
    """What `ranks` ask for, where the ranks of each split report together what they have alike."""
    reports, left = [], dict(ranks)
    for split in [*splits, frozenset(ranks)]:
        alike: dict[Request, list[int]] = {}
        for rank in sorted(split & set(left)):
            alike.setdefault(left.pop(rank), []).append(rank)
        reports += [Report(0, tuple(each), (), (r,)) for r, each in alike.items()]
    return reports


def answer(coordinator: Coordinator, reports: list[Report]) -> Response:
    for report in reports:
        coordinator.receive(report, 0.0)
    ((item,),) = [o.items for o in coordinator.pop_orders() if isinstance(o, Segment)]
    assert isinstance(item, Response)
    return item


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["float32", "float64", "int8"]), min_size=RANKS, max_size=RANKS),
    st.lists(some_ranks),
)
def test_a_mismatch_names_the_first_rank_that_disagrees(
    dtypes: list[str], splits: list[frozenset[int]]
) -> None:
    coordinator = Coordinator(RANKS, cache_capacity=8, threshold_bytes=0)
    ranks = {rank: request("t", dtype=dtype) for rank, dtype in enumerate(dtypes)}
    other = next((rank for rank in ranks if dtypes[rank] != dtypes[0]), None)
    error = answer(coordinator, reported(ranks, splits)).error
    if other is None:
        assert not error
    else:
        assert error == (
            f"allreduce 't': ranks disagree on data type: rank 0 has {dtypes[0]}, "
            f"rank {other} has {dtypes[other]}"
        )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=RANKS, max_size=RANKS),
    st.lists(some_ranks),
    st.frozensets(st.integers(0, RANKS - 1), max_size=RANKS - 1),
)
def test_an_allgather_has_the_rows_of_each_rank(
    rows: list[int], splits: list[frozenset[int]], joined: frozenset[int]
) -> None:
    """First of all ranks; then by bit, while some have joined, who have no rows."""
    coordinator = Coordinator(RANKS, cache_capacity=8, threshold_bytes=0)
    ranks = {r: request("t", collective="allgather", shape=(n, 2)) for r, n in enumerate(rows)}
    first = answer(coordinator, reported(ranks, splits))
    assert first.first_dims == tuple(rows)
    coordinator.receive(Report(0, tuple(joined), (), (JOIN,)), 0.0)
    assert not coordinator.pop_orders()
    present = NumberSet.of(set(range(RANKS)) - joined)
    coordinator.receive(Report(0, present, (first.bit,)), 0.0)
    ((item,),) = [o.items for o in coordinator.pop_orders() if isinstance(o, Segment)]
    left = tuple(0 if rank in joined else n for rank, n in enumerate(rows))
    assert left == (item.first_dims if isinstance(item, Response) else first.first_dims)


def test_a_rank_that_joins_after_it_has_reported_still_gives_its_rows() -> None:
    coordinator = Coordinator(2, cache_capacity=8, threshold_bytes=0)
    ask = request("t", collective="allgather", shape=(3,))
    answer(coordinator, [Report(0, (0, 1), (), (ask,))])
    coordinator.receive(Report(0, (0,), (0,), (JOIN,)), 0.0)
    coordinator.receive(Report(0, (1,), (), (JOIN,)), 0.0)
    tensor, join = [o.items[0] for o in coordinator.pop_orders() if isinstance(o, Segment)]
    assert isinstance(tensor, Response) and tensor.first_dims == (3, 0)
    assert isinstance(join, Response) and join.last_joined == 1


class NaiveGroups:
    """What each rank has told of one group: its size, and how many tensors."""

    def __init__(self) -> None:
        self.told: dict[int, list[int]] = {}

    def disagreement(self, ranks: list[int], size: int, count: int) -> tuple[int, int] | None:
        """The first of `ranks` and the first with another size, ascending."""
        complete = {rank for rank, own in self.told.items() if own[1] >= own[0]}
        if complete & set(ranks) and len(complete) == RANKS:
            self.told.clear()
        for rank in ranks:
            if rank in complete:
                self.told.pop(rank, None)
            self.told.setdefault(rank, [size, 0])[1] += count
        own = self.told[ranks[0]][0]
        other = min((rank for rank, told in self.told.items() if told[0] != own), default=None)
        return None if other is None else (min(ranks[0], other), max(ranks[0], other))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(some_ranks, st.integers(1, 3), st.integers(1, 2)), max_size=12))
def test_sizes_of_groups_are_compared_as_rank_by_rank(
    told: list[tuple[frozenset[int], int, int]],
) -> None:
    groups, naive = Groups(RANKS), NaiveGroups()
    for ranks, size, count in told:
        each = request("t", group="g", group_size=size)
        error = groups.disagreement(mask_of(ranks), each, min(count, size))
        pair = naive.disagreement(sorted(ranks), size, min(count, size))
        assert bool(error) == bool(pair)
        if pair:
            first, second = pair
            assert f"rank {first} has " in error and f"rank {second} has " in error


def test_the_bits_of_a_group_are_known_together() -> None:
    cache = CoordinatorCache(10)
    for name, group in [("a", "g"), ("b", ""), ("c", "g"), ("d", "h")]:
        cache.remember(Response(request(name, group=group, group_size=2)), {})
    assert sorted(map(list, cache.groups(NumberSet.of(range(4))))) == [[0, 2], [3]]
    cache.forget(0)
    cache.forget(3)
    assert [*map(list, cache.groups(NumberSet.of(range(4))))] == [[2]]
    assert [*cache.known(NumberSet.of(range(9)))] == [1, 2]


# -- scale


@pytest.mark.timeout(20)
def test_a_step_of_many_ranks_costs_as_much_as_one_of_few() -> None:
    """All below each of four leaders report together: minutes if it were rank by rank."""
    size, tensors = 1 << 16, 200
    coordinator = Coordinator(size, cache_capacity=1024, threshold_bytes=1 << 30)
    quarters = [NumberSet.of_mask(mask_of(range(q, size, 4))) for q in range(4)]
    step = tuple(request(f"t{i}") for i in range(tensors))
    for quarter in quarters:
        coordinator.receive(Report(0, quarter, (), step), 0.0)
    coordinator.pop_orders()
    for _ in range(50):
        for quarter in quarters:
            coordinator.receive(Report(0, quarter, range(tensors)), 0.0)
        (order,) = coordinator.pop_orders()
        assert isinstance(order, Segment) and order.items == tuple(range(tensors))


def test_a_leader_passes_on_what_is_late_and_then_the_rest() -> None:
    leader = Aggregator(8, range(4, 8))
    leader.note(Segment(0, tuple(Response(request(str(bit)), bit=bit) for bit in range(3))))
    leader.receive(Report(0, (4, 6), (0, 1, 2)), 0.0)
    leader.receive(Report(0, (5, 7), (2,)), 1.0)
    assert leader.pop_reports() == (Report(0, (4, 5, 6, 7), (2,)),)
    leader.flush(0.5)
    assert leader.pop_reports() == (Report(0, (4, 6), (0, 1)),)
    leader.receive(Report(0, (5,), (1,)), 2.0)
    assert leader.pop_reports() == (Report(0, (5,), (1,)),)
