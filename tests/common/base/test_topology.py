"""Topologies: what ranks conclude from them, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.common.base.topology import Topology

HOSTS = ((0, 2, 4), (1, 5), (3,))


def test_what_each_rank_finds() -> None:
    topology = Topology(HOSTS)
    assert topology.size == 6 and not topology.homogeneous
    assert [topology.host_of[rank] for rank in range(6)] == [0, 1, 0, 2, 0, 1]
    assert [topology.leader(rank) for rank in range(6)] == [0, 1, 0, 3, 0, 1]
    assert [topology.local_rank(rank) for rank in range(6)] == [0, 0, 1, 0, 2, 1]
    assert topology.cross_peers(5) == (2, 5) and topology.cross_peers(4) == (4,)


@pytest.mark.parametrize(
    ("members", "hosts"),
    [
        ((1, 2, 3), ((0,), (1,), (2,))),
        ((2, 4, 5), ((0, 1), (2,))),
        ((5, 4, 2), ((0,), (1, 2))),  # Members may come in any order.
        ((), ()),
    ],
)
def test_a_part_of_the_ranks(members: tuple[int, ...], hosts: Any) -> None:
    assert Topology(HOSTS).restrict(members).hosts == hosts


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (((1,), (0,)), "in order of the first"),
        (((0, 1), ()), "must each have ranks"),
        (((0, 2, 1),), r"in order, not \(0, 2, 1\)"),
        (((0, 1), (1, 2)), "each rank from 0 on"),
        (((0, 1), (3,)), "each rank from 0 on"),
        (((1, 2),), "each rank from 0 on"),
    ],
)
def test_hosts_that_are_in_no_order_are_refused(hosts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Topology(hosts)
