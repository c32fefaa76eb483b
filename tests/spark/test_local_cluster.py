"""hvdlite.spark.run on executors that are processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hvdlite.spark
from hvdlite.common.base.errors import HorovodInternalError
from tests.cluster_programs import place, reduce, reduced, wait_for_others
from tests.spark.sessions import session

pytest.importorskip("pyspark", reason="the extra 'spark' is not installed")


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[Any]:
    with session("local-cluster[2,1,600]") as made:
        yield made


def test_the_ranks_reduce_and_do_so_again() -> None:
    assert hvdlite.spark.run(reduce, (1,), num_proc=2) == reduced(2, 1)
    assert hvdlite.spark.run(reduce, (4,), num_proc=2) == reduced(2, 4)


def test_an_exception_is_raised_as_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        hvdlite.spark.run(wait_for_others, num_proc=2)


def test_too_few_slots_are_an_error_in_time() -> None:
    with pytest.raises(TimeoutError, match=r"no room for 3 ranks .* in 1 s .* 2 slots"):
        hvdlite.spark.run(place, num_proc=3, start_timeout=1)


def kill_the_executor() -> None:
    """Kill the Java process above rank 1."""
    process = os.getpid() if os.environ["HVDLITE_RANK"] == "1" else 0
    while process and "java" not in Path(f"/proc/{process}/comm").read_text():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    if process:
        os.kill(process, signal.SIGKILL)
    signal.pause()


def test_a_lost_executor_ends_the_call_and_the_next_one_is_right() -> None:
    with pytest.raises(HorovodInternalError, match=r"Spark has lost a task .*ExecutorLostFailure"):
        hvdlite.spark.run(kill_the_executor, num_proc=2)
    assert hvdlite.spark.run(reduce, (1,), num_proc=2) == reduced(2, 1)
