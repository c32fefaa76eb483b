"""Sessions of Spark for the tests of this folder; one at a time in a process."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.jobs import environment

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # By default Spark looks for free slots every 15 s; executors need some seconds to come, and on
    # a busy machine half a minute.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "120",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}


def need_spark() -> None:
    """Skip the test where Spark cannot run."""
    pytest.importorskip("pyspark", reason="the extra 'spark' is not installed")
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        pytest.skip("Spark needs Java, and there is none")


@contextmanager
def session(master: str, **settings: str) -> Iterator[Any]:
    """Yield a SparkContext, whose executors run this Python."""
    need_spark()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]  # processes of torchrun import tests
    conf = SparkConf().setMaster(master).setAppName("hvdlite's tests")
    conf.setAll(list({**SETTINGS, **settings}.items()))
    spark = SparkSession(SparkContext(conf=conf))  # its builder would keep settings for the next
    spark.sparkContext.setLogLevel("FATAL")
    try:
        yield spark.sparkContext
    finally:
        spark.stop()


def wait_for_ends(*processes: int) -> None:
    """Wait until these processes have ended, though nobody may have taken note of it."""
    end = time.monotonic() + 30
    while any(_is_alive(process) for process in processes):
        assert time.monotonic() < end, processes
        time.sleep(0.05)


def _is_alive(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
