"""The driver of elastic jobs: processes that take their time to end, or do not answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.elastic_driver import grow, waiting_for_hello
from tests.simulation.elastic.by_hand import JobByHand, finished, running


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
    grow(job)
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
    assert "ranks 0-1 (host a[0-1]) were lost: ValueError: bad batch" in sentence
    assert sentence.count(f"(exit code {code})") == 1


def test_a_host_that_is_given_up_by_an_exception_keeps_its_agent_for_the_traceback() -> None:
    job = running({"a": 2, "b": 2}, num_proc=4, failures_by_host=True)
    job.begin_to_raise(2)
    assert job.hosts == "aa"
    assert job.processes[3].ended == [True]
    assert "b" in job.agents
    job.kill(3)
    job.end_by_exception(2)
    assert "b" not in job.agents


@pytest.mark.parametrize("admit", ["ready", "wait"])
def test_a_worker_that_is_given_up_has_ended_before_another_takes_its_slot(admit: str) -> None:
    job = running({"a": 3}, num_proc=3, admit=admit)
    job.event("worker_lost", 1, "its process was stopped")
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
    grow(job)
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


@pytest.mark.parametrize("frame", [[], [[]], [None], ["hello"], ["late", 1, None], ["bye", 1]])
def test_a_frame_that_no_worker_sends_changes_nothing(frame: list[Any]) -> None:
    job = running({"a": 2}, num_proc=2)
    job.event("worker_said", 1, frame)
    assert job.members == [0, 1]
    assert job.finish is None


def test_the_job_waits_for_the_end_of_a_worker_that_never_was_a_rank() -> None:
    job = waiting_for_hello({"a": 2})
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


def leave(job: JobByHand, number: int) -> None:
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


def test_a_worker_that_is_killed_after_its_bye_is_named_as_done() -> None:
    job = running({"a": 2}, num_proc=2)
    job.busy.add(1)
    leave(job, 0)
    job.kill(0)
    job.kill(1)
    sentence = finished(job)[1]
    assert "rank 0 is done" in sentence and "rank 0 (host" not in sentence
    assert "rank 1 (host a[1]) was lost" in sentence


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
