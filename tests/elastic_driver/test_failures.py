"""Workers and hosts fail while a job runs."""

from __future__ import annotations

import pytest

from tests.elastic_driver.simulation import Simulation


def running(hosts: dict[str, int], **plan: object) -> Simulation:
    job = Simulation(hosts, **{"min_np": 1, **plan})
    job.commit(4)
    return job


def finished(job: Simulation) -> tuple[int, str]:
    assert job.finish is not None
    return job.finish.code, job.finish.sentence


def abc(**plan: object) -> Simulation:
    """Hosts A, B, C with 2 slots each; a failure excludes its host."""
    plan = {"num_proc": 4, "min_np": 2, "failures_by_host": True, **plan}
    return running({"a": 2, "b": 2, "c": 2}, **plan)


@pytest.mark.parametrize("code", [1, 137])
def test_a_failure_that_excludes_its_host(code: int) -> None:
    job = abc()
    assert len(job.members) == 6
    job.end(2, code)
    assert job.worlds[-1] == [2, [0, 1, 4, 5], 0, [], 4]
    assert [job.processes[number].start.start_rank for number in job.members] == [0, 1, 4, 5]
    assert "b" not in job.agents
    job.wait(10000)
    assert len(job.worlds) == 2
    job.return_all()
    assert job.finish is not None
    assert (job.finish.code, job.finish.results) == (0, (0, 1, 4, 5))


@pytest.mark.parametrize("hosts", [{"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 3}])
@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (2, 1), (1, 0, 2)])
def test_newcomers_after_several_losses_have_different_start_ranks(
    hosts: dict[str, int], lost: tuple[int, ...]
) -> None:
    job = running(hosts)
    for number in lost:
        job.kill(number)
    newcomers = [job.processes[number].start for number in sorted(job.processes)[4:]]
    ranks = [start.start_rank for start in newcomers]
    assert len(set(ranks)) == len(lost) and set(ranks) <= set(range(4))
    assert [start.place["RANK"] for start in newcomers] == ranks
    local = [(start.host, start.place["LOCAL_RANK"]) for start in newcomers]
    assert len(set(local)) == len(lost)


def test_one_process_of_each_host_fails() -> None:
    job = abc()
    for number in (0, 2, 4):
        if job.processes[number].alive:
            job.end(number, 3 + number)
    code, sentence = finished(job)
    assert code == 3 + 4  # of the ranks of the last world
    assert "no rank of world 3 is left: rank 0 (host c[0]) was lost: exit code 7" in sentence


def test_all_processes_fail_at_once() -> None:
    job = running({"a": 2}, num_proc=2)
    job.busy.update((0, 1))
    job.end(1, 5, "ValueError: no batch")
    job.end(0, 6)
    code, sentence = finished(job)
    assert code == 5
    assert "rank 1 (host a[1]) was lost: ValueError: no batch (exit code 5)" in sentence
    assert "rank 0 (host a[0]) was lost: exit code 6" in sentence


def test_an_excluded_host_comes_back_and_fails_again() -> None:
    job = abc(cooldown=(1, 2))
    for round_ in range(3):
        job.kill(next(each.number for each in job.on("b") if each.alive))
        assert "host b is given up for 2 s: one of its workers failed" in job.lines[-2:]
        assert set(job.hosts) == {"a", "c"}
        job.wait(1.9)
        assert "b" not in job.agents
        job.wait(0.2)
        assert job.processes[0].last("seen") is not None
        job.newcomers_ready()
        job.pass_checks()
        assert job.hosts == "aaccbb"  # its last assignment was without it
        assert job.members[0] == 0
        assert len(job.worlds) == 3 + 2 * round_


def test_a_newcomer_is_not_rank_0_where_the_last_rank_of_the_first_host_has_died() -> None:
    """It was to come at the next commit, in the place of a rank that had died before."""
    job = running({"a": 2, "b": 1}, num_proc=3)
    job.kill(1)
    job.newcomers_ready()
    job.kill(0)
    assert (job.members, job.hosts) == ([2, 3], "ba")
    job.newcomers_ready()
    job.pass_checks()
    assert (job.members, job.hosts) == ([2, 3, 4], "baa")


def test_below_min_np_the_others_wait_for_capacity() -> None:
    job = abc(min_np=5)
    job.kill(3)
    assert len(job.worlds) == 1
    job.wait(3)
    job.discover({"a": 2, "b": 2, "c": 2, "d": 1})
    job.newcomers_ready()
    assert job.worlds[-1] == [2, [0, 1, 4, 5, 6], 0, [4], 4]


def test_below_min_np_the_elastic_timeout_ends_the_job() -> None:
    job = abc(min_np=5, elastic_timeout=2)
    job.kill(3)
    job.wait(1.9)
    assert job.finish is None
    job.wait(0.2)
    code, sentence = finished(job)
    assert code == 1
    assert "1 slot missing (4 of 5 are there) for 2 s (--elastic-timeout)" in sentence


def test_survivors_of_a_removal_below_min_np_give_newcomers_their_state() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2, min_np=2)
    job.discover({"a": 1})
    job.commit(6)
    job.pass_checks()
    assert len(job.worlds) == 1
    job.wait(11)
    assert job.lines[-1] == "the next world waits for slots: 1 slot missing (1 of 2 are there)"
    job.discover({"a": 1, "c": 1})
    job.newcomers_ready()
    assert job.worlds[-1] == [2, [0, 2], 0, [1], 6]


