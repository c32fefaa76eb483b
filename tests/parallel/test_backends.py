"""The backends and the transports with real ranks, on one host and on two."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.parallel.hosts import Hosts, two_hosts
from tests.parallel.jobs import MPI, TCP, ranks, run_command

both = pytest.mark.usefixtures("transport")
of_mpi = pytest.mark.usefixtures("over_mpi")


def run_worker(
    size: int, worker: str, *arguments: str, hosts: Hosts | None = None
) -> tuple[int, str]:
    """Exit code and output of a worker of this folder on `size` ranks."""
    module = ("-m", f"tests.parallel.{worker}", *arguments)
    command = ranks(size, sys.executable, *module, hosts=hosts, preload=("tests.backends",))
    result = run_command(command, timeout=180)
    return result.returncode, result.stdout


def content(output: str) -> int:
    """How many ranks were content."""
    return len(re.findall(r"^rank \d+ of \d+ is content$", output, re.M))


def check_one_host(size: int, way: str) -> None:
    code, output = run_worker(size, "worker_backends", way, str(size))
    assert (code, content(output)) == (0, size), output


@pytest.mark.parametrize(
    ("size", "way", "transport"),
    [(3, "auto", TCP), (3, "ring", TCP), (3, "auto", MPI)],
    indirect=["transport"],
)
@both
def test_one_host(size: int, way: str) -> None:
    check_one_host(size, way)


@of_mpi
def test_one_host_by_collectives_of_mpi() -> None:
    check_one_host(3, "mpi")


def check_two_hosts(slots: tuple[int, int], way: str, folder: Path) -> None:
    with two_hosts(folder, slots) as hosts:
        spelled = "+".join(map(str, slots))
        code, output = run_worker(sum(slots), "worker_backends", way, spelled, hosts=hosts)
    assert (code, content(output)) == (0, sum(slots)), output


@pytest.mark.parametrize(
    ("slots", "way", "transport"),
    [
        ((2, 2), "auto", TCP),
        ((1, 2), "ring", TCP),
        ((1, 2), "auto", TCP),
        pytest.param((2, 2), "auto", MPI, marks=pytest.mark.soak),
        ((1, 2), "ring", MPI),
        ((1, 2), "auto", MPI),
    ],
    indirect=["transport"],
)
@both
def test_two_hosts(slots: tuple[int, int], way: str, tmp_path: Path) -> None:
    check_two_hosts(slots, way, tmp_path)


@of_mpi
def test_two_hosts_by_collectives_of_mpi(tmp_path: Path) -> None:
    check_two_hosts((1, 2), "mpi", tmp_path)


@both
def test_ranks_that_do_not_see_each_others_files_are_hosts_of_their_own() -> None:
    code, output = run_worker(3, "worker_backends", "auto", "1+1+1", "apart")
    assert (code, content(output)) == (0, 3), output


@of_mpi
@pytest.mark.parametrize("way", ["ring", "mpi"])
def test_what_mpi_cannot_count_is_cut(way: str) -> None:
    code, output = run_worker(2, "worker_backends", way, "2", "small")
    assert (code, content(output)) == (0, 2), output


def survivors(output: str) -> dict[str, tuple[str, float]]:
    """Rank -> whom it missed, and after how many seconds."""
    found = re.findall(r"^rank (\d+) misses (\w+) after ([\d.]+) s$", output, re.M)
    return {rank: (missed, float(seconds)) for rank, missed, seconds in found}


def check_survivors(output: str) -> None:
    """Ranks 0 and 1 name rank 2, long before any limit of a wait."""
    found = survivors(output)
    assert set(found) == {"0", "1"}, output
    assert all(missed == "2" and seconds < 30 for missed, seconds in found.values()), output


@both
@pytest.mark.parametrize("arguments", [("shm",), ("ring",), ("auto", "receive")])
def test_a_killed_rank_is_named(arguments: tuple[str, ...]) -> None:
    _, output = run_worker(3, "worker_killed", *arguments)
    check_survivors(output)


@of_mpi
def test_a_killed_rank_is_named_in_a_collective_of_mpi() -> None:
    _, output = run_worker(3, "worker_killed", "mpi")
    check_survivors(output)


@both
@pytest.mark.parametrize("arguments", [("ring",), ("auto", "receive")])
def test_a_killed_rank_of_another_host_is_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with two_hosts(tmp_path, (2, 1)) as hosts:
        _, output = run_worker(3, "worker_killed", *arguments, hosts=hosts)
    check_survivors(output)


@both
def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    command = ranks(2, sys.executable, "-m", "tests.parallel.worker_killed", "shm")
    run_command(command, TMPDIR=str(tmp_path))
    left = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hvdlite")], left
