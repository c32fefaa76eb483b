"""The coordinator answers complete tensors, names disagreements, and fails what cannot complete."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import NumberSet, mask_of
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.requests.messages import (
    Carried,
    Departed,
    Order,
    Orders,
    Report,
    Reports,
    Request,
    Response,
    Retune,
    Segment,
    encode,
)
from tests.common.decisions.requests import new_coordinator, request

RANKS = 6
JOIN = Request(0, "join", "join", shape=(0, 0))  # of a rank that has obeyed no order
some_ranks = st.frozensets(st.integers(0, RANKS - 1), min_size=1)


def test_a_steady_step_travels_as_bits() -> None:
    coordinator = new_coordinator(2, cache_capacity=1024)
    step = tuple(request(f"layer{i}.weight", 1000) for i in range(161))
    for rank in range(2):
        coordinator.receive(Report(0, (rank,), (), step), 0.0)
    first = coordinator.pop_orders()
    bits = tuple(range(161))
    for rank in range(2):
        coordinator.receive(Report(0, (rank,), bits), 1.0)
    steady = coordinator.pop_orders()
    assert [order.items for order in steady if isinstance(order, Segment)] == [bits]
    assert len(encode(Reports((Report(0, (1,), bits),)))) < 20
    assert len(encode(Orders(first))) > 100 * len(encode(Reports((Report(0, (1,), bits),))))


@pytest.mark.parametrize(
    "reason", ["has been shut down", "has ended by ValueError: no data (train.py, line 3)"]
)
def test_a_departed_rank_fails_what_waits_and_what_comes(reason: str) -> None:
    coordinator = new_coordinator(2, cache_capacity=1024)
    coordinator.receive(Report(0, (0,), (), (request("early"),)), 0.0)
    coordinator.depart(1, *[reason] * ("ended" in reason))
    coordinator.receive(Report(0, (0,), (), (request("late"),)), 0.0)
    *segments, departed = coordinator.pop_orders()
    assert isinstance(departed, Departed) and departed.rank == 1
    for segment, name in zip(segments, ("early", "late"), strict=True):
        assert isinstance(segment, Segment) and isinstance(segment.items[0], Response)
        assert segment.items[0].error == (
            f"allreduce '{name}': rank 1 {reason} and cannot take part any more"
        )


class CarriedSums:
    """A coordinator of two ranks that adds up data as text, and knows one tensor, by bit 0."""

    def __init__(self) -> None:
        def add_up(request: Request, ranks: Any, data: Any) -> bytes:
            return b"+".join(data[rank] for rank in ranks)

        self.coordinator = Coordinator(2, cache_capacity=8, threshold_bytes=0, add_up=add_up)
        self.in_full(0, "t")
        self.in_full(1, "t")
        self.segments()

    def in_full(self, rank: int, name: str, dtype: str = "float32") -> None:
        self.coordinator.receive(Report(0, (rank,), (), (request(name, dtype=dtype),)), 0.0)

    def by_bit(self, rank: int, data: bytes, bit: int = 0) -> None:
        carried = (Carried(bit, rank, data),) if data else ()
        self.coordinator.receive(Report(0, (rank,), (bit,), (), carried), 0.0)

    def segments(self) -> list[Segment]:
        return [each for each in self.coordinator.pop_orders() if isinstance(each, Segment)]


def test_data_that_came_from_all_is_answered_with_its_sum() -> None:
    job = CarriedSums()
    for first, second in ((b"1", b"2"), (b"3", b"4")):
        job.by_bit(1, second)
        assert job.segments() == []
        job.by_bit(0, first)
        assert job.segments() == [Segment(0, (0,), first + b"+" + second)]


def test_data_that_came_from_some_is_left_to_the_ranks_and_never_used_later() -> None:
    job = CarriedSums()
    for ranks in ((0, 1), (1, 0)):
        job.by_bit(ranks[0], b"old")
        job.by_bit(ranks[1], b"")
        assert job.segments() == [Segment(0, (0,))]


def test_data_of_an_evicted_bit_is_dropped() -> None:
    job = CarriedSums()
    job.by_bit(0, b"old")
    job.in_full(1, "t", "float64")  # The bit is not valid any more.
    assert job.segments() == []
    job.by_bit(0, b"older")  # It has crossed the eviction.
    job.in_full(0, "t", "float64")
    ((answer,),) = [each.items for each in job.segments()]
    assert isinstance(answer, Response) and answer.bit == 1
    job.by_bit(1, b"y", 1)
    job.by_bit(0, b"x", 1)
    assert job.segments() == [Segment(0, (1,), b"x+y")]


def test_without_a_way_to_add_up_data_is_left_to_the_ranks() -> None:
    coordinator = new_coordinator(1, cache_capacity=8)
    coordinator.receive(Report(0, (0,), (), (request("t"),)), 0.0)
    coordinator.pop_orders()
    coordinator.receive(Report(0, (0,), (0,), (), (Carried(0, 0, b"1"),)), 0.0)
    assert coordinator.pop_orders() == (Segment(0, (0,)),)


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


@settings(max_examples=100)
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


@settings(max_examples=100)
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


@pytest.mark.thorough
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


class Forgetful(Coordinator):
    """A coordinator that cuts every step anew."""

    def pop_orders(self) -> tuple[Order, ...]:
        self._cut.clear()
        return super().pop_orders()


STEP = ("a", "b", "c", "d")
events = st.one_of(
    st.sampled_from((STEP, STEP[::-1])),  # a step: the order in which tensors become ready
    st.tuples(st.sampled_from(STEP), st.integers(1, 2000)),  # a tensor gets another length
    st.sampled_from((5000, 9000, 1 << 20)),  # a threshold
    st.integers(0, 3),  # a capacity of the cache
)


def bit_of(coordinator: Coordinator, asked: Request) -> int | None:
    """The bit under which ranks would report a request, or None."""
    cache = coordinator._sets[0].cache
    bit = cache.find(asked.name)
    return bit if bit is not None and asked in cache.peek(bit)[1] else None


@settings(max_examples=60)
@given(st.lists(events, max_size=12))
def test_what_is_remembered_of_a_step_changes_no_order(script: list[Any]) -> None:
    """Steps come again in the same and in other orders, between changes of all that matters."""
    options = {"cache_capacity": 64, "threshold_bytes": 1 << 20}
    remembering, forgetful = pair = Coordinator(2, **options), Forgetful(2, **options)
    length = dict.fromkeys(STEP, 1000)  # four times that in bytes
    for event in [STEP, STEP, STEP, *script, STEP, STEP]:
        if isinstance(event, int):
            threshold, capacity = (event, 64) if event > 1000 else (1 << 20, event)
            for each in pair:
                each.retune(Retune(threshold, 1.0, capacity, "", 1 << 16))
        elif isinstance(event[1], int):
            length[event[0]] = event[1]
        else:
            for rank, name in product(range(2), event):
                asked = request(name, length[name])
                bit = bit_of(remembering, asked)
                report = Report(0, (rank,), (), (asked,))
                if bit is not None:
                    report = Report(0, (rank,), (bit,))
                for each in pair:
                    each.receive(report, 0.0)
        assert remembering.pop_orders() == forgetful.pop_orders()


def test_a_removed_process_set_leaves_no_segments_behind() -> None:
    """Another set gets its id and gives the same bits to other tensors."""
    coordinator = new_coordinator(3)

    def order(ranks: tuple[int, ...], process_set_id: int, *tensors: Request | int) -> list[Order]:
        bits = tuple(each for each in tensors if isinstance(each, int))
        asked = tuple(each for each in tensors if isinstance(each, Request))
        coordinator.receive(Report(process_set_id, ranks, bits, asked), 0.0)
        return [*coordinator.pop_orders()]

    add = Request(0, "add_process_set", "add_process_set", shape=(0, 1))
    remove = Request(0, "remove_process_set", "remove_process_set", root_rank=1)
    for names in (("a", "b"), ("c", "d")):
        order((0, 1, 2), 0, add)
        new = [request(name, process_set_id=1) for name in names]
        (segment,) = order((0, 1), 1, *new)
        assert isinstance(segment, Segment)
        answers = [item for item in segment.items if isinstance(item, Response)]
        assert [answer.request.name for answer in answers] == [*names]
        for _ in range(2):
            assert order((0, 1), 1, 0, 1) == [Segment(1, (0, 1))]
        order((0, 1, 2), 0, remove)


def formed(*ranks: int) -> Request:
    """A request that forms the set of these ranks."""
    return Request(0, f"form {ranks}", "form_process_set", parties=ranks)


def released(process_set_id: int, *ranks: int) -> Request:
    """A request that releases its first use."""
    name, collective = f"release {process_set_id}", "release_process_set"
    return Request(0, name, collective, root_rank=process_set_id, parties=ranks)


def receive(coordinator: Coordinator, key: int, ranks: tuple[int, ...], *requests: Request) -> None:
    """Let each of some ranks report some requests."""
    for rank in ranks:
        coordinator.receive(Report(key, (rank,), (), requests), 0.0)


def items(coordinator: Coordinator) -> list[Any]:
    """What the next segments hold."""
    orders = coordinator.pop_orders()
    return [item for order in orders if isinstance(order, Segment) for item in order.items]


def test_an_id_that_is_used_again_has_no_bits_of_the_set_before() -> None:
    """The answers of the last step and of the release are cut into segments together."""
    coordinator = new_coordinator(3)
    receive(coordinator, 0, (0, 1), formed(0, 1))
    assert not items(coordinator)[0].error
    for step in range(2):
        receive(coordinator, 1, (0, 1), request("a", process_set_id=1))
        if step:
            receive(coordinator, 0, (1, 0), released(1, 0, 1))
        assert items(coordinator)
    receive(coordinator, 0, (1, 2), formed(1, 2))
    assert items(coordinator)[0].request.parties == (1, 2)
    receive(coordinator, 1, (2, 1), request("b", process_set_id=1))
    (answer,) = items(coordinator)
    assert isinstance(answer, Response) and answer.request.name == "b"


def test_requests_of_some_ranks_wait_for_these_alone() -> None:
    coordinator = new_coordinator(4)
    receive(coordinator, 0, (0, 1, 2), request("of all"))
    receive(coordinator, 0, (1,), formed(1, 3), released(1, 1, 3))
    (tensor, of_pair) = coordinator.waiting()  # nobody waits for a release
    assert (tensor.missing, of_pair.missing) == ((3,), (3,))
    receive(coordinator, 0, (0,), JOIN)
    receive(coordinator, 0, (3,), formed(1, 3))
    assert [item.request.parties for item in items(coordinator)] == [(1, 3)]
    receive(coordinator, 0, (1,), formed(0, 1))
    assert "rank 0 has called join()" in items(coordinator)[0].error
    coordinator.depart(2)
    receive(coordinator, 0, (1,), formed(1, 2))
    assert ["rank 2 has been shut down" in item.error for item in items(coordinator)] == [True] * 3
    receive(coordinator, 0, (1, 3), formed(1, 3))
    assert [item.error for item in items(coordinator)] == [""]


def test_a_rank_that_has_shut_down_needs_not_release() -> None:
    coordinator = new_coordinator(3)
    receive(coordinator, 0, (0, 1), formed(0, 1))
    coordinator.pop_orders()
    receive(coordinator, 0, (0,), released(1, 0, 1))
    assert not items(coordinator)
    coordinator.depart(1)
    assert [item.request.collective for item in items(coordinator)] == ["release_process_set"]


def test_an_answer_of_a_removed_set_names_no_bit_of_the_set_that_gets_its_id() -> None:
    """All of it in one batch: the answer, the end of its set, and another set of the same id."""
    coordinator = new_coordinator(3)

    def report(process_set_id: int, rank: int, *requests: Request) -> None:
        coordinator.receive(Report(process_set_id, (rank,), (), requests), 0.0)

    def form(*ranks: int) -> None:
        name = f"form_process_set.{list(ranks)}"
        for rank in ranks:
            report(0, rank, Request(0, name, "form_process_set", parties=ranks))

    release = Request(0, "release.1", "release_process_set", root_rank=1, parties=(0, 1))
    form(0, 1)
    coordinator.pop_orders()
    for rank in (0, 1):
        report(1, rank, request("old", process_set_id=1))
        report(0, rank, release)
    form(1, 2)
    coordinator.pop_orders()
    for rank in (1, 2):
        report(1, rank, request("new", process_set_id=1))
    (order,) = coordinator.pop_orders()
    assert isinstance(order, Segment)
    (answer,) = order.items
    assert isinstance(answer, Response) and answer.request.name == "new"
