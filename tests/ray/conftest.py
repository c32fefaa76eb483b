"""A Ray cluster of two cores for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

CORES = 2


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A cluster in this process's children, which ends with the tests; its GPUs are but names."""
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=CORES,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
