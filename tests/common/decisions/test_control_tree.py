"""The control tree, and coordinator and aggregators under it with messages in random order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.decisions.response_cache import ResponseCache
from hvdlite.common.plain.messages import Eviction, Order, Report, Request, Segment
from tests.common.decisions.requests import new_coordinator, request


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