def test_down_to_one_rank_and_up_again() -> None:
    job = running({"a": 1, "b": 1, "c": 1, "d": 1}, num_proc=4)
    for host in "abc":
        job.lose_host(host, back=True)
    assert (job.hosts, job.worlds[-1][0]) == ("d", 4)
    job.wait(2)
    job.newcomers_ready()
    job.pass_checks()
    assert job.hosts == "dabc"
    assert job.worlds[-1][2:] == [0, [1, 2, 3], 4]


def test_a_lost_host_is_tried_again_ever_later() -> None:
    job = running({"a": 1, "b": 2}, num_proc=3)
    job.lose_host("b")
    assert "ranks 1-2 (host b) were lost: its host was lost: no sign of life" in "".join(job.lines)
    job.slow_hosts.add("b")
    for delay in (1, 2, 4):
        assert "b" not in job.driver._hosts.coming()
        job.wait(delay)
        assert "b" in job.driver._hosts.coming()
        job.lose_host("b", "ssh: no route to host")


def test_a_host_that_cannot_return_is_given_up() -> None:
    job = running({"a": 1, "b": 2}, num_proc=3)
    job.lose_host("b", "its Spark task has failed", back=False)
    assert "host b is given up for good: its Spark task has failed" in job.lines
    job.wait(10000)
    assert (job.hosts, job.agents) == ("a", {"a"})


def test_two_deaths_are_one_reset() -> None:
    job = running({"a": 4}, num_proc=4, reset_limit=1)
    job.busy.update((0, 3))
    job.kill(1)
    job.kill(2)
    assert len(job.worlds) == 1
    for number in (0, 3):
        job.ready(number)
    assert job.worlds[-1][1] == [0, 3]
    regroups = [frame for frame in job.processes[0].frames if frame[0] == "regroup"]
    assert regroups == [
        ["regroup", 1, "rank 1 (host a) was lost: killed by signal 9", 1]
    ]  # the first one ends all waits
    job.newcomers_ready()
    job.pass_checks()
    assert job.members == [0, 3, 4, 5]  # what takes their place is no further reset
    job.kill(0)
    assert "number of resets exceeded limit 1" in finished(job)[1]


def test_the_end_beyond_the_reset_limit_names_who_was_lost() -> None:
    job = running({"a": 3}, num_proc=3, reset_limit=0)
    job.ready(0)  # Its peer has gone, which the agent tells a moment later.
    assert job.finish is None
    job.kill(2)
    sentence = finished(job)[1]
    lost = "rank 2 (host a[2]) was lost: killed by signal 9 (exit code 137)"
    assert f"limit 0 (--reset-limit): {lost}" in sentence


