"""Sessions of Spark for the tests of this folder; one at a time in a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Spark looks for free slots 40 times, every 15 s, before it says that there are too few.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "2",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}


@contextmanager
def session(master: str) -> Iterator[Any]:
    """Yield a SparkContext, whose executors run this Python."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName("hvdlite's tests")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("FATAL")
    try:
        yield spark.sparkContext
    finally:
        spark.stop()
