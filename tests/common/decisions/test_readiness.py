"""Counting by the set gives what counting bit by bit and rank by rank gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import NumberSet, mask_of, numbers_of
from hvdlite.common.decisions.bit_readiness import BitReadiness
from hvdlite.common.decisions.grouped import Groups
from hvdlite.common.decisions.request_readiness import RequestReadiness
from tests.common.decisions.requests import request

RANKS = 6
some_ranks = st.frozensets(st.integers(0, RANKS - 1), min_size=1)
FAR = [0, 1, 2, 4095, 4096, 10**9]  # Bits on several pages.
some_bits = st.frozensets(st.sampled_from(FAR), min_size=1)
# Few, so that the same are often reported again; some overlap.
sources = st.sampled_from([*map(frozenset, [(0, 1), (1, 2), (2, 3, 4, 5), (3, 4), (5,)])])


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


@pytest.mark.thorough
@settings(max_examples=100)
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


@settings(max_examples=100)
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


@pytest.mark.thorough
@settings(max_examples=100)
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