def test_a_rank_that_leaves_without_a_loss_counts_for_the_reset_limit() -> None:
    job = running({"a": 3}, num_proc=3, reset_limit=0)
    job.ready(0)
    job.wait(0.1)
    assert "limit 0" in finished(job)[1]


def test_a_death_during_a_reset_is_another_world_at_most() -> None:
    job = running({"a": 3}, num_proc=3)
    job.kill(2)
    job.kill(1)  # while the second world meets
    assert [world[1] for world in job.worlds] == [[0, 1, 2], [0, 1], [0]]
    assert job.processes[0].last("regroup") == [
        "regroup", 2, "rank 1 (host a) was lost: killed by signal 9", 1
    ]  # fmt: skip


def test_a_slot_is_tried_again_at_once_and_then_ever_later() -> None:
    job = running({"a": 1, "b": 2}, num_proc=3)
    started = len(job.processes)
    job.kill(2)
    for delay in (0.0, 1.0):
        if delay:
            job.wait(delay - 0.1)
            assert len(job.processes) == started
            job.wait(0.1)
        assert len(job.processes) == started + 1
        started += 1
        job.kill(started - 1)
    assert len(job.worlds) == 2  # newcomers disturb nobody


def test_a_slot_that_failed_long_ago_or_before_a_commit_is_tried_at_once() -> None:
    job = running({"a": 3}, num_proc=3)
    for commit in range(5, 25):
        job.kill(job.members[-1])
        job.newcomers_ready()
        job.pass_checks()
        job.commit(commit)
        job.wait(1.1)
        job.newcomers_ready()
        job.pass_checks()
        assert len(job.members) == 3
    assert job.finish is None


def test_a_host_whose_new_workers_never_start_is_given_up() -> None:
    job = running({"a": 1})
    job.discover({"a": 1, "b": 1})
    for _ in range(3):
        job.wait(4)
        job.end(max(job.processes), 1, "ModuleNotFoundError: No module named 'torch'")
    assert "host b is given up for good: its workers fail as they start" in job.lines
    assert (job.hosts, job.agents) == ("a", {"a"})


def test_a_host_that_breaks_world_after_world_is_given_up() -> None:
    job = running({"a": 2, "b": 1}, num_proc=3)
    for _ in range(5):
        job.wait(0.1)
        job.kill(next(each.number for each in job.on("b") if each.alive))
        job.wait(8.1)
        job.newcomers_ready()
        job.pass_checks()
    assert "host b is given up for good: its workers fail without a commit in between" in job.lines
    assert job.hosts == "aa"


@pytest.mark.parametrize("seconds", [None, 1])
def test_a_script_that_fails_at_the_same_batch_ends_the_job(seconds: float | None) -> None:
    """Its process may take `seconds` to end after it has raised."""
    job = running({"a": 2, "b": 1}, num_proc=3)
    worlds = []
    for _ in range(4):
        rank_1 = job.members[-1]
        worlds.append(len(job.worlds))
        if seconds is not None:
            job.begin_to_raise(rank_1, "ValueError: bad batch 17")
            job.wait(seconds)
            assert job.finish is None
        job.end(rank_1, 1, "ValueError: bad batch 17")
        job.wait(8.1)
        job.newcomers_ready()
        job.pass_checks()
    code, sentence = finished(job)
    assert code == 1
    assert "failed again after 3 resets without a new commit" in sentence
    assert "ValueError: bad batch 17" in sentence


def test_exceptions_with_commits_in_between_end_no_job() -> None:
    job = running({"a": 2, "b": 1}, num_proc=3)
    for commit in range(5, 15):
        job.end(job.members[-1], 1, "ConnectionError: data server")
        job.commit(commit)
        job.wait(8.1)
        job.newcomers_ready()
        job.pass_checks()
        job.commit(commit + 100)
    assert job.finish is None


# -- exceptions whose processes take their time to end


