"""Elastic jobs on a real Ray: actors that die, nodes that come and go, and the end of the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ray import ElasticRayExecutor, RayExecutor, ray_logger
from tests.elastic_programs import Running, check_results, fail_again, train, wait_for_world
from tests.ray.conftest import CORES, STORE_BYTES

ray: Any = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]
SETTINGS = RayExecutor.create_settings(placement_group_timeout_s=60)


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
        running.wait()
        executor.shutdown()


@contextmanager
def node(cluster: Any, cores: int) -> Iterator[Any]:
    """A further node of the cluster."""
    added = cluster.add_node(num_cpus=cores, object_store_memory=STORE_BYTES)
    try:
        yield added
    finally:
        if added in cluster.worker_nodes:
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


def test_a_node_that_comes_and_one_that_goes(cluster: Any, tmp_path: Path) -> None:
    with training(tmp_path, min_workers=1, max_workers=3) as job:
        first = wait_for_world(tmp_path, CORES)
        with node(cluster, 2):  # There is room for one worker more than the job may have.
            grown = wait_for_world(tmp_path, 3, first[0].epoch)
            assert [place.pid for place in grown[:2]] == [place.pid for place in first]
            assert grown[2].step >= first[0].step and grown[2].host != grown[0].host
        shrunk = wait_for_world(tmp_path, CORES, grown[0].epoch)
        assert [place.pid for place in shrunk] == [place.pid for place in first]
        (tmp_path / "end").touch()
        check_results(job.result(), CORES)


def test_a_call_leaves_the_cores_to_the_next_one(tmp_path: Path) -> None:
    for call in ("first", "second"):
        (tmp_path / call).mkdir()
        with training(tmp_path / call, min_workers=CORES) as job:
            wait_for_world(tmp_path / call, CORES)
            (tmp_path / call / "end").touch()
            check_results(job.result(), CORES)


@contextmanager
def started(**arguments: Any) -> Iterator[RayExecutor]:
    executor = RayExecutor(SETTINGS, **arguments)
    executor.start()
    yield executor
    executor.shutdown()


def test_an_exception_that_comes_again_and_again_is_raised_as_itself() -> None:
    with started(min_workers=2) as executor, pytest.raises(KeyError, match="mine"):
        executor.run(fail_again)


def test_the_reset_limit_ends_the_job(tmp_path: Path) -> None:
    with training(tmp_path, min_workers=2, reset_limit=1) as job:
        first = wait_for_world(tmp_path, CORES)
        first[1].kill()
        again = wait_for_world(tmp_path, CORES, first[0].epoch)
        again[1].kill()
        with pytest.raises(HorovodInternalError, match="number of resets exceeded limit 1"):
            job.result()


def test_too_little_room_ends_the_job_in_time() -> None:
    with (
        started(min_workers=CORES + 1, elastic_timeout=1) as executor,
        pytest.raises(HorovodInternalError, match=r"1 slot missing \(2 of 3 are there\) for 1 s"),
    ):
        executor.run(os.getpid)


def test_a_failure_excludes_its_host_for_the_time_of_its_cooldown(
    cluster: Any, tmp_path: Path
) -> None:
    with (
        node(cluster, 2),
        training(tmp_path, min_workers=1, max_workers=4, cooldown_range=[1, 2]) as job,
    ):
        first = wait_for_world(tmp_path, 4)
        first[3].kill()
        rest = wait_for_world(tmp_path, 2, first[0].epoch)
        assert [place.pid for place in rest] == [place.pid for place in first[:2]]
        again = wait_for_world(tmp_path, 4, rest[0].epoch)
        assert again[2].pid not in (first[2].pid, first[3].pid)
        (tmp_path / "end").touch()
        check_results(job.result(), 4)


class Counter:
    """An executable that each worker makes at its start."""

    def __init__(self, start: int, *, step: int) -> None:
        self.value = start + step

    def add_ranks(self) -> tuple[int, int, str]:
        """Return the sum of the ranks, the value, and a variable."""
        import hvdlite.numpy as hvd

        hvd.init()
        total = hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum)
        ray_logger.log({"rank": hvd.rank()})
        return int(total[0]), self.value, os.environ["MINE"]


def test_an_executable_and_what_rank_0_logs() -> None:
    executor = RayExecutor(SETTINGS, min_workers=2, max_workers=2)
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        executor.execute(Counter.add_ranks)
    executor.start(
        Counter, executable_args=[3], executable_kwargs={"step": 4}, extra_env_vars={"MINE": 5}
    )
    with pytest.raises(RuntimeError, match=r"call shutdown\(\)"):
        executor.start()
    assert executor.execute(Counter.add_ranks) == [(1, 7, "5")] * 2
    logged: list[Any] = []
    make = partial(Counter, 1, step=1)
    assert executor.run(make_and_add, [make], callbacks=[logged.append]) == [(1, 2, "5")] * 2
    assert logged == [{"rank": 0}]
    assert ray.get(executor.run_remote(os.getenv, ["MINE"])) == ["5", "5"]
    with pytest.raises(ValueError, match=r"use execute\(\)"):
        executor.execute_single(Counter.add_ranks)
    executor.shutdown()


def make_and_add(make: Any) -> Any:
    return make().add_ranks()


def test_each_worker_finds_its_own_gpu_by_its_local_rank() -> None:
    with started(min_workers=2, max_workers=2, use_gpu=True, gpus_per_worker=1) as executor:
        places = executor.run(gpus)
    assert {rank for rank, _, _ in places} == {0, 1}
    for local_rank, visible, own in places:
        assert visible[local_rank] == own and sorted(visible) == ["0", "1", "2", "3"]


def gpus() -> tuple[int, list[str], str]:
    (own,) = ray.get_gpu_ids()
    local_rank = int(os.environ["HVDLITE_LOCAL_RANK"])
    return local_rank, os.environ["CUDA_VISIBLE_DEVICES"].split(","), str(own)


class Discovery:
    """Finds fewer slots than there are, and a host that is none."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {ray.util.get_node_ip_address(): 1}


