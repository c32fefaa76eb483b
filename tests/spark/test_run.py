"""hvdlite.spark.run on a real Spark in this process: results, output, failures, arguments."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.spark
from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.launcher.function import RemoteError
from hvdlite.missing_names import NO_ESTIMATORS
from tests.cluster_programs import lose_a_rank, place, reduce, reduced, train, trained
from tests.cluster_programs import wait_for_others as wait_for_them
from tests.spark.sessions import session, wait_for_ends

pytest.importorskip("pyspark", reason="the extra 'spark' is not installed")


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with session("local[2]") as made:
        yield made


def test_without_a_context() -> None:
    with pytest.raises(RuntimeError, match="Could not find an active SparkContext"):
        hvdlite.spark.run(place)


@pytest.mark.usefixtures("context")
def test_the_ranks_reduce_and_do_so_again() -> None:
    assert hvdlite.spark.run(reduce, (1,)) == reduced(2, 1)
    assert hvdlite.spark.run(reduce, kwargs={"start": 5}, num_proc=2) == reduced(2, 5)
    assert hvdlite.spark.run(reduce, (3,), num_proc=1) == reduced(1, 3)


@pytest.mark.torch
@pytest.mark.usefixtures("context")
def test_torch_trains_as_one_process_does() -> None:
    first, second = hvdlite.spark.run(train, (4,))
    assert first == second
    np.testing.assert_allclose(first, trained(2, 4), rtol=1e-12)


@pytest.mark.usefixtures("context")
def test_ranks_find_their_place_and_leave_the_worker_as_it_was(context: Any) -> None:
    for rank, variables in enumerate(hvdlite.spark.run(place)):
        for prefix in ("HVDLITE", "HOROVOD"):
            assert variables[f"{prefix}_RANK"] == variables[f"{prefix}_LOCAL_RANK"] == str(rank)
            assert variables[f"{prefix}_SIZE"] == variables[f"{prefix}_LOCAL_SIZE"] == "2"
            assert variables[f"{prefix}_CROSS_RANK"] == "0"
            assert variables[f"{prefix}_CROSS_SIZE"] == "1"
    left = context.parallelize(range(2), 2).map(lambda _: place()).collect()
    assert left == [{}, {}]


def show(text: str) -> str | None:
    print(text)
    print("an error", file=sys.stderr)
    return os.environ.get("MINE")


@pytest.mark.usefixtures("context")
def test_output_and_environment() -> None:
    out, err = io.StringIO(), io.StringIO()
    got = hvdlite.spark.run(show, ("one\ntwo",), env={"MINE": "7"}, stdout=out, stderr=err)
    assert got == ["7", "7"]
    lines = [f"[{rank}]<stdout>:{word}" for rank in range(2) for word in ("one", "two")]
    assert sorted(out.getvalue().splitlines()) == lines
    errors = [line for line in err.getvalue().splitlines() if "an error" in line]
    assert sorted(errors) == ["[0]<stderr>:an error", "[1]<stderr>:an error"]


@pytest.mark.usefixtures("context")
def test_output_comes_to_the_driver_with_the_time(capfd: pytest.CaptureFixture[str]) -> None:
    hvdlite.spark.run(show, ("one",), prefix_output_with_timestamp=True)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith(":one")]
    year = time.strftime("%Y")
    assert len(lines) == 2 and all(f"{year}[" in line for line in lines)


@pytest.mark.usefixtures("context")
def test_an_exception_is_raised_as_itself_and_not_that_of_a_victim() -> None:
    with pytest.raises(KeyError, match="mine") as raised:
        hvdlite.spark.run(wait_for_them)
    assert isinstance(raised.value.__cause__, RemoteError) and raised.value.__cause__.rank == 1
    assert "wait_for_others" in str(raised.value.__cause__)


@pytest.mark.usefixtures("context")
def test_a_dead_rank_is_named_and_the_next_call_is_right() -> None:
    with pytest.raises(HorovodInternalError, match=r"rank 1 failed with exit code 9") as raised:
        hvdlite.spark.run(lose_a_rank)
    assert raised.value.rank == 1
    assert hvdlite.spark.run(reduce, (2,)) == reduced(2, 2)


def kill_or_wait(folder: str) -> None:
    """Write down this process and a child of it; rank 0 is killed, and rank 1 sleeps."""
    rank = os.environ["HVDLITE_RANK"]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    path = Path(folder, rank)
    path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".part").rename(path)
    if rank == "0":
        while not Path(folder, "1").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


@pytest.mark.usefixtures("context")
def test_a_killed_rank_ends_the_others_and_their_children(tmp_path: Path) -> None:
    with pytest.raises(HorovodInternalError, match=r"rank 0 was killed by SIGKILL"):
        hvdlite.spark.run(kill_or_wait, (str(tmp_path),))
    numbers = [int(word) for rank in "01" for word in (tmp_path / rank).read_text().split()]
    wait_for_ends(*numbers)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(("code", "text"), [(3, "exit code 3"), (0, "without a result")])
def test_a_rank_that_exits_is_named(code: int, text: str) -> None:
    with pytest.raises(HorovodInternalError, match=text):
        hvdlite.spark.run(sys.exit, (code,))


@pytest.mark.usefixtures("context")
def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TypeError, match="pickle"):
        hvdlite.spark.run(iter_of_frames)


def iter_of_frames() -> Any:
    return sys._getframe()


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_proc": 3}, r"num_proc=3: the master local\[2\] has 2 slots"),
        ({"num_proc": 0}, "at least one"),
        ({"use_mpi": True}, "use_mpi"),
        ({"extra_mpi_args": "-x A"}, "extra_mpi_args"),
    ],
)
def test_arguments_that_can_never_work(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hvdlite.spark.run(place, **arguments)


@pytest.mark.usefixtures("context")
def test_settings_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["HVDLITE_START_TIMEOUT", "HVDLITE_NETWORK_INTERFACES", "HVDLITE_LOG_LEVEL"]
    arguments: dict[str, Any] = {"num_proc": 1, "nics": ["lo"], "verbose": 2}
    assert hvdlite.spark.run(getenvs, (names,), start_timeout=77, **arguments) == [
        ["77", "lo", "debug"]
    ]
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "55")
    assert hvdlite.spark.run(getenvs, (names[:1],), num_proc=1) == [["55"]]


def getenvs(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


@pytest.mark.usefixtures("context")
def test_another_python_can_be_named(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexport MINE=other\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    assert hvdlite.spark.run(getenvs, (["MINE"],), executable=str(other)) == [["other"]] * 2
    with pytest.raises(FileNotFoundError, match="no-such-python"):
        hvdlite.spark.run(place, executable="/no-such-python")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
@pytest.mark.usefixtures("context")
def test_torch_distributor_works_as_it_is() -> None:
    for needed in ("pandas", "pyarrow"):
        pytest.importorskip(needed, reason="TorchDistributor needs it")
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    first = distributor.run(train, 4)
    np.testing.assert_allclose(first, trained(2, 4), rtol=1e-12)


def test_the_drop_in_has_the_names() -> None:
    from tests.launcher.command_line.test_as_horovod import run

    code = (
        "import horovod.spark, hvdlite.spark\n"
        "from horovod.spark.task import get_available_devices\n"
        "assert get_available_devices() == []\n"
        "assert horovod.spark is hvdlite.spark and horovod.spark.run is hvdlite.spark.run\n"
        "assert horovod.spark.run_elastic is hvdlite.spark.run_elastic\n"
        "for line in ('import horovod.spark.keras',\n"
        "             'from horovod.spark import torch', 'import horovod.spark.common.store'):\n"
        "    try: exec(line)\n"
        "    except (AttributeError, ImportError) as error: print(error)\n"
    )
    lines = run("-c", code).splitlines()
    assert len(lines) == 3 and all(NO_ESTIMATORS in line for line in lines)