def test_the_next_world_waits_for_no_process_that_has_raised() -> None:
    job = running({"a": 3}, num_proc=3)
    job.begin_to_raise(1, "ValueError: bad batch")
    assert job.members == [0, 2]
    assert "rank 1 (host a) was lost: ValueError: bad batch (exit code 1)" in job.lines[-1]
    job.event("worker_said", 1, ["ready", 1, 99])
    job.event("worker_closed", 1)
    job.event("worker_raised", 1, "ValueError: bad batch")
    job.wait(20)
    assert 3 not in job.processes  # The slot is taken.
    lines = len(job.lines)
    job.end_by_exception(1)
    assert job.processes[3].start.slot == 1
    job.newcomers_ready()
    job.pass_checks()
    assert job.members == [0, 2, 3]
    assert [line for line in job.lines[lines:] if "was lost" in line] == []


def test_a_process_that_has_raised_and_does_not_end_is_killed() -> None:
    job = running({"a": 2}, num_proc=2, min_np=1)
    job.begin_to_raise(1)
    job.wait(29)
    assert job.processes[1].ended == []
    job.wait(2)
    assert job.processes[1].ended == [True]
    job.kill(1)
    assert job.processes[2].start.slot == 1


@pytest.mark.parametrize("code", [1, 3])
def test_a_job_whose_ranks_all_raise_ends_with_the_last_process(code: int) -> None:
    job = running({"a": 2}, num_proc=2, min_np=1)
    job.busy |= {0, 1}  # A rank that raises asks for no other world.
    for number in (0, 1):
        job.begin_to_raise(number, "ValueError: bad batch")
    assert job.finish is None
    for number in (0, 1):
        assert job.finish is None
        job.end(number, code, "ValueError: bad batch")
    got, sentence = finished(job)
    assert got == code
    for rank in (0, 1):
        assert f"rank {rank} (host a[{rank}]) was lost: ValueError: bad batch" in sentence
    assert sentence.count(f"(exit code {code})") == 2


def test_a_job_that_fails_again_ends_with_the_process_that_has_raised() -> None:
    job = running({"a": 2, "b": 1}, num_proc=3)
    for _ in range(4):
        rank_2 = job.members[-1]
        job.begin_to_raise(rank_2, "ValueError: bad batch 17")
        job.wait(1)
        assert job.finish is None
        job.end_by_exception(rank_2)
        job.wait(8.1)
        job.newcomers_ready()
        job.pass_checks()
    code, sentence = finished(job)
    assert code == 1
    assert "failed again after 3 resets without a new commit" in sentence


def test_a_host_that_is_given_up_by_an_exception_keeps_its_agent_for_the_traceback() -> None:
    job = running({"a": 2, "b": 2}, num_proc=4, failures_by_host=True)
    job.begin_to_raise(2)
    assert job.hosts == "aa"
    assert job.processes[3].ended == [True]
    assert "b" in job.agents
    job.kill(3)
    job.end_by_exception(2)
    assert "b" not in job.agents


# -- workers that do not answer


@pytest.mark.parametrize("admit", ["ready", "wait"])
def test_a_worker_that_is_given_up_has_ended_before_another_takes_its_slot(admit: str) -> None:
    job = running({"a": 3}, num_proc=3, admit=admit)
    job.event("worker_stopped", 1)
    assert job.processes[1].last("end") == [
        "end", 1, "rank 1 (host a) was given up: its process was stopped"
    ]  # fmt: skip
    assert job.processes[1].ended == [True]
    assert len(job.worlds) == (2 if admit == "ready" else 1)
    job.wait(12)
    assert 3 not in job.processes
    waits = "the next world waits for the end of rank 1 (host a), which was killed"
    assert (waits in job.lines) == (admit == "wait")
    job.kill(1)
    assert job.processes[3].start.slot == 1
    job.newcomers_ready()
    job.pass_checks()
    assert job.members == [0, 2, 3]
    assert job.processes[0].last("seen") is None  # The hosts have not changed.


def test_a_rank_that_others_wait_for_too_long_is_given_up_alone() -> None:
    job = running({"a": 3}, num_proc=3)
    job.busy.add(1)
    job.event("worker_said", 0, ["late", 7, [2]])  # of another world
    job.event("worker_said", 0, ["late", 1, [1]])
    assert job.members == [0, 2]
    assert "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS" in job.processes[1].last("end")[2]
    job.kill(1)
    assert job.processes[3].start.slot == 1


