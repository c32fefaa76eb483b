"""The driver of elastic jobs: who holds the state, and workers that return."""

from __future__ import annotations

from typing import Any

import pytest

from tests.elastic_driver import grow, results_of, waiting_for_hello
from tests.simulation.elastic.by_hand import JobByHand, finished, running


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


@pytest.mark.parametrize(
    ("done", "who"), [([0], "rank 0 is"), ([0, 2], "ranks 0, 2 are"), ([0, 1], "ranks 0-1 are")]
)
def test_the_end_names_who_was_done_and_who_was_lost_after_that(done: list[int], who: str) -> None:
    job = running({"a": len(done) + 1})
    for number in done:
        job.end(number, 0)
    (last,) = set(job.members) - set(done)
    job.kill(last)
    assert finished(job) == (
        137,
        f"no rank of world 1 is left: {who} done, as the script has ended there; rank {last} (host "
        f"a[{last}]) was lost: killed by signal 9 (exit code 137), before the script had ended "
        "there, and nobody is left that could go on instead",
    )


def test_an_early_return_is_told_and_kept() -> None:
    job = running({"a": 3}, num_proc=3, min_np=3)
    job.end(0, 0)
    assert job.finish is None
    job.ready(1)  # its peer has gone
    job.wait(0.1)
    assert job.members == [1, 2]
    assert "rank 0 (host a) was done, and kept" in job.lines[-1]
    job.return_all()
    assert results_of(job) == (0, (0, 1, 2))


def test_a_return_does_not_hide_a_failure() -> None:
    job = running({"a": 2}, num_proc=2)
    job.end(0, 0)
    job.end(1, 9)
    assert finished(job)[0] == 9


def test_workers_that_return_without_ever_calling_init_succeed() -> None:
    job = waiting_for_hello({"a": 2})
    job.end(1, 0)
    assert job.finish is None
    job.end(0, 0)
    assert results_of(job) == (0, (0, 1))


def test_all_workers_fail_before_the_first_world() -> None:
    job = waiting_for_hello({"a": 2})
    job.end(1, 1, "SyntaxError: invalid syntax")
    assert job.finish is None
    job.end(0, 1, "SyntaxError: invalid syntax")
    code, sentence = finished(job)
    assert code == 1
    assert "could not start" in sentence
    assert "SyntaxError" in sentence


def test_a_worker_that_fails_before_the_first_world_is_replaced() -> None:
    job = waiting_for_hello({"a": 2})
    job.hello(0)
    job.kill(1)
    job.hello(2)
    assert job.members == [0, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_workers_that_are_killed_before_the_first_world_are_all_replaced(size: int) -> None:
    job = waiting_for_hello({"a": size})
    for number in range(size):
        job.kill(number)
    assert job.finish is None
    for number in range(size, 2 * size):
        job.hello(number)
    assert job.members == [*range(size, 2 * size)]


def test_workers_that_are_killed_again_and_again_before_the_first_world_end_the_job() -> None:
    job = waiting_for_hello({"a": 1})
    for number in range(3):
        job.wait(5)
        job.kill(number)
    code, sentence = finished(job)
    assert (code, "could not start" in sentence) == (137, True)


# -- workers that are killed when they are done


def say_bye(job: JobByHand, *numbers: int) -> None:
    for number in numbers:
        job.event("worker_said", number, ["bye"])
        job.event("worker_closed", number)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("limits", [{}, {"reset_limit": 0}])
def test_a_rank_that_is_killed_when_it_is_done(limits: dict[str, Any], first: bool) -> None:
    job = running({"a": 2, "b": 1}, num_proc=3, **limits)
    job.slow_workers = True
    job.busy = {0, 1, 2}
    say_bye(job, *((1,) if first else (0, 1, 2)))
    if first and not limits:
        job.kill(1)
        job.return_all([0, 2])
    else:
        job.return_all([0, 2])
        job.kill(1)
    assert results_of(job) == (0, (0, 1, 2))
    assert (
        "host a[1]) was lost: killed by signal 9 (exit code 137) after its script was done"
        in job.lines[-1]
    )


@pytest.mark.parametrize(
    ("code", "cause"), [(139, "killed by SIGSEGV"), (1, "OSError: no space"), (3, None)]
)
def test_a_rank_that_fails_by_itself_when_it_is_done(code: int, cause: str | None) -> None:
    """What a script says with its exit code counts, and so does a crash."""
    job = running({"a": 2})
    say_bye(job, 0, 1)
    job.return_all([0])
    job.end(1, code, cause)
    assert finished(job)[0] == code


def test_a_rank_that_is_killed_before_it_is_done() -> None:
    job = running({"a": 2})
    job.slow_workers = True
    say_bye(job, 0)
    job.return_all([0])
    job.kill(1)
    assert finished(job)[0] == 137


def test_a_host_that_is_lost_when_its_ranks_are_done() -> None:
    job = running({"a": 1, "b": 1}, num_proc=2)
    say_bye(job, 0, 1)
    job.return_all([0])
    job.lose_host("b")
    assert results_of(job) == (0, (0, 1))


def test_a_host_without_workers_before_the_first_world_is_left_out() -> None:
    """One host's workers fail before they are ready: the others' ranks move down."""
    job = JobByHand(num_proc=4, min_np=2, failures_by_host=True)
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
    grow(job)
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
    grow(job)
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
    job = running({"a": 1, "b": 1}, min_np=2, elastic_timeout=10)
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
