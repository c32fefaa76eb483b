"""Clusters of real processes: the reference task and others, at full size and small.

They are in one file, as all processes are forked from one that takes seconds to start.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdlite.ps.connections.records import Row  # noqa: E402
from hvdlite.tools.timeline_reader import check  # noqa: E402
from tests.ps import processes  # noqa: E402
from tests.ps.digits import (  # noqa: E402
    OPTIMIZERS,
    accuracy,
    batch,
    loss_of,
    network,
    train_in_one,
)  # fmt: skip
from tests.ps.processes import Cluster, cluster  # noqa: E402
from tests.ps.scripts import keras_fit, raw, raw_pushes, torch_mixed, torch_rows  # noqa: E402
from tests.ps.scripts.torch_digits import main, main_in_parts, main_with_schedule  # noqa: E402
from tests.ps.sites import Site  # noqa: E402
from tests.ps.soak.__main__ import LIMIT_SECONDS, run  # noqa: E402
from tests.ps.test_records import spans  # noqa: E402

Weights = dict[str, Any]
pytestmark = pytest.mark.torch
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


def rows_of(job: Cluster, process: str, kind: str) -> list[dict[str, str]]:
    """Return what a process has written of pushes, pulls or updates."""
    path = job.folder / f"trace.{process}.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == kind]


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("name", "workers", "steps"),
    [
        ("adam", 3, 30),
        *(pytest.param(*each, 300, marks=soak) for each in [("sgd", 2), ("adam", 2), ("sgd", 3)]),
    ],
)
def test_sync_is_bitwise_one_process(site: Site, name: str, workers: int, steps: int) -> None:
    with cluster(site, 2, workers, main, "sync", None, name, steps) as job:
        assert not job.wait_for_all()
    wanted = train_in_one(name, workers, steps)
    assert all(same(job.weights(number), wanted) for number in range(workers))
    assert steps < 300 or accuracy(wanted) > 0.94


@pytest.mark.parametrize("dialect", ["MindSpore", "ps-lite"])
def test_processes_are_started_with_the_names_of_others(site: Site, dialect: str) -> None:
    """A scheduler, a server and a worker, as an operator for MindSpore starts them."""
    with cluster(site, 1, 1, main, "sync", None, "adam", 10, dialect=dialect) as job:
        assert not job.wait_for_all()
    assert same(job.weights(0), train_in_one("adam", 1, 10))


def test_a_worker_that_stops_holds_nobody_up_in_async(site: Site) -> None:
    os.mkfifo(site.folder / "go")
    words = "async", None, "sgd", 100
    with cluster(site, 2, 2, main, *words, HALT="worker1:20", SAY="worker0:99") as job:
        job.wait_for_file("reached")
        (site.folder / "go").write_text("")
        assert not job.wait_for_all()
    assert accuracy(job.weights(1)) > 0.9


@pytest.mark.soak
def test_a_slow_worker_is_waited_for_in_ssp(site: Site) -> None:
    staleness = 2
    words = "ssp", staleness, "sgd", 300
    with cluster(site, 2, 2, main, *words, SLOW="0.003") as job:
        assert not job.wait_for_all()
    assert accuracy(job.weights(1)) > 0.93
    fast, slow = job.times(0), job.times(1)
    ahead = max(step - sum(end <= at for end in slow[1:]) for step, at in enumerate(fast))
    assert ahead <= staleness + 1 + 1  # A step ends a little after its push.


@pytest.mark.parametrize(("steps", "at"), [(40, 15), pytest.param(300, 100, marks=soak)])
def test_a_killed_worker_returns_and_the_run_is_bitwise_undisturbed(
    site: Site, steps: int, at: int
) -> None:
    with cluster(site, 2, 2, main, "sync", None, "sgd", steps, DIE=f"worker1:{at}") as job:
        assert job.wait("worker1") == -signal.SIGKILL
        job.start("worker", 1)
        assert not job.wait_for_all()
    assert all(same(job.weights(number), train_in_one("sgd", 2, steps)) for number in range(2))


def train_with_schedule(steps: int, overflow_step: int) -> Weights:
    """Return what one process makes of `main_with_schedule`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(steps):
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for worker in range(2):
            model.zero_grad()
            for part in range(2):
                loss_of(model, *batch(2 * step + part, worker, 2)).backward()
            totals = [
                total + parameter.grad
                for total, parameter in zip(totals, model.parameters(), strict=True)
            ]
        for total, parameter in zip(totals, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step // 5)
        if step != overflow_step:
            optimizer.step()
    torch.set_num_threads(threads)
    return model.state_dict()


def test_schedules_travel_and_an_overflow_skips_the_step_everywhere(site: Site) -> None:
    """With two backward passes a step, and sums of the workers' gradients."""
    with cluster(site, 2, 2, main_with_schedule, 12, 7) as job:
        assert not job.wait_for_all()
    wanted = train_with_schedule(12, 7)
    assert all(same(job.weights(number), wanted) for number in range(2))


def test_servers_and_allreduce_differ_by_the_order_of_sums_alone(site: Site) -> None:
    """With three ranks, of which each adds gradients up in another order."""
    words = None, False, False
    with cluster(site, 2, 3, torch_mixed.main, *words, HVDLITE_PS_WORKERS="mpi") as job:
        assert not job.wait_for_all()
    found = torch.load(site.folder / "worker2.pt")
    for name, wanted in found["reduced"].items():
        assert (found["mixed"][name] - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize(
    ("parameters", "mark", "clip"),
    [(["0.*"], False, True), (None, True, False)],
    ids=["patterns", "set_param_ps"],
)
def test_servers_and_allreduce_make_the_same_steps(
    site: Site, parameters: list[str] | None, mark: bool, clip: bool
) -> None:
    """Bitwise for two ranks, whichever parameters go by servers."""
    words = parameters, mark, clip
    with cluster(site, 1, 2, torch_mixed.main, *words, HVDLITE_PS_WORKERS="mpi") as job:
        assert not job.wait_for_all()
    for worker in range(2):
        found = torch.load(site.folder / f"worker{worker}.pt")
        assert same(found["mixed"], found["reduced"])
    untrained = torch_mixed.model().state_dict()
    assert not any(torch.equal(found["mixed"][name], untrained[name]) for name in untrained)


@pytest.mark.parametrize(("name", "servers"), [("sgd", 2), ("sparse_adam", 1)])
def test_a_recommender_is_bitwise_one_process(site: Site, name: str, servers: int) -> None:
    with cluster(site, servers, 2, torch_rows.main, name, 12) as job:
        assert not job.wait_for_all()
    wanted = torch_rows.train_in_one(name, 2, 12)
    for worker in range(2):
        found = job.weights(worker)
        assert found["rows"].shape == (torch_rows.ROWS, torch_rows.WIDTH)
        assert same(found, wanted)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.jax)])
