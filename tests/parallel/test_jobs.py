"""Real jobs: start, parts of the world, and every way to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.hosts import two_hosts
from tests.parallel.jobs import MPI, TCP, environment, program, ranks, run_command, run_program

both = pytest.mark.usefixtures("transport")


def check(size: int, name: str, well: int | None = None, **variables: str) -> str:
    """Run a program; `well` of its ranks must end well (all of them, unless one is to die)."""
    done = run_program(size, name, **variables)
    assert done.stdout.count("rank done") == (size if well is None else well), done.stdout
    if well is None:
        assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        *((1, TCP), (2, TCP), (8, TCP), (2, MPI)),
        *(pytest.param(size, MPI, marks=pytest.mark.soak) for size in (1, 8)),
    ],
    indirect=["transport"],
)
@both
def test_every_collective(size: int) -> None:
    check(size, "collectives")


@both
@pytest.mark.parametrize("plane", ["shm", "ring", "hierarchical"])
def test_every_data_plane(plane: str) -> None:
    other = "ring" if plane == "hierarchical" else plane
    check(3, "collectives", HVDLITE_ALLREDUCE=plane, HVDLITE_DATA_PLANE=other)


@pytest.mark.usefixtures("over_mpi")
def test_the_data_plane_of_mpi() -> None:
    check(3, "collectives", HVDLITE_ALLREDUCE="mpi", HVDLITE_DATA_PLANE="mpi")


def check_two_hosts(folder: Path, plane: str) -> None:
    with two_hosts(folder, (2, 2)) as hosts:
        command = ranks(4, *program("collectives"), hosts=hosts)
        variables = {"HVDLITE_ALLREDUCE": plane, "HVDLITE_DATA_PLANE": plane, "HOSTS": "2"}
        done = run_command(command, **variables)
    assert done.stdout.count("rank done") == 4 and done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("plane", "transport"),
    [("auto", TCP), ("ring", TCP), ("auto", MPI)],  # test_backends.py has the ring over MPI.
    indirect=["transport"],
)
@both
def test_two_hosts(plane: str, tmp_path: Path) -> None:
    check_two_hosts(tmp_path, plane)


@pytest.mark.usefixtures("over_mpi")
def test_two_hosts_with_the_data_plane_of_mpi(tmp_path: Path) -> None:
    check_two_hosts(tmp_path, "mpi")


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
        done = run_command(ranks(4, *program("killed"), hosts=hosts), VICTIM=victim)
    assert done.stdout.count("rank done") == 3, done.stdout


@both
def test_init_after_shutdown() -> None:
    check(3, "again")


@both
def test_a_barrier_that_a_signal_ended_and_barriers_of_several_threads() -> None:
    check(2, "interrupted")


@both
def test_parts_of_the_world() -> None:
    check(4, "parts")


@pytest.mark.usefixtures("by_mpirun")
def test_parts_of_the_world_by_communicators() -> None:
    check(4, "communicators")


@both
def test_process_sets() -> None:
    check(4, "process_sets_of_lists")


@pytest.mark.usefixtures("by_mpirun")
def test_process_sets_from_communicators() -> None:
    check(4, "process_sets")


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


@both
def test_a_script_that_forgets_shutdown_ends_well() -> None:
    check(3, "forgets_shutdown")


@both
def test_a_rank_may_end_before_the_others() -> None:
    check(3, "leaves_early")


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        *(("end of script", TCP), ("exit", TCP), ("shutdown", TCP), ("kill", TCP)),
        *(("exit", MPI), ("kill", MPI)),
    ],
    indirect=["transport"],
)
@both
def test_who_waits_in_join_hears_of_a_rank_that_leaves(how: str) -> None:
    done = run_program(3, "leaves_a_join", HOW=how, HVDLITE_STALL_CHECK_DISABLE="1")
    assert done.stdout.count("rank done") >= 2, done.stdout


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
            command = ranks(size, *program("waits_for_each_other"), hosts=places)
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


@both
def test_a_forked_child_that_ends_normally_ends() -> None:
    check(2, "forks_a_child_that_ends")


@both
def test_init_after_a_failed_init() -> None:
    check(2, "other_settings")


@pytest.mark.usefixtures("over_mpi")
def test_the_mpi_backend_runs_everything_when_asked_for(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    planes = {"HVDLITE_ALLREDUCE": "mpi", "HVDLITE_DATA_PLANE": "mpi"}
    check(2, "collectives", HVDLITE_TIMELINE=str(timeline), **planes)
    activities = {event.get("name") for event in json.loads(timeline.read_text())}
    for collective in ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER"):
        assert f"MPI_{collective}" in activities or collective == "BROADCAST", activities
        assert f"SHM_{collective}" not in activities


@both
def test_two_versions_in_one_job_are_an_error_at_init() -> None:
    check(3, "other_version")


def test_a_timeline_that_cannot_be_written_is_an_error_at_init() -> None:
    check(2, "wrong_timeline", HVDLITE_TIMELINE="/nonexistent/timeline.json")


def test_without_a_launcher_a_script_is_a_job_of_one_rank() -> None:
    script = (
        "import sys, numpy as np, hvdlite.numpy as hvd\n"
        "hvd.init()\n"
        "assert (hvd.size(), hvd.rank(), hvd.local_size()) == (1, 0, 1)\n"
        "assert hvd.allreduce(np.full(2, 3), op=hvd.Sum).tolist() == [3, 3]\n"
        "assert 'mpi4py' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=60)
