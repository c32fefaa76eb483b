"""A leader passes on what all ranks below it have, and what is late."""

from __future__ import annotations

from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.requests.messages import Carried, Eviction, Report, Request, Response, Segment
from tests.common.decisions.requests import request


def test_a_leader_passes_on_what_is_late_and_then_the_rest() -> None:
    leader = Aggregator(8, range(4, 8))
    leader.note(Segment(0, tuple(Response(request(str(bit)), bit=bit) for bit in range(3))))
    leader.receive(Report(0, (4, 6), (0, 1, 2)), 0.0)
    leader.receive(Report(0, (5, 7), (2,)), 1.0)
    assert leader.pop_reports() == (Report(0, (4, 5, 6, 7), (2,)),)
    leader.flush(0.5)
    assert leader.pop_reports() == (Report(0, (4, 6), (0, 1)),)
    leader.receive(Report(0, (5,), (1,)), 2.0)
    assert leader.pop_reports() == (Report(0, (5,), (1,)),)


def test_requests_of_some_ranks_wait_for_those_below_and_releases_for_nobody() -> None:
    leader = Aggregator(6, range(2, 5))
    pair = Request(0, "form", "form_process_set", parties=(1, 3, 4))
    leader.receive(Report(0, (3,), (), (pair,)), 0.0)
    assert leader.pop_reports() == ()
    leader.receive(Report(0, (4,), (), (pair,)), 0.0)
    assert leader.pop_reports() == (Report(0, (3, 4), (), (pair,)),)
    leader.note(Segment(0, (Response(pair),)))
    in_set = request("a", process_set_id=1)
    leader.receive(Report(1, (3, 4), (), (in_set,)), 0.0)
    assert leader.pop_reports() == (Report(1, (3, 4), (), (in_set,)),)
    release = Request(0, "release", "release_process_set", root_rank=1, parties=(1, 3, 4))
    leader.receive(Report(0, (4,), (), (release,)), 0.0)
    assert leader.pop_reports() == (Report(0, (4,), (), (release,)),)
    leader.note(Segment(0, (Response(release),)))
    leader.receive(Report(1, (3, 4), (), (in_set,)), 0.0)
    assert leader.pop_reports() == ()


def test_data_goes_on_with_its_bit_and_is_forgotten_with_it() -> None:
    leader = Aggregator(6, range(2, 4))
    leader.note(Segment(0, (Response(request("a"), bit=0), Response(request("b"), bit=1))))
    data = {
        (bit, rank): Carried(bit, rank, bytes([bit, rank])) for bit in (0, 1) for rank in (2, 3)
    }
    leader.receive(Report(0, (2,), (0, 1), (), (data[0, 2], data[1, 2])), 0.0)
    leader.receive(Report(0, (3,), (1,), (), (data[1, 3],)), 0.0)
    assert leader.pop_reports() == (Report(0, (2, 3), (1,), (), (data[1, 2], data[1, 3])),)
    leader.note(Eviction(0, 0))
    leader.receive(Report(0, (3,), (0,), (), (data[0, 3],)), 0.0)  # It has crossed the eviction.
    assert leader.pop_reports() == ()
    leader.note(Segment(0, (Response(request("a"), bit=2),)))
    leader.receive(Report(0, (2, 3), (2,)), 0.0)
    assert leader.pop_reports() == (Report(0, (2, 3), (2,)),)


def test_what_is_late_takes_its_data_with_it() -> None:
    leader = Aggregator(6, range(2, 4))
    leader.note(Segment(0, (Response(request("a"), bit=0),)))
    early, late = Carried(0, 2, b"x"), Carried(0, 3, b"y")
    leader.receive(Report(0, (2,), (0,), (), (early,)), 0.0)
    leader.flush(1.0)
    leader.receive(Report(0, (3,), (0,), (), (late,)), 2.0)
    first, second = leader.pop_reports()
    assert (first.carried, second.carried) == ((early,), (late,))


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
