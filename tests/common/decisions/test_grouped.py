"""Sizes of groups are compared by the set as rank by rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.bitsets import mask_of
from hvdlite.common.decisions.grouped import Groups
from tests.common.decisions.requests import request

RANKS = 6
some_ranks = st.frozensets(st.integers(0, RANKS - 1), min_size=1)


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
@settings(max_examples=300)
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
