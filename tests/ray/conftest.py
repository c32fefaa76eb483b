"""A Ray cluster of two cores for the tests of this folder, to which tests may add nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

CORES = 2
STORE_BYTES = 80_000_000


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster in this process's children, which ends with the tests; its GPUs are but names."""
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - By default all other tests come first.
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": CORES,
            "num_gpus": 4,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        },
    )
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
