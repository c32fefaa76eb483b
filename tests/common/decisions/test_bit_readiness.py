"""Counting by the set gives what counting bit by bit and rank by rank gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import NumberSet, mask_of, numbers_of
from hvdlite.common.decisions.bit_readiness import BitReadiness

RANKS = 6
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
@settings(max_examples=300)
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
