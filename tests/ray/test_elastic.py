"""Elastic jobs on a real Ray: actors that die, nodes that come and go, and the end of the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvdlite.ray import RayExecutor
from tests.elastic_programs import check_results, train, wait_for_world
from tests.ray.conftest import CORES, STORE_BYTES

ray: Any = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(120)]
SETTINGS = RayExecutor.create_settings(placement_group_timeout_s=60)


class Running:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Return what the call has returned, or raise what it has raised."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


@contextmanager
def training(folder: Path, **arguments: Any) -> Iterator[Running]:
    """Train on an elastic executor; at the end, the training ends, too."""
    executor = RayExecutor(SETTINGS, **arguments)
    executor.start()
    running = Running(lambda: executor.run(train, args=[str(folder)]))
    try:
        yield running
    finally:
        (folder / "end").touch()
        running._thread.join(60)
        executor.shutdown()


@contextmanager
def node(cluster: Any, cores: int) -> Iterator[Any]:
    """A further node of the cluster."""
    added = cluster.add_node(num_cpus=cores, object_store_memory=STORE_BYTES)
    try:
        yield added
    finally:
        if added in cluster.list_all_nodes:
            cluster.remove_node(added)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_actor_is_replaced(tmp_path: Path, rank: int) -> None:
    with training(tmp_path, min_workers=1) as job:
        first = wait_for_world(tmp_path, CORES)
        first[rank].kill()
        again = wait_for_world(tmp_path, CORES, first[0].epoch)
        assert again[0].pid == first[1 - rank].pid and again[1].pid != first[rank].pid
        (tmp_path / "end").touch()
        check_results(job.result(), CORES)
