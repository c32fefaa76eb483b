"""Worlds that lose and gain workers, as processes; sums are compared with the workers' numbers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.fake_driver import STOP
from tests.elastic.workers import Line, Workers, job

pytestmark = pytest.mark.timeout(120)

MODULE = "worker_allreduce"
# From a kill to the end of the first allreduce of the next world, on a busy machine.
RECOVERY_SECONDS = 4.0  # Alone it takes tenths of one; no wait may have run out.


def in_world(epoch: int, step: int = 0) -> Callable[[Line], bool]:
    return lambda line: line.get("epoch") == epoch and line.get("step", -1) >= step


def check_sums(workers: Workers, number: int) -> None:
    """Every sum is that of the members of its world."""
    for line in workers.lines(number):
        if "step" in line and "sum" in line:
            members = workers.driver.worlds[line["epoch"]]
            expected = sum(each + 1 for each in members) * (line["step"] % 100 + 1)
            assert line["sum"] == expected, line
            assert members[line["rank"]] == number


def stop(workers: Workers, *killed: int) -> None:
    """End the job at the next check: all workers that were not killed end well."""
    workers.driver.notice(STOP)
    for number, code in workers.codes().items():
        if number not in killed:
            assert code == 0, workers.output(number)
            check_sums(workers, number)
            assert "Traceback" not in workers.output(number)


@pytest.mark.parametrize(
    ("victim", "hosts"),
    [
        *((0, "a,b,b"), (1, ""), (2, "a,b,b")),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in [(0, ""), (1, "a,b,b"), (2, "")]),
    ],
)
def test_survivors_go_on_when_any_rank_is_killed(tmp_path: Path, victim: int, hosts: str) -> None:
    survivors = [number for number in range(3) if number != victim]
    with job(tmp_path, 3, MODULE, hosts=hosts, ELEMENTS="200000") as workers:
        for number in range(3):
            workers.wait_for(number, in_world(1, step=5))
        workers.driver.size = 1
        killed_at = workers.kill(victim)
        for number in survivors:
            first = workers.wait_for(number, in_world(2))
            assert first["time"] - killed_at < RECOVERY_SECONDS
            error = workers.wait_for(number, lambda line: "error" in line)
            assert error["at_fault"] == victim
        assert workers.driver.worlds[2] == tuple(survivors)
        stop(workers, victim)


def test_down_to_one_rank_and_up_again(tmp_path: Path) -> None:
    with job(tmp_path, 3, MODULE, forked=False) as workers:
        workers.driver.size = 1
        for epoch, victim in enumerate((1, 0), start=1):
            workers.wait_for(2, in_world(epoch))
            workers.kill(victim)
        workers.wait_for(2, in_world(3, step=10))
        assert workers.driver.worlds[3] == (2,)
        workers.driver.admits = False
        workers.start(3, MODULE)
        waiting = workers.wait_for(3, lambda line: "waiting" in line)
        assert waiting["waiting"] == [1, 2, 2]
        assert "function that hvd.elastic.run decorates" in waiting["error"]
        workers.driver.wait_for(lambda: 3 in workers.driver.commits)
        workers.driver.notice(2)
        for number in (2, 3):
            first = workers.wait_for(number, in_world(4))
        assert first["imported"] == []  # The others do not wait for imports of a newcomer.
        assert workers.driver.worlds[4] == (2, 3)
        stop(workers, 0, 1)


@pytest.mark.parametrize(
    ("hosts", "elements"),
    [("", "1000"), ("a,b,b", "200000"), pytest.param("a,b,c", "9", marks=pytest.mark.soak)],
)
def test_the_loss_of_a_silent_rank_ends_all_waits_for_it(
    tmp_path: Path, hosts: str, elements: str
) -> None:
    with job(tmp_path, 3, MODULE, hosts=hosts, ELEMENTS=elements) as workers:
        for number in range(3):
            workers.wait_for(number, in_world(1, step=5))
        os.kill(workers.processes[1].pid, signal.SIGSTOP)
        before = [len(workers.lines(number)) for number in (0, 2)]
        time.sleep(0.3)  # All others wait for the stopped one meanwhile.
        assert [len(workers.lines(number)) for number in (0, 2)] <= [each + 3 for each in before]
        workers.driver.size = 1
        given_up_at = time.monotonic()
        workers.driver.give_up(1)
        for number in (0, 2):
            first = workers.wait_for(number, in_world(2))
            assert first["time"] - given_up_at < RECOVERY_SECONDS
        workers.driver.hang_up(1)
        os.kill(workers.processes[1].pid, signal.SIGCONT)
        assert workers.processes[1].wait(20) == 1  # the limit of a hang
        assert workers.output(1).count("this worker ends") == 1
        stop(workers, 1)


@pytest.mark.parametrize(
    "answered", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (0, 2))]
)
def test_a_death_while_the_ranks_of_a_world_meet(tmp_path: Path, answered: int) -> None:
    with job(tmp_path, 3, MODULE) as workers:
        driver = workers.driver
        workers.wait_for(0, in_world(1, step=3))
        driver.size, driver.silent_from = 1, (2, answered)
        driver.notice(2)
        driver.wait_for(lambda: (2, answered) in driver.pending_rounds())
        killed_at = workers.kill(2)
        for number in (0, 1):
            first = workers.wait_for(number, in_world(3))
            assert first["time"] - killed_at < RECOVERY_SECONDS
        stop(workers, 2)


def test_only_an_error_that_breaks_a_whole_world_is_told(tmp_path: Path) -> None:
    """That of a rank whose peer was killed is no error of the script."""
    with job(tmp_path, 2, "worker_errors") as workers:
        driver = workers.driver
        driver.size = 1
        workers.wait_for(0, lambda line: line["size"] == 2)
        workers.kill(1)
        told = ["error", 2, "HorovodInternalError: by the script"]
        driver.wait_for(lambda: (0, told) in driver.messages)
        assert [each for _, each in driver.messages if each[0] == "error"] == [told]


def test_the_end_of_the_driver_ends_the_workers(tmp_path: Path) -> None:
    with job(tmp_path, 2, MODULE) as workers:
        workers.wait_for(0, in_world(1, step=3))
        workers.driver.close()
        assert workers.codes() == {0: 1, 1: 1}
        for number in (0, 1):
            assert workers.output(number).count("this worker ends") == 1
            assert "Traceback" not in workers.output(number)


@pytest.mark.parametrize(
    ("hosts", "resets"),
    [("a,b", 100), pytest.param("", 300, marks=pytest.mark.soak)],
)
def test_resets_leave_nothing_behind(tmp_path: Path, hosts: str, resets: int) -> None:
    """Every second world breaks, the others are left in order."""
    with job(tmp_path, 2, "worker_resets", hosts=hosts) as workers:
        driver = workers.driver
        for epoch in range(1, resets + 1):
            for number in (0, 1):
                workers.wait_for(number, in_world(epoch, step=-1))
            if epoch % 2:
                driver.do(lambda: driver._regroup("nobody is lost", None))
            else:
                driver.notice(2)
        driver.wait_for_world(resets + 1)
        stop(workers)
        for number in (0, 1):
            held = {line["epoch"]: line for line in workers.lines(number)}
            # Memory of a peer is mapped when it is first needed, which costs two descriptors.
            for name, growth in (("descriptors", 4), ("threads", 0), ("resident_kib", 2048)):
                values = [held[epoch][name] for epoch in range(resets // 3, resets + 1)]
                assert max(values) - values[0] <= growth, (name, values)


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_rank_that_has_joined_takes_part_in_the_next_world(tmp_path: Path, victim: int) -> None:
    """Its calls without a name are counted anew, too: it has made none while others did."""
    with job(tmp_path, 3, "worker_join") as workers:
        workers.wait_for(0, lambda line: "joins" in line)
        workers.wait_for(victim, in_world(1, step=20))
        workers.driver.size = 1
        workers.kill(victim)
        error = workers.wait_for(0, lambda line: "error" in line)
        assert f"rank {victim} is gone" in error["error"] or "is lost" in error["error"]
        for number in {0, 1, 2} - {victim}:
            workers.wait_for(number, in_world(2))
        stop(workers, victim)


@pytest.mark.parametrize("busy", ["python", "system call"])
def test_the_end_of_the_driver_ends_workers_that_are_busy(tmp_path: Path, busy: str) -> None:
    with job(tmp_path, 2, "worker_busy", BUSY=busy) as workers:
        for number in (0, 1):
            workers.wait_for(number, in_world(1))
        began = time.monotonic()
        workers.driver.close()
        assert workers.codes() == {0: 1, 1: 1}
        assert time.monotonic() - began < 20  # They are busy for longer.
        for number in (0, 1):
            assert workers.output(number).count("this worker ends") == 1
            assert "Traceback" not in workers.output(number)
