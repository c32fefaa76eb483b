"""What processes of a cluster are told when something is wrong with their start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.ps.cli import main as cli
from tests.parallel.jobs import environment
from tests.ps.cluster import Cluster, wait_until
from tests.ps.sites import held_port

WORKER = """
import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps import context
context.init()
for call in (hvd.init, hvd.barrier):
    try:
        call()
    except HorovodInternalError as error:
        print(error)
"""


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


def test_a_scheduler_alone_and_workers_without_collectives(port: int) -> None:
    """The worker leaves when its program ends, and the scheduler ends with it."""
    address = f"127.0.0.1:{port}"
    variables = {
        "HVDLITE_SCHEDULER": address, "HVDLITE_NUM_SERVERS": "1", "HVDLITE_NUM_WORKERS": "1",
    }  # fmt: skip
    serve = (
        "from hvdlite.ps import context; context.init()\n"
        "from hvdlite.ps.context import serve; serve()"
    )
    flags = "--address", address, "--servers", "1", "--workers", "1"
    commands: list[tuple[list[str], dict[str, str]]] = [
        (["-m", "hvdlite.ps.cli", "scheduler", *flags], {}),
        (["-c", serve], {**variables, "HVDLITE_ROLE": "server"}),
        (["-c", WORKER], {**variables, "HVDLITE_ROLE": "worker"}),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, *words], env=environment(**own), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for words, own in commands
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=40) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], ends
    assert ends[2][0].count("independent workers have no collectives") == 2


def test_hvdlite_ps_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HVDLITE_NUM_SERVERS", raising=False)
    assert cli(["scheduler", "--address", "127.0.0.1:5000"]) == 2
    said = "hvdlite-ps: HVDLITE_NUM_SERVERS=: give how many there are, 1 or more\n"
    assert capsys.readouterr().err == said


def test_who_has_not_come_is_named(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(1, 3, start_seconds=1000.0)
    membership = cluster.state.membership
    wanted = r"workers 1, 2 had not come after 1000 seconds \(--start-timeout\)"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cluster.worker, "first")
        wait_until(lambda: ("worker", 0) in membership.members)
        membership.begin -= 1000.0  # As if they had passed.
        with pytest.raises(HorovodInternalError, match=wanted):
            first.result(30)


def test_counts_that_differ_are_both_named(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(1, 1)
    cluster.worker("the only one")
    with pytest.raises(ConfigError, match="cluster has 1 servers, and this worker was told of 2"):
        cluster.worker("late", num_servers=2)
