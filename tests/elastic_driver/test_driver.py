"""The driver on fixed hosts and on changing ones: who is in which world, and when."""

from __future__ import annotations

from tests.elastic_driver import results_of
from tests.simulation.elastic.by_hand import JobByHand


def test_fixed_hosts_start_and_return() -> None:
    job = JobByHand({"a": 2, "b": 2})
    assert job.worlds == [[1, [0, 1, 2, 3], 0, [1, 2, 3], 0]]
    job.return_all([2, 0, 3])
    assert job.finish is None
    job.end(1, 0)
    assert results_of(job) == (0, (0, 1, 2, 3))


def test_a_killed_rank_is_restarted_and_taken_in_when_it_is_ready() -> None:
    job = JobByHand({"a": 4}, num_proc=4, min_np=2)
    job.commit(5)
    job.kill(1)
    assert job.worlds[-1] == [2, [0, 2, 3], 0, [], 5]  # nobody receives weights
    assert job.processes[4].start.slot == 1  # at once
    assert len(job.worlds) == 2  # it still imports
    job.ready(4)
    assert job.processes[0].last("raise") is not None
    job.commit(9)
    job.pass_checks()
    assert job.worlds[-1] == [3, [0, 2, 3, 4], 0, [3], 9]
    job.return_all()
    assert results_of(job) == (0, (0, 2, 3, 4))


def test_a_new_host_is_taken_in() -> None:
    job = JobByHand({"a": 2}, num_proc=2, min_np=1)
    job.commit(3)
    job.discover({"a": 2, "b": 2})
    assert job.processes[0].last("seen") == ["seen", 1, 2]
    assert job.processes[2].start.start_rank == 2
    expected = [[0, "a"], [1, "a"], [2, "b"], [3, "b"]]
    assert job.processes[2].last("newcomer") == ["newcomer", 2, expected]
    job.ready(2)
    assert job.processes[0].last("notice") is None  # its neighbour has been started, too
    job.ready(3)
    job.pass_checks()
    assert (job.hosts, job.worlds[-1][2:4]) == ("aabb", [0, [2, 3]])


def test_agents_that_come_together_start_their_workers_in_the_order_of_hosts() -> None:
    job = JobByHand({"a": 2, "b": 1, "c": 1}, num_proc=4, min_np=1)
    hosts = {"d": 1, "e": 2}
    job.slow_hosts |= set(hosts)
    job.discover({"a": 2, "b": 1, "c": 1, **hosts})
    for host in ("e", "d"):
        job.agents.add(host)
        job.driver.agent_came(host, now=job.now)
    assert len(job.processes) == 4
    job.carry_out()
    places = [(each.host, each.slot, each.start.start_rank) for each in job.processes.values()]
    assert places[4:] == [("d", 0, 4), ("e", 0, 5), ("e", 1, 6)]
