"""The Slurm cluster of the tests of this folder: one for all of them, empty after each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.build import build
from tests.hosts.lab import CannotBuildError
from tests.hosts.slurm.cluster import Cluster, cluster, wait_until


@pytest.fixture(scope="package")
def slurm_cluster() -> Iterator[Cluster]:
    """A cluster of hosts of its own: Slurm's daemons would be in the way of other tests."""
    try:
        with cluster(build) as made:
            yield made
    except CannotBuildError as why:
        pytest.skip(f"no Slurm cluster: {why}")


@pytest.fixture
def slurm(slurm_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster without jobs; a test must leave none, and no process of a job on any host."""
    yield slurm_cluster
    left = slurm_cluster.forget_ended()
    slurm_cluster.cancel()
    assert left == []
    wait_until(lambda: slurm_cluster.left() == {}, "the end of all processes of jobs",
               lambda: str(slurm_cluster.left()))  # fmt: skip