def test_hosts_can_be_found_by_others(tmp_path: Path) -> None:
    settings = RayExecutor.create_settings()
    with pytest.raises(ValueError, match=r"needs settings\.discovery"):
        RayExecutor(settings, min_workers=1, override_discovery=False)
    settings.discovery = Discovery()
    executor = RayExecutor(settings, min_workers=1, override_discovery=False)
    executor.start()
    assert executor.run(os.getenv, ["HVDLITE_SIZE"]) == ["1"]
    executor.shutdown()


def test_the_deprecated_executor() -> None:
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, nics=["lo"])
    assert (settings.elastic_timeout, settings.reset_limit, settings.timeout_s) == (600, None, 30)
    with pytest.warns(UserWarning, match=r"RayExecutor\(min_workers"):
        executor = ElasticRayExecutor(settings, env_vars={"MINE": 6})
    executor.start()
    assert executor.run(partial(os.getenv, "MINE")) == ["6", "6"]
    with (
        pytest.warns(UserWarning, match="deprecated"),
        pytest.raises(ValueError, match="gpus_per_slot=1 needs use_gpu"),
    ):
        ElasticRayExecutor(settings, gpus_per_slot=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"min_workers": 0}, "at least one"),
        ({"min_workers": 3, "max_workers": 2}, "at most 2 workers are less than 3"),
        ({"min_workers": 1, "cooldown_range": [0, 5]}, "cooldown_range=0 5"),
        ({"min_workers": 1, "cooldown_range": [5, 3601]}, "from 1 to 3600"),
        ({"min_workers": 1, "num_hosts": 1}, "contradicts"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RayExecutor(SETTINGS, **arguments)
