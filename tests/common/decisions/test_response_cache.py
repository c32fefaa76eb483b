"""The cache keeps the tensors that are used, and knows the bits of groups."""

from __future__ import annotations

from hvdlite.common.base.bitsets import NumberSet
from hvdlite.common.decisions.response_cache import CoordinatorCache
from hvdlite.common.requests.messages import Eviction, Report, Response, Segment
from tests.common.decisions.requests import new_coordinator, request


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


def test_the_bits_of_a_group_are_known_together() -> None:
    cache = CoordinatorCache(10)
    for name, group in [("a", "g"), ("b", ""), ("c", "g"), ("d", "h")]:
        cache.remember(Response(request(name, group=group, group_size=2)), {})
    assert sorted(map(list, cache.groups(NumberSet.of(range(4))))) == [[0, 2], [3]]
    cache.forget(0)
    cache.forget(3)
    assert [*map(list, cache.groups(NumberSet.of(range(4))))] == [[2]]
    assert [*cache.known(NumberSet.of(range(9)))] == [1, 2]