def test_a_fit_of_keras_is_that_of_one_process(site: Site, backend: str) -> None:
    """Workers compare with one process themselves."""
    pytest.importorskip("keras")
    pytest.importorskip(backend)
    variables = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    with cluster(site, 2, 2, keras_fit.main, **variables) as job:
        assert not job.wait_for_all()
    one, other = (np.load(site.folder / f"worker{number}.npz") for number in range(2))
    assert all((one[name] == other[name]).all() for name in one.files) and len(one.files) == 4


def test_workers_push_and_pull_by_names(site: Site) -> None:
    with cluster(site, 2, 2, raw.main) as job:
        assert not job.wait_for_all()


def test_processes_write_records_into_files_of_their_own(site: Site) -> None:
    variables = {"HVDLITE_TIMELINE": str(site.inside / "t.json")} | traced(site)
    with cluster(site, 1, 2, main, "async", None, "sgd", 5, **variables) as job:
        assert not job.wait_for_all()
    stale = []
    for process, peer in (("server0", "worker 1"), ("worker1", "server 0")):
        rows = rows_of(job, process, "push")
        assert tuple(rows[0]) == Row._fields
        pushes = [row for row in rows if row["peer"] == peer]
        assert [row["clock"] for row in pushes] == [str(step) for step in range(5)]
        stale.append([int(row["stale"]) for row in pushes])
        path = site.folder / f"t.{process}.json"
        assert not check(json.loads(path.read_text())).problems
        assert len(spans(path, f"[push] optimizer, {peer}")) == 10
    assert stale[0] == stale[1]  # Both tell the same story.
    assert all(0 <= each <= 5 for each in stale[0])


# -- what may happen to a training


def lose_server(job: Cluster) -> None:
    """Kill the server 0 in the middle of the training, and start it again."""
    job.wait_for_file("reached")
    job.kill("server0")
    job.start("server", 0)


@pytest.mark.parametrize(("steps", "at"), [(40, 15), pytest.param(800, 200, marks=soak)])
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
    pulls = [*rows_of(job, "server0", "pull"), *rows_of(job, "server1", "pull")]
    assert max(int(row["stale"]) for row in pulls) == staleness


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
        versions = [int(row["version"]) for row in rows_of(job, f"server{server}", "update")]
        lost = 2 * steps - max(versions)
        assert 0 <= lost <= (2 * every if server == 0 else 0)


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
        job.wait_until(lambda: bool(rows_of(job, "server2", "update")))
        (site.folder / "hurry").touch()
        assert not job.wait_for_all()
    steps = len(job.times(0)) - 1  # It has taken as many as the server has needed to come.
    assert all(same(job.weights(number), train_in_one("adam", 2, steps)) for number in range(2))
    loads = [int(rows_of(job, f"server{server}", "push")[-1]["bytes"]) for server in range(3)]
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