def test_the_job_waits_for_the_end_of_a_worker_that_never_was_a_rank() -> None:
    job = Simulation(num_proc=2)
    job.slow_workers = True
    job.discover({"a": 2})
    job.end(0, 0)
    job.event("worker_lost", 1, "it has not answered for 10 seconds")
    assert job.finish is None
    job.kill(1)
    assert job.processes[2].start.slot == 1


def test_a_connection_that_breaks_waits_for_the_end_of_the_process() -> None:
    job = running({"a": 2}, num_proc=2)
    job.event("worker_closed", 0)
    job.wait(4)  # It may write a core dump.
    job.end(0, 0)
    job.event("worker_closed", 1)
    job.wait(6)
    code, sentence = finished(job)
    assert code == 1
    assert "rank 1 (host a[1]) was lost: its connection to the driver ended" in sentence


def leave(job: Simulation, number: int) -> None:
    job.busy.add(number)
    job.event("worker_said", number, ["bye"])
    job.event("worker_closed", number)


def test_a_worker_that_says_bye_may_take_long_to_end() -> None:
    job = running({"a": 2}, num_proc=2)
    leave(job, 0)
    leave(job, 1)
    job.wait(1000)
    job.end(0, 0)
    job.end(1, 0)
    assert finished(job)[0] == 0


def test_a_worker_that_says_bye_and_never_ends_does_not_stop_the_others() -> None:
    job = running({"a": 3}, num_proc=3)
    leave(job, 0)
    job.wait(100)
    job.kill(2)
    assert len(job.worlds) == 1  # Rank 0 may return, and its result counts.
    job.wait(29)
    assert len(job.worlds) == 1
    job.wait(2)
    assert job.members[0] == 1
    assert "rank 0 (host a) was lost: its connection to the driver ended" in job.lines[-1]


def test_a_world_never_has_a_worker_whose_connection_has_ended() -> None:
    job = running({"a": 3}, num_proc=3)
    job.busy.add(0)
    job.kill(2)
    job.event("worker_closed", 1)
    job.ready(0)
    assert len(job.worlds) == 1
    job.kill(1)
    assert job.members == [0]


def test_a_rank_that_leaves_its_world_takes_the_others_along() -> None:
    job = running({"a": 3}, num_proc=3)
    job.ready(1)
    assert job.processes[0].last("regroup") is None  # who was lost may be known soon
    job.wait(0.1)
    assert job.processes[0].last("regroup") == [
        "regroup", 1, "rank 1 (host a) has left the world: it lost a peer", None
    ]  # fmt: skip
    assert job.worlds[-1] == [2, [0, 1, 2], 0, [], 4]


def test_ranks_that_all_leave_their_world_wait_for_nobody() -> None:
    """An error of the script on all ranks: nobody was lost, so there is nothing to learn of."""
    job = running({"a": 3}, num_proc=3)
    for number in (1, 0):
        job.ready(number)
        assert len(job.worlds) == 1
    job.ready(2)
    assert job.worlds[-1] == [2, [0, 1, 2], 0, [], 4]
    assert [process.last("regroup") for process in job.processes.values()] == [None] * 3
    assert job.lines[-1].startswith("no rank was lost, but all had an error; ")


def test_a_rank_that_may_mean_an_older_world_is_waited_for() -> None:
    """It has said so before it has seen the world that runs, which it then enters."""
    job = running({"a": 2}, num_proc=2)
    job.processes[1].epoch = 0
    job.ready(1)
    job.ready(0)
    assert len(job.worlds) == 1
    job.wait(2)
    assert len(job.worlds) == 2


def test_a_rank_that_leaves_its_world_before_its_peer_is_known_to_be_lost() -> None:
    job = running({"a": 3}, num_proc=3)
    job.ready(1)
    job.kill(2)
    assert job.processes[0].last("regroup")[3] == 2  # type: ignore[index]
    assert job.members == [0, 1]


