"""The control tree: to whom ranks report."""

from __future__ import annotations

from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import Tree


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
