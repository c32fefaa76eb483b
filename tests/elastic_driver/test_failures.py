"""Workers and hosts fail while a job runs."""

from __future__ import annotations

import pytest

from hvdlite.launcher.decisions.commands import READY, WAIT
from hvdlite.launcher.decisions.failures import Failures, SlotFailure
from tests.elastic_driver import grow, results_of, waiting_for_hello
from tests.simulation.elastic.by_hand import JobByHand, finished, running


def abc(**plan: object) -> JobByHand:
    """Hosts A, B, C with 2 slots each; a failure excludes its host."""
    plan = {"num_proc": 4, "min_np": 2, "failures_by_host": True, **plan}
    return running({"a": 2, "b": 2, "c": 2}, **plan)


def test_a_lost_host_is_excluded_like_one_whose_worker_has_failed() -> None:
    job = abc()
    job.lose_host("b")
    job.wait(10000)
    assert job.hosts == "aacc" and "b" not in job.agents


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
    assert results_of(job) == (0, (0, 1, 4, 5))


@pytest.mark.parametrize("hosts", [{"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 3}])
@pytest.mark.parametrize("lost", [(2, 1), (1, 0, 2)])
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
        if job.processes[number].lives:
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
        job.kill(next(each.number for each in job.on("b") if each.lives))
        assert "host b is given up for 2 s: one of its workers failed" in job.lines[-2:]
        assert set(job.hosts) == {"a", "c"}
        job.wait(1.9)
        assert "b" not in job.agents
        job.wait(0.2)
        assert job.processes[0].last("seen") is not None
        grow(job)
        assert job.hosts == "aaccbb"  # its last assignment was without it
        assert job.members[0] == 0
        assert len(job.worlds) == 3 + 2 * round_


def test_a_host_that_fails_again_and_again_does_not_begin_the_elastic_timeout_anew() -> None:
    job = abc(min_np=5, elastic_timeout=7, cooldown=(2, 2))
    began = job.now
    while job.finish is None and job.now < began + 60:
        if alive := [each.number for each in job.on("b") if each.lives]:
            job.kill(alive[0])  # With it the host is given up.
        job.wait(0.5)
    code, sentence = finished(job)
    assert code == 1 and "missing (4 of 5 are there) for 7 s (--elastic-timeout)" in sentence
    assert job.now <= began + 7 + 2 + 1


def test_a_newcomer_is_not_rank_0_where_the_last_rank_of_the_first_host_has_died() -> None:
    """It was to come at the next commit, in the place of a rank that had died before."""
    job = running({"a": 2, "b": 1}, num_proc=3)
    job.kill(1)
    job.newcomers_ready()
    job.kill(0)
    assert (job.members, job.hosts) == ([2, 3], "ba")
    grow(job)
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
    job.wait(3)
    grow(job)
    assert job.hosts == "dabc"
    assert job.worlds[-1][2:] == [0, [1, 2, 3], 4]


def test_a_lost_host_is_tried_again_ever_later() -> None:
    job = running({"a": 1, "b": 2}, num_proc=3)
    job.lose_host("b")
    assert "ranks 1-2 (host b) were lost: its host was lost: no sign of life" in "".join(job.lines)
    job.slow_hosts.add("b")
    for delay in (2.4, 2, 4):
        assert "b" not in job.driver._hosts.coming()
        job.wait(delay)
        assert "b" in job.driver._hosts.coming()
        job.lose_host("b", "ssh: no route to host")


@pytest.mark.parametrize(
    ("came", "ended", "delay"), [(True, False, 85.0), (True, True, 1.0), (False, False, 1.0)]
)
def test_only_where_workers_may_still_run_is_a_host_left_for_long(
    came: bool, ended: bool, delay: float
) -> None:
    job = running({"a": 1}, num_proc=1, host_timeout_seconds=60.0)
    job.slow_hosts.add("b")
    job.discover({"a": 1, "b": 1})
    if came:
        job.agent("b")
    job.drop_agent("b")
    job.event("agent_lost", "b", "ssh: connection refused", True, ended=ended)
    job.wait(delay - 0.1)
    assert "b" not in job.driver._hosts.coming()
    job.wait(0.2)
    assert "b" in job.driver._hosts.coming()


def test_a_host_that_cannot_return_is_given_up() -> None:
    job = running({"a": 1, "b": 2}, num_proc=3)
    job.lose_host("b", "its Spark task has failed", back=False)
    assert "host b is given up for good: its Spark task has failed" in job.lines
    job.wait(10000)
    assert (job.hosts, job.agents) == ("a", {"a"})


def test_a_host_that_is_refused_at_the_start_says_why_once() -> None:
    job = waiting_for_hello({"a": 4})
    why = "it cannot start its ranks: too few devices"
    job.lose_host("a", why, back=False)
    assert job.lines == [f"host a is given up for good: {why}"]
    code, sentence = finished(job)
    assert code == 1
    assert sentence == (
        f"the job could not start: 4 workers (host a[0-3]) were lost: its host was lost: {why}"
    )


@pytest.mark.parametrize("admit", [READY, WAIT])
def test_slots_for_which_a_host_has_no_device_end_no_rank(admit: str) -> None:
    job = running({"a": 2}, admit=admit)
    job.slow_workers = True
    job.discover({"a": 4})
    why = "the rank with local rank 2 needs device 2"
    for number in (2, 3):
        job.processes[number].lives = False
        job.event("worker_refused", number, why)
    job.pass_checks()
    assert [job.processes[number].lives for number in job.members] == [True, True]
    assert (job.members, job.hosts, job.agents) == ([0, 1], "aa", {"a"})
    job.wait(1000)
    assert job.lines.count(f"host a is used with 2 slots at most from now on: {why}") == 1
    assert sum(why in line for line in job.lines) == 1
    assert sorted(job.processes) == [0, 1, 2, 3]  # No other worker was tried.
    job.slow_workers = False
    job.kill(1)
    grow(job)
    assert (job.members, job.processes[4].slot) == ([0, 4], 1)
    job.return_all()
    assert finished(job) == (0, "")


def test_a_host_that_has_no_device_for_its_first_workers_is_given_up() -> None:
    job = running({"a": 2})
    job.slow_workers = True
    job.discover({"a": 2, "b": 2})
    for process in job.on("b"):
        process.lives = False
    job.event("worker_refused", 2, "too few devices")
    why = "it cannot start its ranks: too few devices"
    assert job.lines[-1] == f"host b is given up for good: {why}"
    job.wait(1000)
    assert (job.hosts, job.agents, sorted(job.processes)) == ("aa", {"a"}, [0, 1, 2, 3])


def test_a_slot_that_fails_twice_is_named_once() -> None:
    job = running({"a": 1})
    job.discover({"a": 2})
    for number in (1, 2):
        job.end(number, 1, "ValueError: no data")
        job.wait(2)
    job.kill(0)
    lost = "2 workers (host a[1]) were lost: ValueError: no data (exit code 1)"
    assert lost in finished(job)[1]


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
    grow(job)
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


@pytest.mark.parametrize(("commits", "seconds"), [(2, 0), (0, 61)])
def test_newcomers_that_always_fail_come_ever_later_although_the_others_commit(
    commits: int, seconds: float
) -> None:
    """One commit of the others in such a world is no progress: they hear of the failure after.

    What ends it are more commits, or a minute without a failure.
    """
    job = running({"a": 2}, num_proc=2)
    alone = job.processes[0]
    for delay in (0, 1, 2, 4, 8, 16, 30, 30, 30):
        alone.commit += 1
        started = len(job.processes)
        job.kill(job.members[1])
        if delay:
            job.wait(delay - 0.1)
            assert len(job.processes) == started
            job.wait(0.2)
        assert len(job.processes) == started + 1
        alone.commit += 1
        grow(job)
        assert len(job.members) == 2
    alone.commit += commits
    job.wait(seconds)
    job.kill(job.members[1])
    assert len(job.processes) == started + 2


def test_a_slot_that_fails_all_day_is_still_tried_again() -> None:
    failures = Failures()
    for hour in range(24):
        for now in range(hour * 3600, (hour + 1) * 3600, 30):
            failures.add(SlotFailure("a", 0, 1, now, was_member=True, exception=False))
        assert failures.retry_time("a", 0, now) == now + 30


def test_a_slot_in_whose_world_was_progress_is_tried_at_once() -> None:
    job = running({"a": 3}, num_proc=3)
    for commit in range(6, 46, 2):
        job.kill(job.members[-1])
        grow(job)
        job.commit(commit)
        job.wait(1.1)
        grow(job)
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
        job.kill(next(each.number for each in job.on("b") if each.lives))
        job.wait(8.1)
        grow(job)
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
        grow(job)
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
        grow(job)
        job.commit(commit + 100)
    assert job.finish is None


def leave_by_error(job: JobByHand, numbers: list[int], *, whole: bool = True) -> None:
    """Let ranks leave their world by errors; where it was `whole`, the first one is the script's.

    Nobody was lost.
    """
    if whole:
        text = "HorovodInternalError: bad batch 17"
        job.event("worker_said", numbers[0], ["error", job.worlds[-1][0], text])
    for number in numbers:
        job.ready(number)
    job.wait(0.1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_errors_that_break_world_after_world_without_a_loss_end_the_job(ranks: int) -> None:
    job = running({"a": 3}, num_proc=3)
    for epoch in (1, 2, 3, 4):
        assert (job.worlds[-1][0], job.finish) == (epoch, None)
        leave_by_error(job, job.members[-ranks:])
    code, sentence = finished(job)
    assert code == 1
    first = f"rank {3 - ranks} (host a) raised HorovodInternalError: bad batch 17"
    resets = "the script failed again after 3 resets without a new commit"
    assert sentence == f"{resets}: no rank was lost, but {first}"


def test_a_network_that_breaks_world_after_world_ends_no_job() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2)
    for epoch in range(1, 21):
        leave_by_error(job, job.members, whole=epoch == 1)
    assert (job.worlds[-1][0], job.finish) == (21, None)


def test_errors_without_a_loss_and_with_commits_in_between_end_no_job() -> None:
    job = running({"a": 2}, num_proc=2)
    for commit in range(5, 15):
        leave_by_error(job, job.members)
        job.commit(commit)
    assert (job.worlds[-1][0], job.finish) == (11, None)


def test_ranks_that_lose_their_peers_by_early_returns_end_no_job() -> None:
    job = running({"a": 8}, num_proc=8)
    while len(job.members) > 1:
        job.end(job.members[-1], 0)
        leave_by_error(job, job.members[:1])
    job.return_all()
    assert finished(job) == (0, "")


def test_a_host_that_was_silent_is_used_again_when_its_workers_have_ended() -> None:
    """Its agent may find later than the launcher that it was cut off, and lets them end."""
    job = running({"a": 1, "b": 1}, num_proc=2, host_timeout_seconds=10.0)
    job.lose_host("b")
    job.wait(14.9)
    assert len(job.processes) == 2
    job.wait(0.2)
    assert job.processes[2].host == "b"