def test_no_rank_raises_where_another_has_gone_back_to_its_commit() -> None:
    job = running({"a": 2, "b": 1}, num_proc=3)
    job.busy.add(0)
    job.discover({"a": 2})
    raised = job.processes[0].last("raise")
    assert raised is not None
    job = running({"a": 2, "b": 1}, num_proc=3)
    job.driver.discovered({"a": 2}, now=job.now)
    job.ready(1)  # its peer was lost before the notice came
    assert job.processes[0].last("raise") is None
    job.wait(0.1)
    assert job.members == [0, 1]


def test_a_late_worker_is_named() -> None:
    job = running({"a": 3, "b": 1}, num_proc=4)
    job.busy.add(1)
    job.kill(3)
    job.wait(25)
    late = "the next world waits for workers that have not said ready: rank 1 (host a)"
    assert job.lines[-2:] == [late, late]
    job.ready(1)
    assert job.members == [0, 1, 2]


# -- who holds the state


def test_the_state_comes_from_the_highest_commit_of_the_lowest_rank() -> None:
    job = running({"a": 4}, num_proc=4)
    for number in (1, 2):
        job.processes[number].commit = 5
    job.kill(3)
    assert job.worlds[-1] == [2, [0, 1, 2], 1, [0], 5]


def test_a_newcomer_without_the_state_is_never_its_source() -> None:
    job = running({"a": 2}, num_proc=2)
    job.busy.add(1)
    job.kill(0)
    job.ready(2, commit=99)
    job.kill(1)
    code, sentence = finished(job)
    assert code == 137
    assert "no rank of world 1 is left" in sentence


def test_the_only_worker_with_the_state_returns() -> None:
    job = running({"a": 2}, num_proc=2)
    job.busy.add(0)
    job.kill(1)
    job.end(0, 0)
    code, sentence = finished(job)
    assert code == 137
    assert "rank 1 (host a[1]) was lost" in sentence


# -- returns


def test_an_early_return_is_told_and_kept() -> None:
    job = running({"a": 3}, num_proc=3, min_np=3)
    job.end(0, 0)
    assert job.finish is None
    job.ready(1)  # its peer has gone
    job.wait(0.1)
    assert job.members == [1, 2]
    assert "rank 0 (host a) was done, and kept" in job.lines[-1]
    job.return_all()
    assert job.finish is not None
    assert (job.finish.code, job.finish.results) == (0, (0, 1, 2))


def test_a_return_does_not_hide_a_failure() -> None:
    job = running({"a": 2}, num_proc=2)
    job.end(0, 0)
    job.end(1, 9)
    assert finished(job)[0] == 9


def test_workers_that_return_without_ever_calling_init_succeed() -> None:
    job = Simulation(num_proc=2)
    job.slow_workers = True
    job.discover({"a": 2})
    job.end(1, 0)
    assert job.finish is None
    job.end(0, 0)
    assert job.finish is not None
    assert (job.finish.code, job.finish.results) == (0, (0, 1))


def test_all_workers_fail_before_the_first_world() -> None:
    job = Simulation(num_proc=2)
    job.slow_workers = True
    job.discover({"a": 2})
    job.end(1, 1, "SyntaxError: invalid syntax")
    assert job.finish is None
    job.end(0, 1, "SyntaxError: invalid syntax")
    code, sentence = finished(job)
    assert code == 1
    assert "could not start" in sentence
    assert "SyntaxError" in sentence


def test_a_worker_that_fails_before_the_first_world_is_replaced() -> None:
    job = Simulation(num_proc=2)
    job.slow_workers = True
    job.discover({"a": 2})
    job.hello(0)
    job.kill(1)
    job.hello(2)
    assert job.members == [0, 2]


def test_a_host_without_workers_before_the_first_world_is_left_out() -> None:
    """One host's workers fail before they are ready: the others' ranks move down."""
    job = Simulation(num_proc=4, min_np=2, failures_by_host=True)
    job.slow_workers = True
    job.discover({"a": 2, "b": 2})
    job.end(0, 1)
    job.hello(2)
    job.hello(3)
    assert job.worlds[-1] == [1, [2, 3], 0, [1], 0]


