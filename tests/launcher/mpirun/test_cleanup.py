"""A job removes its own files, whatever happens to it, and never those of another job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.mpirun import mpirun
from hvdlite.launcher.mpirun.mpi import OPENMPI, Mpi
from hvdlite.launcher.mpirun.mpirun import MpirunJob, remove_segments, segments_of
from tests.launcher.jobs import RANK, launch, start, wait_until_up
from tests.limits import HANG_SECONDS
from tests.parallel.jobs import environment

pytestmark = [
    pytest.mark.usefixtures("with_mpirun"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm and /proc"),
]
# What Open MPI and MPICH name their shared memory.
NAMES = ("sm_segment.other.{uid}.3a7c0001.0", "vader_segment.other.{uid}.1.0", "mpich_shm_{uid}")


def test_a_failed_job_leaves_the_files_of_others_alone() -> None:
    script = (
        "if rank == 0:\n"
        "    for name in sys.argv[1:]: open(name, 'x').close()\n"  # no process maps them
        "    os.kill(os.getpid(), 9)\n"
        "time.sleep(600)"
    )
    unique = f"test{os.getpid()}"
    foreign = [f"/dev/shm/{name.format(uid=unique)}" for name in NAMES]
    try:
        done = launch("-np", "2", sys.executable, "-c", RANK + script, *foreign)
        assert done.returncode == 137
        assert [name for name in foreign if not os.path.exists(name)] == []
    finally:
        for name in foreign:
            Path(name).unlink(missing_ok=True)


def test_segments_of_a_job_are_those_that_its_ranks_map() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mine, other, data = (f"{folder}/{n}" for n in ("mpich_shm_a", "mpich_shm_b", "data"))
        code = (
            "import mmap, sys\n"
            "files = [open(name, 'wb+') for name in sys.argv[1:]]\n"
            "for file in files: file.truncate(4096)\n"
            "maps = [mmap.mmap(file.fileno(), 4096) for file in files]\n"
            "print('up', flush=True); sys.stdin.read()"
        )

        def mapper(*names: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *names],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            return process

        processes = [mapper(mine, data), mapper(other)]
        try:
            found = segments_of({processes[0].pid})
            assert found == {mine.encode()}
            remove_segments(found)
            assert sorted(os.listdir(folder)) == ["data", "mpich_shm_b"]
        finally:
            for process in processes:
                process.communicate()


def test_shared_memory_of_ranks_that_are_killed_goes_with_the_job() -> None:
    script = "import mpi4py.MPI\nprint('up', flush=True)\ntime.sleep(600)"
    with start("-np", "2", sys.executable, "-c", RANK + script) as process:
        wait_until_up(process, 2)
        for number in (signal.SIGTERM, signal.SIGTERM):  # the second one kills
            process.send_signal(number)
        process.communicate(timeout=10)  # `start` looks for what is left


NOBODY = """
import os, pwd, sys
def unknown(uid): raise KeyError(uid)
pwd.getpwuid = unknown
from hvdlite.launcher.cli import main
script = "import os; print(os.environ['HOME'], os.path.isdir(os.environ['HOME']))"
sys.exit(main(["-np", "2", sys.executable, "-c", script]))
"""


def test_without_a_home_ranks_get_the_folder_of_the_job(tmp_path: Path) -> None:
    environ = environment(TMPDIR=str(tmp_path))
    environ.pop("HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", NOBODY], env=environ, cwd=tmp_path, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (home,) = {line.partition(":")[2] for line in done.stdout.splitlines()}
    assert home.startswith(f"{tmp_path}/hvdlite-run-")
    assert home.endswith(" True")
    assert os.listdir(tmp_path) == []


def test_numbers_that_may_be_those_of_others_are_not_signalled(
    signalled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a shell that has ended, and of an mpirun that was waited for."""
    options = LaunchOptions(num_proc=1, command=("true",), variables={}, start_timeout_seconds=30.0)
    job = MpirunJob(options, os.environ, Mpi(OPENMPI, "mpirun", "MPI", 5))
    sessions: list[bool] = []
    monkeypatch.setattr(job, "command_line", lambda: ["/bin/sh", "-c", "exit 3"])
    monkeypatch.setattr(
        mpirun, "kill_session", lambda pid: sessions.append(os.path.exists(f"/proc/{pid}"))
    )
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        job.first_failure.receive("start", 0, [str(other.pid), "here"])
        job.first_failure.receive("exit", 0, ["3"])
        job.begin_end()
        assert job.run().code == 3
        other.kill()
    assert (sessions, signalled) == ([True], [])
