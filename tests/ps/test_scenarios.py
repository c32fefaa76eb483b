"""What may happen to a training of the reference task in real processes, at full size and small."""

from __future__ import annotations

import csv
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.ps import processes
from tests.ps.digits import accuracy, network, train_in_one
from tests.ps.processes import Cluster, cluster
from tests.ps.scripts import raw_pushes
from tests.ps.scripts.torch_digits import main, main_in_parts
from tests.ps.sites import Site
from tests.ps.soak.__main__ import LIMIT_SECONDS, run
from tests.ps.test_torch import same

soak = pytest.mark.soak
# Each process may use this share of a core while nobody pushes.
IDLE_SECONDS, IDLE_SHARE = 1000.0, 0.0005
PART_BYTES = 2048


def saved(site: Site, every: int) -> dict[str, str]:
    """Return the variables with which servers save each so many versions."""
    where = str(site.inside / "saved")
    return {"HVDLITE_PS_SNAPSHOT": where, "HVDLITE_PS_SNAPSHOT_EVERY": str(every)}


def traced(site: Site) -> dict[str, str]:
    """Return the variable with which all processes write what they do."""
    return {"HVDLITE_TRACE_ITERATIONS": str(site.inside / "trace.csv")}


def rows_of(job: Cluster, server: int, kind: str) -> list[dict[str, str]]:
    """Return what a server has written of pushes, pulls or updates."""
    path = job.folder / f"trace.server{server}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == kind]


def lose_server(job: Cluster) -> None:
    """Kill the server 0 in the middle of the training, and start it again."""
    job.wait_for_file("reached")
    job.kill("server0")
    job.start("server", 0)


@pytest.mark.parametrize(("steps", "at"), [(60, 15), pytest.param(800, 200, marks=soak)])
def test_a_server_killed_in_sync_leaves_the_run_bitwise(site: Site, steps: int, at: int) -> None:
    """Each version is saved, with the state of Adam."""
    words = "sync", None, "adam", steps
    variables = saved(site, 1) | {"SAY": f"worker0:{at}", "SLOW": "0.003"}
    with cluster(site, 2, 2, main, *words, **variables) as job:
        lose_server(job)
        assert not job.wait_for_all()
    assert all(same(job.weights(number), train_in_one("adam", 2, steps)) for number in range(2))


@soak  # Simulated workers are held to the bound, too.
@pytest.mark.parametrize("staleness", [2, 0, 8])
def test_a_worker_that_stops_holds_the_other_up_at_the_bound_in_ssp(
    site: Site, staleness: int
) -> None:
    """It has finished 20 steps, and the other one can finish `staleness + 1` more."""
    os.mkfifo(site.folder / "go")
    last = 20 + staleness  # The step whose end has to wait: the next one needs what is missing.
    words = "ssp", staleness, "sgd", 60
    variables = {"HALT": "worker1:20", "SAY": f"worker0:{last}"} | traced(site)
    with cluster(site, 2, 2, main, *words, **variables) as job:
        job.wait_for_file("reached")
        job.wait_for_file("halted-worker1")
        released = time.monotonic()
        (site.folder / "go").write_text("")
        assert not job.wait_for_all()
    ends = job.times(0)
    assert ends[last] < released < ends[last + 1]
    behind = [int(row["stale"]) for server in range(2) for row in rows_of(job, server, "pull")]
    assert max(behind) == staleness


@soak  # In sync, a server is killed in the same way, and loses less.
@pytest.mark.parametrize(("steps", "at"), [(100, 30), (800, 200)])
def test_a_server_killed_in_async_loses_no_more_than_two_intervals(
    site: Site, steps: int, at: int
) -> None:
    """The snapshot of the last one may still be on its way to the disk."""
    words = "async", None, "adam", steps
    every = 20
    variables = saved(site, every) | {"SAY": f"worker1:{at}", "SLOW": "0.002"} | traced(site)
    with cluster(site, 2, 2, main, *words, **variables) as job:
        lose_server(job)
        assert not job.wait_for_all()
    assert accuracy(job.weights(0)) > (0.95 if steps > 500 else 0.85)
    for server in range(2):
        versions = [int(row["version"]) for row in rows_of(job, server, "update")]
        lost = 2 * steps - max(versions)
        assert 0 <= lost <= (2 * every if server == 0 else 0)


@soak
def test_a_worker_killed_in_a_whole_training_leaves_the_run_bitwise(site: Site) -> None:
    words = "sync", None, "sgd", 300
    with cluster(site, 2, 2, main, *words, DIE="worker1:100") as job:
        assert job.wait("worker1") < 0
        job.start("worker", 1)
        assert not job.wait_for_all()
    assert all(same(job.weights(number), train_in_one("sgd", 2, 300)) for number in range(2))


