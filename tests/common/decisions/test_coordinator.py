"""The pure rooms: coordinator, aggregator, cache, fusion, stall inspector, tree and messages."""

from __future__ import annotations

import contextlib
import random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import NumberSet, runs_of
from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.decisions.fusion import next_segments
from hvdlite.common.decisions.response_cache import ResponseCache
from hvdlite.common.decisions.stall_inspector import StallInspector, Waiting
from hvdlite.common.plain.messages import (
    Abort,
    ClockReply,
    Depart,
    Departed,
    Eviction,
    Message,
    Order,
    Orders,
    Report,
    Reports,
    Request,
    Response,
    Retune,
    Segment,
    StackQuery,
    StackReply,
    decode,
    encode,
)


def request(name: str, length: int = 4, **fields: object) -> Request:
    return Request(0, name, "allreduce", "float32", (length,), "cpu", **fields)  # type: ignore[arg-type]


def new_coordinator(size: int, **options: int) -> Coordinator:
    return Coordinator(size, **{"cache_capacity": 64, "threshold_bytes": 1 << 20, **options})


def names(orders: tuple[Order, ...]) -> list[list[str]]:
    return [
        [i.request.name if isinstance(i, Response) else str(i) for i in order.items]
        for order in orders
        if isinstance(order, Segment)
    ]


class Simulation:
    """Ranks under a control tree, without transports: messages are delivered in random order."""

    def __init__(self, hosts: list[list[int]], fan_out: int, seed: int, capacity: int) -> None:
        topology = Topology(tuple(map(tuple, hosts)))
        self.random = random.Random(seed)
        self.size = topology.size
        self.trees = [Tree(topology, rank, fan_out) for rank in range(self.size)]
        self.coordinator = new_coordinator(self.size, cache_capacity=capacity)
        self.leaders = {
            tree.rank: Aggregator(self.size, tree.subtree)
            for tree in self.trees
            if tree.children and not tree.is_root
        }
        self.caches = [ResponseCache() for _ in range(self.size)]
        self.links: dict[tuple[int, int], list[object]] = {}  # (from, to) -> in order
        self.pending: list[dict[str, tuple[Request, int | None]]] = [{} for _ in self.trees]
        self.done: list[list[str]] = [[] for _ in self.trees]

    def enqueue(self, rank: int, each: Request) -> None:
        bit = self.caches[rank].find(each)
        self.pending[rank][each.name] = (each, bit)
        bits = () if bit is None else (bit,)
        self.report(rank, Report(0, (rank,), bits, () if bits else (each,)))

    def report(self, rank: int, report: Report) -> None:
        if rank in self.leaders:
            self.leaders[rank].receive(report, 0.0)
            for merged in self.leaders[rank].pop_reports():
                self.send(rank, self.trees[rank].parent, merged)
        elif self.trees[rank].is_root:
            self.coordinator.receive(report, 0.0)
            for order in self.coordinator.pop_orders():
                self.obey(0, order)
        else:
            self.send(rank, self.trees[rank].parent, report)

    def send(self, source: int, target: int, what: object) -> None:
        self.links.setdefault((source, target), []).append(what)

    def obey(self, rank: int, order: Order) -> None:
        if rank in self.leaders:
            self.leaders[rank].note(order)
        for child in self.trees[rank].children:
            self.send(rank, child, order)
        if isinstance(order, Eviction):
            name = self.caches[rank].forget(order.bit)
            each, bit = self.pending[rank].get(name, (None, None))
            if each is not None and bit == order.bit:
                self.pending[rank][name] = (each, None)
                self.report(rank, Report(0, (rank,), (), (each,)))
        elif isinstance(order, Segment):
            for item in order.items:
                response = (
                    self.caches[rank].recall(item).response if isinstance(item, int) else item
                )
                assert not response.error
                each, _ = self.pending[rank].pop(response.request.name)
                assert response.request.shape == each.shape
                if response.bit >= 0:
                    self.caches[rank].remember(response, each)
                self.done[rank].append(response.request.name)

    def deliver_all(self) -> None:
        while self.links:
            source, target = self.random.choice(list(self.links))
            queue = self.links[source, target]
            what = queue.pop(0)
            if not queue:
                del self.links[source, target]
            if isinstance(what, Report):
                self.report(target, what)
            else:
                self.obey(target, what)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([[[0]], [[0, 1, 2]], [[0, 1], [2, 3]], [[0], [1], [2, 3, 4], [5], [6, 7]]]),
    st.sampled_from([1, 2, 32]),
    st.integers(0, 1 << 30),
    st.sampled_from([0, 3, 64]),
)
def test_every_tensor_is_answered_once_in_one_order_whatever_the_delays(
    hosts: list[list[int]], fan_out: int, seed: int, capacity: int
) -> None:
    simulation = Simulation(hosts, fan_out, seed, capacity)
    for round_ in range(4):
        tensors = [request(f"t{i}", 1 + (i == round_)) for i in range(6)]
        plan = [(rank, each) for rank in range(simulation.size) for each in tensors]
        for rank, each in simulation.random.sample(plan, len(plan)):
            simulation.enqueue(rank, each)
            if simulation.random.random() < 0.3:
                simulation.deliver_all()
        simulation.deliver_all()
        assert not any(simulation.pending)
    assert all(done == simulation.done[0] for done in simulation.done)
    assert sorted(simulation.done[0]) == sorted(f"t{i}" for i in range(6) for _ in range(4))


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


