"""Real jobs: start, parts of the world, and every way to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import NUMPY
from tests.limits import HANG_SECONDS
from tests.parallel.hosts import two_hosts
from tests.parallel.jobs import (
    MPI,
    TCP,
    TCP_BY_MPIRUN,
    environment,
    program,
    ranks,
    run_command,
    run_program,
)

both = pytest.mark.usefixtures("transport")


def check(size: int, *names: str, well: int | None = None, **variables: str) -> str:
    """Run programs; `well` of the ranks must end well (all of them, unless one is to die)."""
    done = run_program(size, *names, **variables)
    expected = dict.fromkeys(names, size if well is None else well)
    assert {n: done.stdout.count(f"rank done: {n}\n") for n in names} == expected, done.stdout
    if well is None:
        assert done.returncode == 0, done.stdout
    return done.stdout


@both
def test_programs_in_one_job_with_a_shutdown_after_each(transport: str) -> None:
    """The last one ends without a shutdown, rank 0 long before the others."""
    programs = ["collectives", "planes", "again", "parts", "process_sets_of_lists", "interrupted"]
    of_mpi = ["communicators", "process_sets"] if transport == MPI else []
    check(4, *programs, *of_mpi, "forks_a_child_that_ends", "leaves_early")


@pytest.mark.parametrize("by_mpirun", [TCP_BY_MPIRUN], indirect=True)
@pytest.mark.usefixtures("by_mpirun")
def test_communicators() -> None:
    check(4, "communicators", "process_sets")


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        *((1, TCP), (8, TCP)),
        *(pytest.param(size, MPI, marks=pytest.mark.soak) for size in (1, 8)),
    ],
    indirect=["transport"],
)
@both
def test_every_collective(size: int) -> None:
    check(size, "collectives")


def test_every_data_plane_of_three_ranks() -> None:
    check(3, "planes")


@pytest.mark.parametrize(
    ("plane", "transport"),
    [("auto", TCP), ("ring", TCP), ("auto", MPI), ("mpi", MPI)],  # test_backends.py has more.
    indirect=["transport"],
)
@both
def test_two_hosts(plane: str, tmp_path: Path) -> None:
    with two_hosts(tmp_path, (2, 2)) as hosts:
        command = ranks(4, *program("collectives"), hosts=hosts, preload=NUMPY)
        variables = {"HVDLITE_ALLREDUCE": plane, "HVDLITE_DATA_PLANE": plane, "HOSTS": "2"}
        done = run_command(command, **variables)
    assert done.stdout.count("rank done") == 4 and done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("victim", "transport"),
    [
        *(("0", TCP), ("3", TCP), ("0", MPI)),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in [("1", TCP), ("2", TCP), ("3", MPI)]
        ),
    ],
    indirect=["transport"],
)
@both
def test_a_rank_that_is_killed_on_another_host_is_named(victim: str, tmp_path: Path) -> None:
    with two_hosts(tmp_path, (2, 2)) as hosts:
        done = run_command(ranks(4, *program("killed"), hosts=hosts, preload=NUMPY), VICTIM=victim)
    assert done.stdout.count("rank done") == 3, done.stdout


@both
def test_a_killed_rank_is_named_by_the_others_within_seconds() -> None:
    check(3, "killed", well=2)


@both
def test_a_rank_that_raises_ends_the_others() -> None:
    output = check(3, "raises", well=2)
    assert "the data is broken" in output


def test_a_rank_that_shuts_down_on_its_way_out_says_why() -> None:
    output = check(3, "raises_and_shuts_down", well=2)
    assert "RuntimeError" in output and "the data is broken" in output  # lines of ranks may mix


def test_ranks_that_disagree_print_their_own_lines_alone() -> None:
    output = run_command(ranks(2, *program("disagrees"))).stdout  # each by an interpreter
    shown = {Path(file).name for file in re.findall(r'File "([^<"]+)"', output)}
    assert shown == {"programs.py"}, output
    assert "ranks disagree on shape: rank 0 has (3,), rank 1 has (4,)" in output


def test_a_script_that_forgets_shutdown_ends_well() -> None:  # test_start.py has it over MPI.
    check(3, "forgets_shutdown")


@pytest.mark.parametrize(
    ("how", "transport"),
    [("end of script", TCP), ("shutdown", TCP), ("kill", TCP), ("kill", MPI)],
    indirect=["transport"],
)
@both
def test_who_waits_in_join_hears_of_a_rank_that_leaves(how: str) -> None:
    well = 2 if how == "kill" else 3
    check(3, "leaves_a_join", well=well, HOW=how, HVDLITE_STALL_CHECK_DISABLE="1")


IN_CIRCLES = "ranks wait for each other, and none of them will ever go on"


@pytest.mark.parametrize("hosts", [(2,), (2, 2)])
def test_ranks_that_wait_for_each_other_are_told_so_at_once(
    hosts: tuple[int, ...], tmp_path: Path
) -> None:
    """Long before the 60 s after which a late rank is reported."""
    size = sum(hosts)
    variables = {"HOW": "at once", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "8"}
    if len(hosts) == 1:
        done = run_program(size, "waits_for_each_other", **variables)
    else:
        with two_hosts(tmp_path, (2, 2)) as places:
            words = program("waits_for_each_other")
            command = ranks(size, *words, hosts=places, preload=NUMPY)
            done = run_command(command, **variables)
    before, found, after = done.stdout.partition(f"{size} {IN_CIRCLES}")
    assert found and "stalled" not in before, done.stdout
    lines = after.splitlines()[1 : 2 * size + 1]
    for rank, (wait, place) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        name = "ab"[rank % 2]
        others = ", ".join(str(each) for each in range(size) if each % 2 != rank % 2)
        plural = "s" if size > 2 else ""
        expected = f"rank {rank} waits for 'allreduce.{name}', not yet submitted by rank{plural}"
        assert f"{expected} {others}:" in wait, done.stdout
        assert re.search(r"programs\.py, line \d+, in total: result = hvd.allreduce", place), place


@pytest.mark.parametrize("how", ["later", "in a thread"])
def test_a_rank_that_works_is_waited_for_in_silence(how: str) -> None:
    assert "for each other" not in check(2, "waits_for_each_other", HOW=how)


@both
def test_ranks_meet_in_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    assert "count as" not in check(2, "collectives", TMPDIR=folder)


@both
def test_a_forked_child_is_no_rank_and_does_not_hide_a_death() -> None:
    output = check(2, "forks", well=1)
    sleeper = re.search(r"sleeper (\d+)", output)
    assert sleeper is not None
    os.kill(int(sleeper.group(1)), signal.SIGKILL)


def test_without_a_launcher_a_script_is_a_job_of_one_rank() -> None:
    script = (
        "import sys, numpy as np, hvdlite.numpy as hvd\n"
        "hvd.init()\n"
        "assert (hvd.size(), hvd.rank(), hvd.local_size()) == (1, 0, 1)\n"
        "assert hvd.allreduce(np.full(2, 3), op=hvd.Sum).tolist() == [3, 3]\n"
        "assert 'mpi4py' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], env=environment(), check=True, timeout=HANG_SECONDS
    )
