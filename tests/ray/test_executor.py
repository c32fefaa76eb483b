"""RayExecutor on a real Ray: places, results, failures, and what is left behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ray import BaseHorovodWorker, RayExecutor, ray_logger
from tests.cluster_programs import lose_a_rank, place, reduce, reduced, train, trained
from tests.cluster_programs import wait_for_others as wait_for_them

ray: Any = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def executor() -> Iterator[RayExecutor]:
    made = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=2)
    made.start()
    yield made
    made.shutdown()


def wait_until_free(cores: float = 2, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while ray.available_resources().get("CPU") != cores:
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.05)


def test_the_ranks_reduce_and_do_so_again_in_the_same_actors(executor: RayExecutor) -> None:
    first = executor.run(os.getpid)
    assert executor.run(reduce, args=[1]) == reduced(2, 1)
    assert executor.run(reduce, kwargs={"start": 5}) == reduced(2, 5)
    assert executor.run(os.getpid) == first and len({*first}) == 2


def test_torch_trains_as_one_process_does(executor: RayExecutor) -> None:
    first, second = executor.run(train, args=[4])
    assert first == second
    np.testing.assert_allclose(first, trained(2, 4), rtol=1e-12)


def test_ranks_find_their_place_in_the_environment(executor: RayExecutor) -> None:
    for rank, variables in enumerate(executor.run(place)):
        for prefix in ("HVDLITE", "HOROVOD"):
            assert variables[f"{prefix}_RANK"] == variables[f"{prefix}_LOCAL_RANK"] == str(rank)
            assert variables[f"{prefix}_SIZE"] == variables[f"{prefix}_LOCAL_SIZE"] == "2"
            assert variables[f"{prefix}_CROSS_RANK"] == "0"
            assert variables[f"{prefix}_CROSS_SIZE"] == "1"


def test_variables_of_the_user_and_of_other_launchers() -> None:
    executor = RayExecutor(num_workers=1)
    executor.start(extra_env_vars={"MINE": 7})
    assert executor.run(os.getenv, args=["MINE"]) == ["7"]
    executor.shutdown()
    worker = BaseHorovodWorker()
    left = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "RANK", "WORLD_SIZE", "HVDLITE_RENDEZVOUS"}
    with pytest.MonkeyPatch.context() as patch:
        for name in left:
            patch.setenv(name, "3")
        worker.update_env_vars({"HVDLITE_RANK": 1})
        assert worker.env_vars()["HVDLITE_RANK"] == "1"
        assert not left & worker.env_vars().keys()
        del os.environ["HVDLITE_RANK"]


def test_references_come_back_at_once(executor: RayExecutor) -> None:
    references = executor.run_remote(reduce, args=[2])
    assert all(isinstance(each, ray.ObjectRef) for each in references)
    assert ray.get(references) == reduced(2, 2)


def test_an_exception_is_raised_as_itself_with_the_rank(executor: RayExecutor) -> None:
    with pytest.raises(KeyError, match="mine") as raised:
        executor.run(wait_for_them)
    if hasattr(raised.value, "__notes__"):  # new in Python 3.11
        assert "(raised on rank 1)" in raised.value.__notes__
    assert executor.run(reduce, args=[3]) == reduced(2, 3)


def test_a_dead_actor_is_named_at_once_and_nothing_stays(executor: RayExecutor) -> None:
    executor.run(reduce, args=[1])
    started = time.monotonic()
    with pytest.raises(HorovodInternalError, match="rank 1 is lost") as raised:
        executor.run(lose_a_rank)
    assert raised.value.rank == 1 and isinstance(raised.value.__cause__, ray.exceptions.RayError)
    assert time.monotonic() - started < 30  # the limit of a hang, not a measurement
    with pytest.raises(HorovodInternalError, match="rank 1 is lost"):
        executor.run(os.getpid)
    executor.shutdown()
    wait_until_free()
    executor.start()
    assert executor.run(reduce, args=[1]) == reduced(2, 1)


class Counter:
    """An executable that stays in its worker."""

    def __init__(self, start: int, *, step: int) -> None:
        self.value, self.step = start + int(os.environ["HVDLITE_RANK"]), step

    def count(self) -> int:
        self.value += self.step
        return self.value


def test_an_executable_lives_in_each_worker() -> None:
    executor = RayExecutor(num_hosts=1, num_workers_per_host=2)
    assert executor.num_workers == 2
    executor.start(Counter, executable_args=[10], executable_kwargs={"step": 5})
    assert executor.execute(Counter.count) == [15, 16]
    assert executor.execute_single(Counter.count) == 20
    assert executor.execute(Counter.count) == [25, 21]
    executor.shutdown()
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        executor.execute(Counter.count)


def test_an_executable_that_raises_leaves_nothing() -> None:
    executor = RayExecutor(num_workers=2)
    with pytest.raises(ZeroDivisionError):
        executor.start(Failing)
    assert executor.workers == []
    wait_until_free()


class Failing:
    def __init__(self) -> None:
        raise ZeroDivisionError


def log_twice(what: str) -> str:
    rank = int(os.environ["HVDLITE_RANK"])
    for step in range(2):
        ray_logger.log({"what": what, "step": step, "rank": rank})
    return what


def test_callbacks_get_what_rank_0_logs(executor: RayExecutor) -> None:
    first: list[Any] = []
    second: list[Any] = []
    answers = executor.run(log_twice, args=["loss"], callbacks=[first.append, second.append])
    assert answers == ["loss"] * 2
    assert first == second == [{"what": "loss", "step": step, "rank": 0} for step in range(2)]
    executor.run(log_twice, args=["other"])
    assert len(first) == 2


def test_each_worker_sees_the_gpus_of_its_host() -> None:
    executor = RayExecutor(num_workers=2, use_gpu=True, gpus_per_worker=2)
    executor.start()
    seen = executor.run(os.getenv, args=["CUDA_VISIBLE_DEVICES"])
    own = ray.get([worker.get_gpu_ids.remote() for worker in executor.workers])
    executor.shutdown()
    # Local rank r finds its own GPUs behind those of the ranks before it.
    assert seen == [",".join(own[0] + own[1])] * 2
    assert sorted(own[0] + own[1]) == ["0", "1", "2", "3"]


def test_too_many_workers_are_a_clear_error() -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=3)
    with pytest.raises(TimeoutError, match=r"no room for 3 workers in 1 s.*'CPU': 1.*'CPU': 2"):
        executor.start()
    wait_until_free()
    working = RayExecutor(num_workers=2)
    working.start()
    working.shutdown()


@pytest.fixture
def group() -> Iterator[Any]:
    made = ray.util.placement_group([{"CPU": 1}] * 2)
    ray.get(made.ready(), timeout=30)
    yield made
    ray.util.remove_placement_group(made)


def workers_inside(
    count: int, use_current: bool, options: dict[str, Any]
) -> tuple[list[str], list[str]]:
    # Outside of the group there is no room, for which a test waits; inside, workers take a while.
    limit = 40 if use_current else 1
    settings = RayExecutor.create_settings(placement_group_timeout_s=limit)
    executor = RayExecutor(settings, count, use_current_placement_group=use_current, **options)
    executor.start()
    groups = executor.run(group_of_this_process)
    executor.shutdown()
    current = ray.util.get_current_placement_group()
    return groups, [current.id.hex()] * count


def group_of_this_process() -> str:
    return str(ray.get_runtime_context().get_placement_group_id())


def start_inside(group: Any, count: int, use_current: bool = True, **options: Any) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    task = ray.remote(workers_inside).options(
        num_cpus=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_capture_child_tasks=True
        ),
    )
    return ray.get(task.remote(count, use_current, options), timeout=60)


def test_the_current_placement_group_is_used(group: Any) -> None:
    groups, current = start_inside(group, 2)
    assert groups == current


def test_workers_that_take_nothing_have_room_in_any_placement_group(group: Any) -> None:
    groups, current = start_inside(group, 3, cpus_per_worker=0)
    assert groups == current


def test_a_current_placement_group_that_is_too_small(group: Any) -> None:
    with pytest.raises(ValueError, match=r"has room for 2 workers .* num_workers is 3"):
        start_inside(group, 3)


def test_the_current_placement_group_can_be_left(group: Any) -> None:
    with pytest.raises(TimeoutError, match="no room for 2 workers"):  # the group has all cores
        start_inside(group, 2, use_current=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "give either num_workers"),
        ({"num_workers": 2, "num_hosts": 1}, "give either num_workers"),
        ({"num_workers": 0}, "at least one"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu=True"),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0}, "at least 1"),
        ({"max_workers": 3}, "needs min_workers"),
        ({"num_workers": 2, "min_workers": 2}, "contradicts num_workers"),
        ({"num_workers": 2, "reset_limit": 3}, "reset_limit=3 needs min_workers"),
        ({"num_workers": 2, "cooldown_range": [1, 2]}, "needs min_workers"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RayExecutor(RayExecutor.create_settings(), **arguments)


def test_starting_twice_is_refused(executor: RayExecutor) -> None:
    with pytest.raises(RuntimeError, match=r"call shutdown\(\)"):
        executor.start()
    assert executor.run(os.getpid)


def test_settings_reach_the_ranks() -> None:
    settings = RayExecutor.create_settings(timeout_s=12, nics=["lo"])
    executor = RayExecutor(settings, num_workers=1)
    executor.start()
    names = ["HVDLITE_START_TIMEOUT", "HVDLITE_NETWORK_INTERFACES"]
    got = [executor.run(os.getenv, args=[name])[0] for name in names]
    executor.shutdown()
    assert got == ["12", "lo"]


def test_a_worker_tells_its_host() -> None:
    assert BaseHorovodWorker().hostname() == socket.gethostname()


def test_the_drop_in_has_the_names(tmp_path: Path) -> None:
    from tests.launcher.command_line.test_as_horovod import run

    code = (
        "import horovod.ray, hvdlite.ray, horovod.ray.runner, horovod.ray.ray_logger\n"
        "from horovod.ray import RayExecutor, ray_logger\n"
        "from horovod.ray.worker import BaseHorovodWorker\n"
        "assert horovod.ray is hvdlite.ray and RayExecutor is hvdlite.ray.RayExecutor\n"
        "assert horovod.ray.runner.RayExecutor is RayExecutor\n"
        "from horovod.ray import ElasticRayExecutor\n"
        "from horovod.ray.elastic import RayHostDiscovery\n"
        "assert ElasticRayExecutor is hvdlite.ray.ElasticRayExecutor\n"
        "print(RayHostDiscovery.__module__)\n"
    )
    assert run("-c", code).split() == ["hvdlite.ray.elastic_workers"]
