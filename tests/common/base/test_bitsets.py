"""Bit masks hold the same numbers as Python's sets and counters."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import NumberSet, Tally, mask_of, numbers_of, runs_of

FAR = [0, 1, 2, 4095, 4096, 10**9]  # bits on several pages
numbers = st.frozensets(st.one_of(st.integers(0, 70), st.sampled_from(FAR)))


@settings(max_examples=50)
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


@settings(max_examples=50)
@given(st.lists(st.tuples(st.frozensets(st.integers(0, 9)), st.integers(0, 2000))))
def test_many_counts_at_once(additions: list[tuple[frozenset[int], int]]) -> None:
    tally, expected = Tally(), Counter(dict.fromkeys(range(10), 0))
    for numbers, amount in additions:
        tally.add(mask_of(numbers), amount)
        expected.update(dict.fromkeys(numbers, amount))
    for amount in {0, 1, *expected.values()}:
        having = {number for number, count in expected.items() if count == amount}
        assert set(numbers_of(tally.which(mask_of(range(10)), amount))) == having


@given(st.lists(st.integers(0, 5000), unique=True))
def test_runs_hold_numbers(numbers: list[int]) -> None:
    assert NumberSet.of_runs(runs_of(numbers)) == sorted(numbers)
    assert runs_of(NumberSet.of(numbers)) == runs_of(numbers)
