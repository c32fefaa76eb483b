"""hvdlite.spark.run_elastic on a real Spark: ranks and tasks that die, and the end of the job."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hvdlite.spark
from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from tests.elastic_programs import Running, check_results, fail_again, train, wait_for_world
from tests.spark.sessions import session, wait_for_ends

pytest.importorskip("pyspark", reason="the extra 'spark' is not installed")
pytestmark = pytest.mark.timeout(240)
RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[Any]:
    with session("local[2,4]") as made:
        yield made


@contextmanager
def training(folder: Path, **arguments: Any) -> Iterator[Running]:
    """Train in Spark; at the end, the training ends, too."""
    running = Running(
        lambda: hvdlite.spark.run_elastic(train, (str(folder),), num_proc=RANKS, **arguments)
    )
    try:
        yield running
    finally:
        (folder / "end").touch()
        running.wait()


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_killed_rank_is_replaced_by_another_attempt(tmp_path: Path, rank: int) -> None:
    with training(tmp_path) as job:
        first = wait_for_world(tmp_path, RANKS)
        first[rank].kill()
        again = wait_for_world(tmp_path, RANKS, first[0].epoch)
        assert again[0].pid == first[1 - rank].pid and again[1].pid != first[rank].pid
        assert sorted(place.host for place in first) == ["task-0.0", "task-1.0"]
        assert again[1].host == first[rank].host.replace(".0", ".1")
        (tmp_path / "end").touch()
        check_results(job.result(), RANKS)


def kill_the_task(pid: int) -> None:
    """Kill Spark's Python process that has started a worker."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(fields[1]), signal.SIGKILL)


def test_a_killed_task_takes_its_rank_with_it_and_is_tried_again(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        first = wait_for_world(tmp_path, RANKS)
        kill_the_task(first[1].pid)
        again = wait_for_world(tmp_path, RANKS, first[0].epoch)
        assert again[0].pid == first[0].pid and again[1].pid != first[1].pid
        assert again[1].step <= again[0].step
        (tmp_path / "end").touch()
        check_results(job.result(), RANKS)
    wait_for_ends(first[1].pid)


def test_what_the_job_says_and_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with training(tmp_path, stdout=out, stderr=err, env={"MINE": "7"}) as job:
        first = wait_for_world(tmp_path, RANKS)
        first[1].kill()
        wait_for_world(tmp_path, RANKS, first[0].epoch)
        (tmp_path / "end").touch()
        job.result()
    printed = out.getvalue().splitlines()
    assert {"[0]<stdout>:begun with 7", "[1]<stdout>:begun with 7"} == {*printed}
    assert len(printed) == RANKS + 1
    assert "was lost: killed by SIGKILL" in capfd.readouterr().err


def test_an_exception_that_comes_again_and_again_is_raised_as_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        hvdlite.spark.run_elastic(fail_again, num_proc=RANKS)


def test_a_task_that_loses_its_worker_too_often_ends_the_job(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        place = wait_for_world(tmp_path, RANKS)[1]
        task = place.host.partition(".")[0]
        for attempt in range(4):
            place.kill()
            if attempt < 3:
                world = wait_for_world(tmp_path, RANKS, place.epoch)
                (place,) = (each for each in world if each.host.partition(".")[0] == task)
        with pytest.raises(HorovodInternalError, match=r"spark\.task\.maxFailures.*SIGKILL"):
            job.result()


def test_the_reset_limit_ends_the_job(tmp_path: Path) -> None:
    with training(tmp_path, reset_limit=1) as job:
        first = wait_for_world(tmp_path, RANKS)
        first[1].kill()
        again = wait_for_world(tmp_path, RANKS, first[0].epoch)
        again[1].kill()
        with pytest.raises(HorovodInternalError, match="number of resets exceeded limit 1"):
            job.result()


def wait_for_end(folder: str) -> Iterator[None]:
    """Keep a slot of Spark until the file `end` is there."""
    while not Path(folder, "end").exists():
        time.sleep(0.05)
    yield from ()


def test_missing_tasks_are_an_error_in_time(context: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    other = Running(
        context.parallelize(range(1), 1).mapPartitions(lambda _: wait_for_end(folder)).collect
    )
    try:
        with pytest.raises(TimeoutError, match=r"no room for 2 ranks .* in 1 s"):
            hvdlite.spark.run_elastic(os.getpid, num_proc=RANKS, start_timeout=1)
    finally:
        (tmp_path / "end").touch()
        other.wait()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_proc": 2, "min_num_proc": 1}, "min_num_proc=1: must equal num_proc=2"),
        ({"max_num_proc": 3}, "max_num_proc=3: must equal num_proc=2"),
        ({"num_proc": 0}, "at least one"),
        ({"num_proc": 3}, "has 2 slots"),
    ],
)
def test_arguments_that_can_never_work(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hvdlite.spark.run_elastic(os.getpid, **arguments)


def test_nothing_stays_after_a_job(context: Any) -> None:
    before = {thread.name for thread in threading.enumerate()}
    assert hvdlite.spark.run_elastic(add_ranks, min_num_proc=2, max_num_proc=2) == [1, 1]
    assert {thread.name for thread in threading.enumerate()} <= before
    assert context.parallelize(range(4), 2).map(lambda x: x + 1).sum() == 10


def add_ranks() -> int:
    """Return the sum of the ranks."""
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    return int(hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum)[0])