def test_the_least_recently_used_tensor_is_forgotten() -> None:
    coordinator = new_coordinator(1, cache_capacity=2)
    for name in "abacc":  # c is one too many: at first it stays out, then it is used more than b
        coordinator.receive(Report(0, (0,), (), (request(name),)), 0.0)
    assert [o for o in coordinator.pop_orders() if isinstance(o, Eviction)] == [Eviction(0, 1)]


def test_a_cache_that_is_too_small_for_a_step_still_remembers_what_it_can() -> None:
    capacity, tensors = 20, 30
    coordinator = new_coordinator(1, cache_capacity=capacity)
    bits: dict[str, int] = {}
    for step in range(6):
        known = [bits[f"t{i}"] for i in range(tensors) if f"t{i}" in bits]
        new = [request(f"t{i}") for i in range(tensors) if f"t{i}" not in bits]
        coordinator.receive(Report(0, (0,), tuple(known), tuple(new)), float(step))
        orders = coordinator.pop_orders()
        assert not [order for order in orders if isinstance(order, Eviction)]
        for order in orders:
            assert isinstance(order, Segment)
            for item in order.items:
                if isinstance(item, Response) and item.bit >= 0:
                    bits[item.request.name] = item.bit
        assert len(known) == (capacity if step else 0)


def test_a_full_cache_forgets_what_is_used_no_more() -> None:
    coordinator = new_coordinator(1, cache_capacity=20)
    kept: set[str] = set()
    for step in range(8):
        names_ = [f"{'old' if step < 3 else 'new'}{i}" for i in range(15)]
        names_ += [f"once{step}.{i}" for i in range(30)]  # each is used once, and only once
        coordinator.receive(Report(0, (0,), (), tuple(map(request, names_))), float(step))
        for order in coordinator.pop_orders():
            if isinstance(order, Segment):
                answers = [item for item in order.items if isinstance(item, Response)]
                kept |= {each.request.name for each in answers if each.bit >= 0}
    assert {f"new{i}" for i in range(15)} <= kept


def test_a_departed_rank_fails_what_waits_and_what_comes() -> None:
    coordinator = new_coordinator(2, cache_capacity=1024)
    coordinator.receive(Report(0, (0,), (), (request("early"),)), 0.0)
    coordinator.depart(1)
    coordinator.receive(Report(0, (0,), (), (request("late"),)), 0.0)
    *segments, departed = coordinator.pop_orders()
    assert departed == Departed(1)
    for segment in segments:
        assert isinstance(segment, Segment) and isinstance(segment.items[0], Response)
        assert "rank 1 has been shut down" in segment.items[0].error


# -- fusion


def response(name: str, length: int, **fields: object) -> Response:
    return Response(request(name, length)._replace(**fields))  # type: ignore[arg-type]


def fused(responses: list[Response], threshold: int, keep_groups: bool = False) -> list[str]:
    segments = next_segments(responses, threshold, keep_groups)
    return ["".join(each.request.name for each in segment) for segment in segments]


def test_fusion_fills_segments_up_to_the_threshold_in_bytes() -> None:
    ready = [response(name, 10) for name in "abcde"]  # 40 bytes each
    assert fused(ready, 0) == ["a", "b", "c", "d", "e"]
    assert fused(ready, 40) == ["a", "b", "c", "d", "e"]
    assert fused(ready, 80) == ["ab", "cd", "e"]
    assert fused(ready, 1000) == ["abcde"]


def test_fusion_looks_past_tensors_of_another_kind() -> None:
    ready = [
        response("a", 10),
        response("b", 10, dtype="float64"),
        response("c", 10),
        response("d", 10, collective="broadcast"),
        response("e", 10, reduce_op=1),
        response("f", 10, prescale_factor=2.0),
        response("g", 10, dtype="float64"),
        response("h", 10)._replace(error="failed"),
        response("i", 10, process_set_id=1),
    ]
    assert fused(ready, 1000) == ["ac", "bg", "d", "e", "f", "h", "i"]


def test_groups_are_fused_with_nothing_else_on_request() -> None:
    ready = [response("a", 1), response("b", 1, group="g"), response("c", 1, group="g")]
    assert fused(ready, 1000) == ["abc"]
    assert fused(ready, 1000, keep_groups=True) == ["a", "bc"]


