"""The backends and the transports with real ranks, on one host and on two."""

from __future__ import annotations

import os
import re
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.parallel.hosts import Hosts, two_hosts
from tests.parallel.jobs import MPI, TCP, ranks, run_command

both = pytest.mark.usefixtures("transport")
of_mpi = pytest.mark.usefixtures("over_mpi")


def run_worker(size: int, worker: str, *arguments: str, hosts: Hosts | None = None) -> str:
    """Output of a worker of this folder on `size` ranks."""
    module = ("-m", f"tests.parallel.{worker}", *arguments)
    command = ranks(size, sys.executable, *module, hosts=hosts, preload=("tests.backends",))
    return run_command(command, timeout=180).stdout


def check_backends(size: int, *arguments: str, hosts: Hosts | None = None) -> None:
    """All ranks are content."""
    output = run_worker(size, "worker_backends", *arguments, hosts=hosts)
    assert len(re.findall(rf"^rank \d+ of {size} is content$", output, re.M)) == size, output


@pytest.mark.parametrize(
    ("way", "transport"),
    [("auto", TCP), ("ring", TCP), ("auto", MPI), ("mpi", MPI)],
    indirect=["transport"],
)
@both
def test_one_host(way: str) -> None:
    check_backends(3, way, "3")


@pytest.mark.parametrize(
    ("slots", "way", "transport"),
    [
        ((2, 2), "auto", TCP),
        ((1, 2), "ring", TCP),
        ((1, 2), "auto", TCP),
        pytest.param((2, 2), "auto", MPI, marks=pytest.mark.soak),
        ((1, 2), "ring", MPI),
        ((1, 2), "auto", MPI),
        ((1, 2), "mpi", MPI),
    ],
    indirect=["transport"],
)
@both
def test_two_hosts(slots: tuple[int, int], way: str, tmp_path: Path) -> None:
    with two_hosts(tmp_path, slots) as hosts:
        check_backends(sum(slots), way, "+".join(map(str, slots)), hosts=hosts)


@both
def test_ranks_that_do_not_see_each_others_files_are_hosts_of_their_own() -> None:
    check_backends(3, "auto", "1+1+1", "apart")


@of_mpi
@pytest.mark.parametrize("way", ["ring", "mpi"])
def test_what_mpi_cannot_count_is_cut(way: str) -> None:
    check_backends(2, way, "2", "small")


def check_survivors(output: str) -> None:
    """Ranks 0 and 1 name rank 2, long before any limit of a wait."""
    found = re.findall(r"^rank (\d+) misses (\w+) after ([\d.]+) s$", output, re.M)
    assert sorted(rank for rank, *_ in found) == ["0", "1"], output
    assert all(missed == "2" and float(seconds) < 30 for _, missed, seconds in found), output


@pytest.mark.parametrize(
    ("arguments", "transport"),
    [*product((("shm",), ("ring",), ("auto", "receive")), (TCP, MPI)), (("mpi",), MPI)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
    indirect=["transport"],
)
@both
def test_a_killed_rank_is_named(arguments: tuple[str, ...]) -> None:
    check_survivors(run_worker(3, "worker_killed", *arguments))


@both
@pytest.mark.parametrize("arguments", [("ring",), ("auto", "receive")])
def test_a_killed_rank_of_another_host_is_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with two_hosts(tmp_path, (2, 1)) as hosts:
        check_survivors(run_worker(3, "worker_killed", *arguments, hosts=hosts))


@both
def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "tests.parallel.worker_killed", "shm")
    run_command(ranks(2, *words, preload=("tests.backends",)), TMPDIR=str(tmp_path))
    left = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hvdlite")], left
