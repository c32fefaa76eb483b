"""What may happen to a training of the reference task in real processes, at full size and small."""

from __future__ import annotations

import csv
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.ps.digits import accuracy, train_in_one
from tests.ps.processes import Cluster, cluster
from tests.ps.scripts.torch_digits import main
from tests.ps.test_torch import same

soak = pytest.mark.soak
# Each process may use this share of a core while nobody pushes.
IDLE_SECONDS, IDLE_SHARE = 1000.0, 0.0005


def saved(folder: Path, every: int) -> dict[str, str]:
    """Return the variables with which servers save each so many versions."""
    return {
        "HVDLITE_PS_SNAPSHOT": str(folder / "saved"), "HVDLITE_PS_SNAPSHOT_EVERY": str(every),
    }  # fmt: skip


def lose_server(job: Cluster) -> None:
    """Kill the server 0 in the middle of the training, and start it again."""
    job.wait_for_file("reached")
    job.kill("server0")
    job.start("server", 0)


@pytest.mark.parametrize(("steps", "at"), [(60, 15), pytest.param(800, 200, marks=soak)])
def test_a_server_killed_in_sync_leaves_the_run_bitwise(
    tmp_path: Path, steps: int, at: int
) -> None:
    """Each version is saved, with the state of Adam."""
    words = tmp_path, "sync", None, "adam", steps
    variables = saved(tmp_path, 1) | {"SAY": f"worker0:{at}", "SLOW": "0.003"}
    with cluster(tmp_path, 2, 2, main, *words, **variables) as job:
        lose_server(job)
        assert not job.wait_for_all()
    assert all(same(job.weights(number), train_in_one("adam", 2, steps)) for number in range(2))


@soak
def test_a_server_killed_in_async_loses_no_more_than_an_interval(tmp_path: Path) -> None:
    words = tmp_path, "async", None, "adam", 800
    variables = saved(tmp_path, 20) | {"SAY": "worker1:200", "SLOW": "0.002"}
    variables["HVDLITE_TRACE_ITERATIONS"] = str(tmp_path / "trace.csv")
    with cluster(tmp_path, 2, 2, main, *words, **variables) as job:
        lose_server(job)
        assert not job.wait_for_all()
    assert accuracy(job.weights(0)) > 0.95
    for server in range(2):
        with open(tmp_path / f"trace.server{server}.csv", newline="") as file:
            versions = [int(row["version"]) for row in csv.DictReader(file)]
        assert 1600 - 20 <= max(versions) <= 1600


@soak
def test_a_worker_killed_in_a_whole_training_leaves_the_run_bitwise(tmp_path: Path) -> None:
    words = tmp_path, "sync", None, "sgd", 300
    with cluster(tmp_path, 2, 2, main, *words, DIE="worker1:100") as job:
        assert job.wait("worker1") < 0
        job.start("worker", 1)
        assert not job.wait_for_all()
    assert all(same(job.weights(number), train_in_one("sgd", 2, 300)) for number in range(2))


@pytest.mark.parametrize(("seconds", "steps"), [(0.5, 60), pytest.param(10.0, 900, marks=soak)])
def test_steps_go_on_while_the_scheduler_is_away(
    tmp_path: Path, seconds: float, steps: int
) -> None:
    words = tmp_path, "sync", None, "sgd", steps
    variables = saved(tmp_path, 50) | {"SAY": "worker0:10", "SLOW": "0.015"}
    with cluster(tmp_path, 2, 2, main, *words, **variables) as job:
        job.wait_for_file("reached")
        job.kill("scheduler0")
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        job.start("scheduler")
        assert not job.wait_for_all()
    ends = job.times(0)
    gaps = [after - before for before, after in pairwise(ends)]
    assert sum(begin < each < end for each in ends) > 10 * seconds
    assert max(gaps) < 5.0
    assert all(same(job.weights(number), train_in_one("sgd", 2, steps)) for number in range(2))


@soak
@pytest.mark.timeout(IDLE_SECONDS + 200)
def test_idle_processes_use_no_processor(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    words = tmp_path, "sync", None, "sgd", 20
    with cluster(tmp_path, 2, 2, main, *words, HALT="10") as job:
        for name in ("worker0", "worker1"):
            job.wait_for_file(f"halted-{name}")
        time.sleep(5.0)  # Until all that the beginning has left to do is done.
        before = used(job)
        time.sleep(IDLE_SECONDS)
        shares = {name: (end - before[name]) / IDLE_SECONDS for name, end in used(job).items()}
        (tmp_path / "go").write_text("")
        assert not job.wait_for_all()
    print(json.dumps(shares))
    assert shares.pop("scheduler0") < 2 * IDLE_SHARE  # It hears the beats of all others.
    assert max(shares.values()) < IDLE_SHARE, shares


def used(job: Cluster) -> dict[str, float]:
    """Return the seconds for which each process has had a processor."""
    return {name: processor_seconds(each.pid or 0) for name, each in job.processes.items()}


def processor_seconds(pid: int) -> float:
    """Return the seconds for which all threads of a process have had a processor."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9