def test_allgather_counts_the_rows_of_all_ranks() -> None:
    ready = [
        Response(request(n, 1)._replace(collective="allgather"), first_dims=(10, 20)) for n in "abc"
    ]
    assert fused(ready, 240) == ["ab", "c"]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["float32", "int8"]))),
    st.integers(0, 200),
)
def test_fusion_loses_and_repeats_nothing(sizes: list[tuple[int, str]], threshold: int) -> None:
    ready = [response(str(i), n, dtype=dtype) for i, (n, dtype) in enumerate(sizes)]
    segments = next_segments(ready, threshold)
    flat = [each for segment in segments for each in segment]
    assert sorted(flat, key=lambda r: int(r.request.name)) == ready
    for segment in segments:
        assert len({each.request.dtype for each in segment}) == 1
        order = [int(each.request.name) for each in segment]
        assert order == sorted(order)


# -- stalls


def test_a_stall_is_reported_once_per_warning_time() -> None:
    inspector = StallInspector(60, 0)
    waiting = [Waiting(f"t{i}", (1, 3), 0.0) for i in range(8)]
    assert inspector.next_check(0.0) == 60
    assert inspector.inspect(waiting, 59.9) is None
    report = inspector.inspect(waiting, 60.0)
    assert report is not None and report.missing == (1, 3) and not report.shutdown
    assert "rank 3 has not submitted: t0, t1, t2, t3, t4, t5 and 2 more" in report.text
    assert inspector.next_check(0.0) == 120
    assert inspector.inspect(waiting, 100.0) is None
    assert inspector.inspect(waiting, 120.0) is not None
    assert inspector.inspect([], 1000.0) is None


def test_a_stall_ends_the_job_after_the_shutdown_time() -> None:
    inspector = StallInspector(60, 90)
    waiting = [Waiting("t", (1,), 0.0)]
    first = inspector.inspect(waiting, 61.0)
    assert first is not None and not first.shutdown
    assert inspector.inspect(waiting, 80.0) is None
    assert inspector.next_check(0.0) == 90
    last = inspector.inspect(waiting, 90.0)
    assert last is not None and last.shutdown


# -- tree and messages


def test_ranks_report_to_their_leader_and_leaders_to_rank_0() -> None:
    trees = [Tree(Topology(((0, 1), (2, 3), (4,))), rank) for rank in range(5)]
    assert [tree.parent for tree in trees[1:]] == [0, 0, 2, 0]
    assert [tree.children for tree in trees] == [(1, 2, 4), (), (3,), (), ()]
    assert trees[2].subtree == {2, 3}


def test_many_hosts_report_through_leaders_of_leaders() -> None:
    topology = Topology(tuple((rank,) for rank in range(100)))
    trees = [Tree(topology, rank) for rank in range(100)]
    assert all(len(tree.children) <= 32 for tree in trees)
    assert trees[0].subtree == set(range(100))
    assert trees[1].children == tuple(range(33, 65))


MESSAGES: list[Message] = [
    Reports((Report(3, (1, 2, 5), (0, 1, 2, 7), (request("a", 3, group="g", group_size=2),)),)),
    Orders(
        (Segment(0, (5, Response(request("a"), (1, 2), 4, "", 1))), Eviction(1, 2), Departed(3))
    ),
    Orders((Retune(1 << 20, 2.5, 0, "ring", 1 << 18),)),
    Abort(-1, "reason"),
    Depart(2),
    StackQuery((1, 2)),
    StackReply(1, "text"),
    ClockReply(1, 10**18, -5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message), 1) == message


@given(st.lists(st.integers(0, 5000), unique=True))
def test_runs_hold_numbers(numbers: list[int]) -> None:
    assert NumberSet.of_runs(runs_of(numbers)) == sorted(numbers)
    assert runs_of(NumberSet.of(numbers)) == runs_of(numbers)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1",
        msgpack.packb((99, ())),
        msgpack.packb((-1, ())),
        msgpack.packb((0, ((0, (0, 1 << 60), (), ()),))),
        msgpack.packb((0, ((0, (1 << 40, 1), (), ()),))),  # no rank
        msgpack.packb((0, ((0, (0, 1), (5, 1, 3, 1), ()),))),  # descending
        msgpack.packb((0, ((0, (0, 1), (0, 0), ()),))),
        msgpack.packb((0, ((0, (0, 1), (0,), ()),))),
        msgpack.packb((0, ((0, (0, 1), (), (("too short",),)),))),
        msgpack.packb((1, ((0, (0, ("not an item",))),))),
        msgpack.packb((1, ((3, (1 << 20, float("nan"), 0, "ring", 1 << 18)),))),
        msgpack.packb((1, ((3, (1 << 20, -1.0, 0, "ring", 1 << 18)),))),
        msgpack.packb((1, ((3, (1 << 20, 2.5, 0, "mpi", 1 << 18)),))),
        msgpack.packb((1, ((3, (1 << 20, 2.5, 0, "ring", 0)),))),
        msgpack.packb((1, ((3, (1 << 20, 2.5, 0, ["ring"], 1 << 18)),))),
        msgpack.packb((2, ("rank", 5))),
        encode(MESSAGES[0])[:-1],
    ],
)
def test_a_foreign_message_is_an_error_that_names_the_sender(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 7 sent a control message"):
        decode(data, 7)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_raise_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data, 0)
