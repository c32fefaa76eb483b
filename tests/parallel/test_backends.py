"""The backends and the transport with real ranks under mpirun, on one host and on two."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parallel.hosts import two_hosts
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, mpirun, run_command

pytestmark = pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)


def run_worker(
    size: int, worker: str, *arguments: str, before: Sequence[str] = (), options: Sequence[str] = ()
) -> tuple[int, str]:
    """Exit code and output of a worker of this folder on `size` ranks."""
    module = ("-m", f"tests.parallel.{worker}", *arguments)
    command = [*before, *mpirun(size, *options, sys.executable, *module)]
    result = run_command(command, timeout=90)
    return result.returncode, result.stdout


def content(output: str) -> int:
    """How many ranks were content."""
    return len(re.findall(r"^rank \d+ of \d+ is content$", output, re.M))


@pytest.mark.parametrize(
    ("size", "way"), [(1, "auto"), (2, "auto"), (3, "auto"), (3, "ring"), (3, "mpi")]
)
def test_one_host(size: int, way: str) -> None:
    code, output = run_worker(size, "worker_backends", way, str(size))
    assert (code, content(output)) == (0, size), output


@pytest.mark.parametrize(
    ("slots", "way"), [((2, 2), "auto"), ((1, 2), "ring"), ((1, 2), "mpi"), ((1, 2), "auto")]
)
def test_two_hosts(slots: tuple[int, int], way: str, tmp_path: Path) -> None:
    hosts = "+".join(map(str, slots))
    with two_hosts(tmp_path, slots) as (before, options):
        code, output = run_worker(
            sum(slots), "worker_backends", way, hosts, before=before, options=options
        )
    assert (code, content(output)) == (0, sum(slots)), output


def test_ranks_that_do_not_see_each_others_files_are_hosts_of_their_own() -> None:
    code, output = run_worker(3, "worker_backends", "auto", "1+1+1", "apart")
    assert (code, content(output)) == (0, 3), output


@pytest.mark.parametrize("way", ["ring", "mpi"])
def test_what_mpi_cannot_count_is_cut(way: str) -> None:
    code, output = run_worker(2, "worker_backends", way, "2", "small")
    assert (code, content(output)) == (0, 2), output


def survivors(output: str) -> dict[str, tuple[str, float]]:
    """Rank -> whom it missed, and after how many seconds."""
    found = re.findall(r"^rank (\d+) misses (\w+) after ([\d.]+) s$", output, re.M)
    return {rank: (missed, float(seconds)) for rank, missed, seconds in found}


def check_survivors(output: str) -> None:
    """Ranks 0 and 1 name rank 2, within the 5 seconds that are promised."""
    found = survivors(output)
    assert set(found) == {"0", "1"}, output
    assert all(missed == "2" and seconds < 5 for missed, seconds in found.values()), output


@pytest.mark.parametrize("arguments", [("shm",), ("ring",), ("mpi",), ("auto", "receive")])
def test_a_killed_rank_is_named(arguments: tuple[str, ...]) -> None:
    _, output = run_worker(3, "worker_killed", *arguments)
    check_survivors(output)


@pytest.mark.parametrize("arguments", [("ring",), ("auto", "receive")])
def test_a_killed_rank_of_another_host_is_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with two_hosts(tmp_path, (2, 1)) as (before, options):
        _, output = run_worker(3, "worker_killed", *arguments, before=before, options=options)
    check_survivors(output)


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    command = mpirun(2, sys.executable, "-m", "tests.parallel.worker_killed", "shm")
    run_command(command, TMPDIR=str(tmp_path))
    left = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hvdlite")], left