@pytest.mark.parametrize(("away", "steps"), [(30, 60), pytest.param(660, 900, marks=soak)])
def test_steps_go_on_while_the_scheduler_is_away(site: Site, away: int, steps: int) -> None:
    words = "sync", None, "sgd", steps
    variables = saved(site, 50) | {"SAY": f"worker0:10,worker0:{10 + away}", "SLOW": "0.015"}
    with cluster(site, 2, 2, main, *words, **variables) as job:
        job.wait_for_file("reached")
        job.kill("scheduler0")
        assert not (site.folder / f"reached-{10 + away}").exists()
        job.wait_for_file(f"reached-{10 + away}")
        job.start("scheduler")
        assert not job.wait_for_all()
    assert max(after - before for before, after in pairwise(job.times(0))) < 5.0
    assert all(same(job.weights(number), train_in_one("sgd", 2, steps)) for number in range(2))


def test_workers_go_back_where_nobody_has_the_steps_of_a_killed_server(site: Site) -> None:
    """They have pushed 33 steps, and pulled none of them; the last snapshot is of step 20."""
    with cluster(site, 2, 2, raw_pushes.main, 33, 20, 40, **saved(site, 20)) as job:
        for name in ("pushed0", "pushed1"):
            job.wait_for_file(name)
        for server in range(2):
            job.wait_for_file(f"saved/server-{server}/*/*-000000000020.safetensors")
        job.kill("server1")
        job.start("server", 1)
        (site.folder / "go").touch()
        assert not job.wait_for_all()
    for number in range(2):
        assert f"sums {40 * (1.0 + 2.0)} {40 * 2.0}" in job.said(f"worker{number}")


def test_a_worker_that_joins_takes_part_while_another_one_stands(site: Site) -> None:
    os.mkfifo(site.folder / "go")
    words = "async", None, "sgd", 150
    with cluster(site, 2, 2, main, *words, HALT="worker1:60", SAY="worker0:50") as job:
        job.wait_for_file("reached")
        job.wait_for_file("halted-worker1")
        job.start("worker", 2, HVDLITE_PS_JOIN="1")
        assert job.wait("worker2") == 0
        released = time.monotonic()
        (site.folder / "go").write_text("")
        assert not job.wait_for_all()
    _, *ends = job.times(2)
    assert ends and max(ends) < released < job.times(1)[61]


def test_a_server_that_joins_takes_its_share_and_leaves_the_run_bitwise(site: Site) -> None:
    words = PART_BYTES, "sync", None, "adam", 20
    variables = {"SAY": "worker0:20", "SLOW": "0.02", "ENDLESS": "1"} | traced(site)
    with cluster(site, 2, 2, main_in_parts, *words, **variables) as job:
        job.wait_for_file("reached")
        job.start("server", 2, HVDLITE_PS_JOIN="1")
        job.wait_until(lambda: bool(rows_of(job, 2, "update")))
        (site.folder / "hurry").touch()
        assert not job.wait_for_all()
    steps = len(job.times(0)) - 1  # It has taken as many as the server has needed to come.
    assert all(same(job.weights(number), train_in_one("adam", 2, steps)) for number in range(2))
    loads = [int(rows_of(job, server, "push")[-1]["bytes"]) for server in range(3)]
    assert sum(loads) == 4 * sum(each.numel() for each in network().parameters())
    assert max(loads) - min(loads) < PART_BYTES


@soak
@pytest.mark.timeout(IDLE_SECONDS + 200)
def test_idle_processes_use_no_processor(site: Site) -> None:
    os.mkfifo(site.folder / "go")
    words = "sync", None, "sgd", 20
    with cluster(site, 2, 2, main, *words, HALT="10") as job:
        for name in ("worker0", "worker1"):
            job.wait_for_file(f"halted-{name}")
        time.sleep(5.0)  # Until all that the beginning has left to do is done.
        before = used(job)
        time.sleep(IDLE_SECONDS)
        shares = {name: (end - before[name]) / IDLE_SECONDS for name, end in used(job).items()}
        (site.folder / "go").write_text("")
        assert not job.wait_for_all()
    print(json.dumps(shares))
    assert shares.pop("scheduler0") < 2 * IDLE_SHARE  # It hears the beats of all others.
    assert max(shares.values()) < IDLE_SHARE, shares


@soak
@pytest.mark.timeout(1200)
def test_random_jobs_have_the_values_of_an_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMIT_SECONDS", LIMIT_SECONDS)
    assert not run(["--jobs", "5", "--seed", "1"])


def used(job: Cluster) -> dict[str, float]:
    """Return the seconds for which each process has had a processor."""
    return {name: processor_seconds(job.pid(name)) for name in job.processes}


def processor_seconds(pid: int) -> float:
    """Return the seconds for which all threads of a process have had a processor."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9
