"""Hosts come and go while a job runs."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.common.meeting.placement import places
from tests.elastic_driver import grow, results_of
from tests.simulation.elastic.by_hand import JobByHand, running


def test_a_host_beyond_max_np_is_not_told() -> None:
    job = running({"a": 2}, max_np=2)
    job.discover({"a": 2, "b": 2})
    assert "b" not in job.agents
    assert job.processes[0].last("seen") is None
    assert len(job.worlds) == 1


def test_hosts_are_filled_up_to_max_np() -> None:
    job = running({"a": 2, "b": 4}, num_proc=4, max_np=5)
    assert job.hosts == "aabbb"
    starts = [job.processes[number].start.place for number in job.members]
    assert starts == places(list("aabbb"))


def test_more_slots_of_a_host_are_like_a_new_host() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2)
    job.discover({"a": 2, "b": 1})
    assert job.processes[0].last("seen") == ["seen", 1, 2]
    assert job.processes[2].start.start_rank == 1
    grow(job)
    assert (job.hosts, job.members) == ("aab", [0, 2, 1])
    assert job.worlds[-1][2:] == [0, [1], 4]


def test_fewer_slots_of_a_host_end_its_last_rank() -> None:
    job = running({"a": 2, "b": 1}, num_proc=3)
    job.discover({"a": 1, "b": 1})
    assert job.processes[2].last("notice") == ["notice", 2, 1]
    job.pass_checks()
    assert (job.members, job.worlds[-1][3]) == ([0, 2], [])
    assert job.processes[1].last("end") is not None
    assert job.processes[1].last("end")[:2] == ["end", 0]  # type: ignore[index]
    job.end(1, 15)
    job.return_all()
    assert job.finish is not None
    assert job.finish.code == 0


def test_a_removed_host_is_not_a_failure() -> None:
    job = running({"a": 2, "b": 2}, num_proc=4)
    job.discover({"a": 2})
    assert all(job.processes[number].last("regroup") is None for number in range(4))
    job.commit(7)
    job.pass_checks()
    assert job.worlds[-1] == [2, [0, 1], 0, [], 7]  # no weights are sent
    assert "ranks 2-3 (host b) were removed" in job.lines[-1]
    assert "nothing is redone" in job.lines[-1]
    job.wait(20)  # its workers do not obey
    assert [job.processes[number].ended for number in (2, 3)] == [[False, True]] * 2
    job.end(2, 0)
    assert "b" in job.agents
    job.kill(3)
    assert "b" not in job.agents
    assert len(job.worlds) == 2


def test_the_host_of_rank_0_is_removed_and_another_is_added() -> None:
    job = running({"a": 2, "b": 2, "c": 2}, num_proc=6)
    job.discover({"b": 2, "c": 2, "d": 2})
    grow(job)
    grow(job)
    assert (job.hosts, job.members) == ("bbccdd", [2, 3, 4, 5, 6, 7])
    assert job.worlds[-1][2:] == [0, [4, 5], 4]


def test_hosts_that_are_replaced_one_by_one_keep_the_order() -> None:
    job = running({"a": 2, "b": 2, "c": 2}, num_proc=6)
    job.discover({"d": 2, "c": 2, "a": 2})
    job.pass_checks()
    grow(job)
    assert (job.hosts, job.members) == ("aaccdd", [0, 1, 4, 5, 6, 7])


@pytest.mark.parametrize("limit", [1, 2])
def test_discovery_shows_a_then_both_then_b(limit: int) -> None:
    job = running({"a": 2}, reset_limit=limit)
    job.discover({"a": 2, "b": 2})
    grow(job)
    assert (job.hosts, job.worlds[-1][2:4]) == ("aabb", [0, [2, 3]])
    job.discover({"b": 2})
    job.pass_checks()
    if limit == 1:
        assert job.finish is not None
        assert job.finish.code == 1
        assert "number of resets exceeded limit 1" in job.finish.sentence
        return
    assert (job.hosts, job.members) == ("bb", [2, 3])
    assert job.processes[2].start.start_rank == 2
    job.return_all()
    assert results_of(job) == (0, (2, 3))


@pytest.mark.parametrize("limits", [{}, {"max_np": 2}, {"max_np": 2, "admit": "wait"}])
def test_all_hosts_are_replaced_at_once(limits: dict[str, Any]) -> None:
    """One rank that has the state joins its successors, and leaves at the commit after that."""
    job = running({"a": 2}, **limits)
    job.slow_workers = True
    job.discover({"b": 2})
    kept = "host a is kept until another one has the state: discovery no longer shows it"
    assert job.lines.count(kept) == 1
    for number in (2, 3):
        job.hello(number)
    if job.worlds[-1][0] == 1 and not job.processes[0].last("raise"):
        job.newcomers_ready()
    job.pass_checks()
    job.newcomers_ready()
    assert job.members[0] == 0
    assert job.hosts == "abb"[: max(2, limits.get("max_np", 3))]
    assert job.worlds[-1][2:] == [0, [*range(1, len(job.members))], 4]
    assert job.processes[1].last("end")[:2] == ["end", 0]  # type: ignore[index]
    assert job.processes[0].last("end") is None
    job.commit(5)
    job.pass_checks()
    grow(job)
    assert (job.hosts, job.members) == ("bb", [2, 3])
    for number in (0, 1):
        job.end(number, 0)
    assert job.agents == {"b"}
    job.return_all()
    assert results_of(job) == (0, (2, 3))


def test_the_only_rank_left_is_removed_while_its_successor_starts() -> None:
    """The world of a rank that is removed goes on, and survives the end of a first successor."""
    job = running({"a": 1, "b": 1})
    job.slow_workers = True
    job.kill(0)
    assert (job.members, len(job.worlds)) == ([1], 2)
    job.discover({"a": 1})
    job.wait(30)
    assert job.processes[1].last("notice") is None
    job.commit(9)
    job.kill(2)
    job.wait(2)
    job.hello(3)
    grow(job)
    assert job.worlds[-1] == [3, [1, 3], 0, [1], 9]
    job.pass_checks()
    assert job.worlds[-1] == [4, [3], 0, [], 9]
    assert job.finish is None


def test_the_newest_commit_is_handed_over() -> None:
    """A rank is lost while the others, whose hosts have gone, have come to different commits."""
    job = running({"a": 1, "b": 1, "c": 1}, num_proc=3)
    job.slow_workers = True
    job.busy = {1, 2}
    job.discover({"d": 1})
    job.kill(0)
    job.hello(3)
    job.newcomers_ready()
    job.ready(1, 5)
    job.ready(2, 6)
    assert job.worlds[-1] == [2, [2, 3], 0, [1], 6]


def test_nobody_is_waited_for_when_no_host_is_left() -> None:
    job = running({"a": 2, "b": 1}, num_proc=3, failures_by_host=True)
    job.kill(2)
    job.discover({"b": 1})  # It is given up for good, so nobody can take over.
    job.pass_checks()
    assert job.finish is not None
    assert (job.finish.code, job.finish.sentence) == (1, "No hosts from previous set remaining")


def test_old_hosts_serve_until_a_newcomer_has_their_state() -> None:
    job = running({"a": 1}, max_np=2)
    job.discover({"a": 1, "b": 1})
    job.wait(5)
    assert job.processes[0].last("notice") is None  # the newcomer still imports
    grow(job)
    job.discover({"b": 1})
    job.pass_checks()
    assert (job.hosts, job.worlds[-1][2:]) == ("b", [0, [], 4])


def test_a_commit_waits_for_newcomers_when_it_is_to() -> None:
    job = running({"a": 2}, admit="wait")
    job.slow_hosts.add("b")
    job.discover({"a": 2, "b": 1})
    assert job.processes[0].last("raise") == ["raise", 2, 1, 2]
    job.pass_checks()
    job.agent("b")
    assert len(job.worlds) == 1
    job.newcomers_ready()
    assert job.worlds[-1] == [2, [0, 1, 2], 0, [2], 4]


def test_a_host_that_will_go_is_drained() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2)
    job.event("agent_leaving", "b", "its agent got SIGTERM")
    job.pass_checks()
    assert (job.hosts, job.worlds[-1][3]) == ("a", [])
    assert "its agent got SIGTERM" in job.processes[1].last("end")[2]  # type: ignore[index]
    job.end(1, 0)
    assert job.agents == {"a"}


def test_a_host_whose_agent_was_ended_comes_back() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2)
    for number, seconds in ((1, 60), (2, 120)):
        job.event("agent_leaving", "b", "its agent got SIGTERM")
        job.event("agent_leaving", "b", "its agent got SIGTERM")
        line = "host b leaves at the next commit: its agent got SIGTERM; it is tried again"
        assert job.lines[-1] == f"{line} {seconds} s after that"
        job.wait(1000)  # There is no commit yet.
        job.pass_checks()
        assert job.hosts == "a"
        job.end(number, 0)
        job.wait(seconds - 1)
        assert job.agents == {"a"}
        job.wait(2)
        grow(job)
        assert job.hosts == "ab"


def test_a_host_whose_agent_was_ended_comes_back_at_once_when_discovery_shows_it_anew() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2)
    job.event("agent_leaving", "b", "its agent got SIGTERM")
    job.pass_checks()
    job.end(1, 0)
    job.discover({"a": 1})
    job.discover({"a": 1, "b": 1})
    grow(job)
    assert job.hosts == "ab"


def test_a_removal_is_undone_in_time() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2)
    job.discover({"a": 1})
    job.discover({"a": 1, "b": 1})
    job.pass_checks()
    assert (job.members, job.finish) == ([0, 1], None)


def test_a_newcomer_on_a_host_that_is_removed_ends() -> None:
    job = running({"a": 1})
    job.discover({"a": 1, "b": 1})
    job.discover({"a": 1})
    assert job.processes[1].last("end")[:2] == ["end", 0]  # type: ignore[index]
    job.end(1, 0)
    assert (job.agents, len(job.worlds), job.finish) == ({"a"}, 1, None)


# -- discovery


def test_the_wait_for_the_first_world_says_what_discovery_shows() -> None:
    job = JobByHand(num_proc=3)
    wanted = "the next world waits for slots: {} slots missing ({} of 3 are there), discovery {}"
    job.wait(11)
    assert job.lines == [wanted.format(3, 0, "has not answered yet")]
    job.discover({})
    job.wait(10)
    assert job.lines[1:] == [wanted.format(3, 0, "shows no host")]
    job.discover({"a": 1})
    job.wait(10)
    assert job.lines[2:] == [wanted.format(2, 1, "shows a:1")]


def test_a_first_discovery_that_fails_is_fatal() -> None:
    job = JobByHand(num_proc=1)
    job.event("discovery_failed", "exit code 3")
    assert results_of(job) == (1, ())
    assert "exit code 3" in job.finish.sentence


def test_a_later_discovery_that_fails_is_a_warning() -> None:
    job = running({"a": 2})
    for _ in range(3):
        job.event("discovery_failed", "exit code 3")
    job.discover({"a": 2, "b": 1})
    assert [line for line in job.lines if "discovery" in line] == [
        "discovery failed, so the hosts are taken to be as they were: exit code 3",
        "discovery answers again",
    ]
    grow(job)
    assert job.hosts == "aab"


@pytest.mark.parametrize("empty", [{}, {"a": 0}])
def test_an_answer_without_a_host_is_a_discovery_that_fails(empty: dict[str, int]) -> None:
    job = running({"a": 2, "b": 1})
    for hosts in (empty, empty, {"a": 2, "b": 1}, {"b": 1}, empty):
        job.discover(hosts)
    failed = "discovery failed, so the hosts are taken to be as they were: it shows no host"
    assert [line for line in job.lines if "discovery" in line] == [
        failed,
        "discovery answers again",
        failed,
    ]
    job.pass_checks()
    assert (job.hosts, job.finish) == ("b", None)  # The removal before it holds.


def test_the_first_start_waits_for_enough_slots() -> None:
    job = JobByHand({"a": 1}, num_proc=3, min_np=1, elastic_timeout=30)
    job.wait(10)
    assert job.agents == set()
    missing = "2 slots missing (1 of 3 are there), discovery shows a:1"
    assert job.lines == [f"the next world waits for slots: {missing}"]
    job.discover({"a": 1, "b": 3})
    assert job.hosts == "abbb"


def test_the_first_start_does_not_wait_for_ever() -> None:
    job = JobByHand({"a": 1}, num_proc=3, min_np=1, elastic_timeout=30)
    job.wait(30.1)
    assert job.finish is not None
    assert job.finish.code == 1
    assert "2 slots missing (1 of 3 are there) for 30 s" in job.finish.sentence


def test_order_of_discovery_is_kept() -> None:
    assert running({"z": 1, "a": 1, "m": 1}).hosts == "zam"


def test_newcomers_beyond_max_np_end_when_old_hosts_come_back() -> None:
    job = running({"a": 2}, max_np=2)
    job.discover({"b": 1, "c": 1})
    assert len(job.processes) == 4
    job.discover({"a": 2, "b": 1, "c": 1})
    assert all(job.processes[number].last("end")[:2] == ["end", 0] for number in (2, 3))  # type: ignore[index]
    job.pass_checks()
    job.wait(60)
    assert (job.hosts, len(job.worlds)) == ("aa", 1)  # They were to stay until others train.


def test_five_hundred_ranks_cost_one_decision_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranks are ready one after another: only the last of them is worth a decision."""
    job = running({f"h{index}": 8 for index in range(64)}, num_proc=512)
    decisions = []
    advance = type(job.driver)._advance
    monkeypatch.setattr(
        type(job.driver), "_advance", lambda self, now: (decisions.append(now), advance(self, now))
    )
    job.kill(17)
    assert len(job.members) == 511
    assert len(decisions) < 5


def test_a_rank_that_has_to_leave_gives_its_commit_to_others_first() -> None:
    """It has committed once more than others before it heard of a loss."""
    job = JobByHand({"a": 2, "b": 1}, num_proc=3, min_np=1)
    job.commit(1)
    job.discover({"a": 2})
    job.processes[2].commit = 2
    job.kill(1)
    assert job.worlds[-1] == [2, [0, 2], 1, [0], 2]
    job.commit(3)
    job.pass_checks()
    assert job.worlds[-1] == [3, [0], 0, [], 3]
    assert job.processes[2].last("end") is not None