def test_stop() -> None:
    job = running({"a": 2})
    job.event("stop", 130, "interrupted by Ctrl-C")
    assert finished(job) == (130, "interrupted by Ctrl-C")
    # The launcher says it, and not each worker.
    assert job.processes[0].last("end") == ["end", 130, ""]
    job.kill(0)  # says nothing any more
    assert job.driver.due() is None


def test_bodies_of_a_round_come_in_rank_order() -> None:
    job = running({"a": 3}, num_proc=3)
    job.kill(0)
    job.event("worker_said", 2, ["gather", 2, 0, b"two"])
    job.event("worker_said", 2, ["gather", 2, 1, b"later"])
    job.event("worker_said", 1, ["gather", 1, 0, b"of the old world"])
    assert job.processes[1].last("bodies") is None
    job.event("worker_said", 1, ["gather", 2, 0, b"one"])
    assert job.processes[1].last("bodies") == ["bodies", 2, 0, [b"one", b"two"]]
    assert job.processes[2].last("bodies") == ["bodies", 2, 0, [b"one", b"two"]]
    job.event("worker_said", 1, ["gather", 2, 1, b"first"])
    assert job.processes[2].last("bodies") == ["bodies", 2, 1, [b"first", b"later"]]


def test_the_interrupt_is_in_the_first_check_that_nobody_has_passed() -> None:
    job = running({"a": 3}, num_proc=3)
    for number, passed in zip(range(3), (7, 9, 8), strict=True):
        job.processes[number].checks = passed
    job.discover({"a": 2})
    assert [job.processes[number].last("raise") for number in range(3)] == [["raise", 2, 10, 1]] * 3


def test_nobody_holds_the_last_commit() -> None:
    job = running({"a": 2}, num_proc=2)
    job.kill(0)
    job.newcomers_ready()
    job.pass_checks()
    assert job.worlds[-1][1:4] == [[1, 2], 0, [1]]
    job.processes[2].commit = 0  # its source dies before it has received anything
    job.kill(1)
    code, sentence = finished(job)
    assert code == 137
    assert "nobody holds the last commit (number 4) any more" in sentence
    assert "rank 0 (host a[1]) was lost: killed by signal 9 (exit code 137)" in sentence


def test_a_newcomer_cannot_claim_a_commit() -> None:
    job = running({"a": 2}, num_proc=2)
    job.kill(0)
    job.ready(2, commit=99)
    job.pass_checks()
    assert job.worlds[-1][1:] == [[1, 2], 0, [1], 4]


def test_a_loss_on_a_host_that_was_removed_is_no_failure_of_it() -> None:
    job = running({"a": 2, "b": 2}, num_proc=4, failures_by_host=True)
    job.discover({"a": 2})
    job.kill(2)
    assert job.members == [0, 1]
    job.end(3, 0)
    job.discover({"a": 2, "b": 2})
    job.newcomers_ready()
    job.pass_checks()
    assert job.hosts == "aabb"


def test_a_slot_is_free_when_its_process_has_ended() -> None:
    job = running({"a": 2}, num_proc=2)
    job.discover({"a": 1})
    job.pass_checks()
    job.discover({"a": 2})
    assert sorted(job.processes) == [0, 1]
    job.end(1, 0)
    assert job.processes[2].start.slot == 1


def test_a_lost_host_that_is_tried_again_is_no_capacity() -> None:
    job = running({"a": 1, "b": 1}, min_np=2, elastic_timeout=10, start_timeout=4)
    job.lose_host("b")
    job.slow_hosts.add("b")
    job.wait(10.1)
    assert "1 slot missing (1 of 2 are there) for 10 s" in finished(job)[1]


def test_nobody_is_taken_in_when_ranks_have_begun_to_return() -> None:
    job = running({"a": 2}, num_proc=2)
    job.discover({"a": 2, "b": 1})
    job.end(0, 0)
    job.newcomers_ready()
    job.wait(5)
    assert job.processes[1].last("notice") is None
    job.end(1, 0)
    assert job.finish is not None
    assert job.finish.results == (0, 1)
    assert job.processes[2].last("end") == ["end", 0, "the job has ended"]
