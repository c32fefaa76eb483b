"""hvdlite-run with a real MPI: output, exit codes, failures, signals, and what is left: nothing."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

import hvdlite
from hvdlite.launcher import check_build
from hvdlite.launcher.cli import main
from hvdlite.launcher.hosts.resources import cores
from tests.launcher.jobs import (
    IMPATIENT,
    LAUNCHER,
    MARK,
    SHARED_MEMORY,
    executable,
    launch,
    processes,
    start,
    wait_until_up,
)
from tests.launcher.mpirun import with_openmpi
from tests.launcher.other_hosts import python

pytestmark = [
    pytest.mark.usefixtures("launcher"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

over_mpirun = pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
over_agents = pytest.mark.parametrize("launcher", ["ssh"], indirect=True)
# An MPI that no mpirun has started leaves files behind when it is killed, as in any other process.
WITH_MPI = {"ssh": "", "mpirun": "import mpi4py.MPI\n"}
SLEEP = "time.sleep(600)\n"
END_SECONDS = 5.0  # from a signal to the end of the last process; promised to users


def test_every_rank_runs_with_its_arguments_and_environment(tmp_path: Path) -> None:
    """More ranks than cores; their lines are marked, whole, and written to files, too."""
    size, odd = cores() + 1, "a b'c\"d$HOME\\ \n*"
    script = """
print('out', rank, sys.argv[1:] == [os.environ['ODD'], '--np'], repr(sys.stdin.read()))
print(os.environ['HVDLITE_CYCLE_TIME'], os.environ['HVDLITE_FUSION_THRESHOLD'])
print('x' * 300_000); print('\\n'.join(['y'] * 20_000))
print('err', rank, file=sys.stderr)
"""
    words = ("-np", str(size), "--cycle-time-ms", "2", "--fusion-threshold-mb", "1")
    words += ("--output-filename", str(tmp_path / "out"))
    done = launch(*words, *python(script), odd, "--np", ODD=odd, HVDLITE_CYCLE_TIME="7")
    for rank in range(size):
        said = [f"out {rank} True ''", "2 1048576", "x" * 300_000, *["y"] * 20_000]
        text = (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
        assert text.splitlines() == said
        mark = f"[{rank}]<stdout>:"
        lines = done.stdout.splitlines()
        assert [line.removeprefix(mark) for line in lines if line.startswith(mark)] == said
    assert sorted(done.stderr.splitlines()) == [f"[{r}]<stderr>:err {r}" for r in range(size)]
    assert done.returncode == 0


@with_openmpi
@over_mpirun
def test_verbose_says_what_is_run() -> None:
    done = launch("-np", "1", "--verbose", "true")
    assert "mpirun -np 1" in done.stderr
    assert "OMPI_MCA_osc=^ucx" in done.stderr


JOB = """
import numpy as np, hvdlite.numpy as hvd
hvd.init()
assert hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum).tolist() == [6.0] * 3
"""
# Tells whether the variables of each name are what hvdlite says.
TELL = """
names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
own = [getattr(hvd, name)() for name in names]
told = [[int(os.environ.get(f"{prefix}_{name.upper()}", -1)) for name in names]
        for prefix in ("HVDLITE", "HOROVOD")]
print("HVDLITE", told[0] == own, "HOROVOD", told[1] == own)
"""


def test_a_job_of_hvdlite_with_a_timeline(tmp_path: Path) -> None:
    """Its variables are what hvdlite says."""
    timeline = tmp_path / "timeline.json"
    words = ("-np", "3", "--timeline-filename", str(timeline))
    done = launch(*words, *python(JOB + TELL))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("HVDLITE True HOROVOD False") == 3
    assert "ALLREDUCE" in timeline.read_text()


def test_the_rank_that_fails_is_named_not_the_ones_that_notice() -> None:
    script = JOB + "if rank == 1: sys.exit(5)\nwhile True: hvd.allreduce(np.ones(3), name='more')"
    done = launch("-np", "3", *python(script))
    assert done.returncode == 5
    assert done.stderr.count("HorovodInternalError: ") == 2
    assert done.stderr.count("rank 1 has ended by sys.exit(5) (<string>, line") == 2
    assert "hvdlite-run: rank 1 failed with exit code 5; the job has been ended" in done.stderr


def test_the_first_rank_that_fails_ends_the_job() -> None:
    script = "if rank == 1:\n    print('last words', flush=True); os._exit(7)\n" + SLEEP
    done = launch("-np", "3", *python(script), program=IMPATIENT)
    assert done.returncode == 7
    assert "[1]<stdout>:last words\n" in done.stdout
    assert done.stderr == "hvdlite-run: rank 1 failed with exit code 7; the job has been ended\n"


def test_the_other_ranks_may_still_say_something(launcher: str) -> None:
    script = (
        WITH_MPI[launcher]
        + "if rank == 0: os.kill(os.getpid(), 9)\n"
        + "time.sleep(0.3 * rank); print('mine', rank)\nos._exit(1)"
    )
    done = launch("-np", "4", *python(script))
    assert [f"[{r}]<stdout>:mine {r}\n" in done.stdout for r in (1, 2, 3)] == [True] * 3
    assert "hvdlite-run: rank 0 " in done.stderr


def test_a_killed_rank_is_named_with_its_signal_and_its_child_processes_end() -> None:
    script = (
        "import subprocess\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "if rank == 1: os.kill(os.getpid(), 9)\n" + SLEEP
    )
    done = launch("-np", "2", *python(script), program=IMPATIENT)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL (exit code 137); the job has been ended" in done.stderr


@with_openmpi
@over_mpirun
def test_a_rank_that_is_killed_with_its_shell_is_named() -> None:
    script = "if rank == 1: os.killpg(0, 9)\n" + SLEEP
    done = launch("-np", "2", *python(script), program=IMPATIENT)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed together with its shell" in done.stderr


def test_the_culprit_is_named_even_if_its_victim_is_gone_first() -> None:
    script = (
        "from hvdlite.common.base.errors import HorovodInternalError\n"
        "from hvdlite.common.base.report_failure import report_uncaught\n"
        "report_uncaught()\n"
        "if rank == 0: raise HorovodInternalError('rank 1 is gone', 1)\n"
        "import atexit; atexit.register(time.sleep, 600)\n"
        "raise ValueError('it was me')\n"
    )
    done = launch("-np", "2", *python(script))
    assert "it was me" in done.stderr
    assert "hvdlite-run: rank 1 failed: ValueError: it was me (exit code 1); the" in done.stderr


def test_names_that_are_no_text_are_names_all_the_same(tmp_path: Path) -> None:
    folder = os.path.join(tmp_path, os.fsdecode(b"caf\xe9 'd"))
    os.mkdir(folder)
    script = os.path.join(folder, "train.py")
    Path(script).write_text(
        "import os, sys; print(os.path.isdir(os.environ['TMPDIR'])); raise KeyError(__file__)"
    )
    out = os.path.join(folder, "out")
    done = launch("--verbose", "--output-filename", out, "-np", "2", script, TMPDIR=folder)
    assert done.returncode == 1
    assert done.stdout.count(":True\n") == 2
    assert "failed alike: KeyError: " in done.stderr
    assert sorted(os.listdir(folder)) == ["out", "train.py"]


IGNORE = """
import signal
if rank == 1:
    for n in (2, 15): signal.signal(n, signal.SIG_IGN)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_process_in_time(number: signal.Signals, launcher: str) -> None:
    """Two ranks obey, and one does not."""
    script = WITH_MPI[launcher] + IGNORE + "print('up', flush=True)\n" + SLEEP
    with start("-np", "3", *python(script)) as process:
        wait_until_up(process, 3)
        process.send_signal(number)
        _, err = process.communicate(timeout=END_SECONDS)
        assert process.returncode == 128 + number
        assert f"hvdlite-run: ended by {number.name}" in err
        if number == signal.SIGINT:
            assert err.count("KeyboardInterrupt") == 2


def test_a_launcher_under_nohup_goes_on_after_a_hangup() -> None:
    script = "print('up', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    with (
        tempfile.TemporaryDirectory() as folder,
        start("-np", "2", *python(script), folder + "/end", ignored=[signal.SIGHUP]) as process,
    ):
        wait_until_up(process, 2)
        process.send_signal(signal.SIGHUP)
        Path(folder, "end").touch()
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    script = "print('up', flush=True)\n" + SLEEP
    mark = str(tmp_path)
    with start("-np", "2", *python(script), **{"TMPDIR": mark, MARK: mark}) as process:
        wait_until_up(process, 2)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while processes(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        pattern, deadline = f"hvdlite-run-{process.pid}-*", time.monotonic() + 30
        while left := [*SHARED_MEMORY.glob(pattern), *tmp_path.glob(pattern)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@over_agents
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_a_rank_that_crashes_shows_its_stack(wanted: str) -> None:
    script = "import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()"
    variables = {} if wanted == "1" else {"PYTHONFAULTHANDLER": "0"}
    done = launch("-np", "1", *python(script), **variables)
    assert done.returncode == 128 + signal.SIGSEGV
    assert ("in crash" in done.stderr) == (wanted == "1")


@over_agents
def test_a_working_directory_that_was_deleted_is_named(tmp_path: Path) -> None:
    command = f'mkdir {tmp_path}/x; cd {tmp_path}/x; rmdir {tmp_path}/x; exec "$@"'
    done = launch("-np", "1", "true", program=("sh", "-c", command, "sh", *LAUNCHER))
    assert done.returncode == 2
    assert done.stderr == (
        "hvdlite-run: the working directory has been deleted: change into one that exists\n"
    )


@over_agents
def test_output_that_nobody_reads_ends_the_job() -> None:
    with start("-np", "2", *python("while True: print('more')")) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=30) == 128 + signal.SIGPIPE


def test_a_rank_may_end_long_before_the_others() -> None:
    done = launch("-np", "2", *python("time.sleep(1.5 * rank); print('end', rank)"))
    assert done.returncode == 0
    assert done.stdout == "[0]<stdout>:end 0\n[1]<stdout>:end 1\n"


@over_mpirun
def test_a_wrong_argument_for_mpirun_is_its_own_error() -> None:
    done = launch("-np", "2", "--mpi-args=--no-such-thing", "true")
    assert done.returncode not in (0, None)
    assert "no-such-thing" in done.stderr
    assert "ended with exit code" in done.stderr


@with_openmpi
@over_mpirun
def test_ranks_that_do_not_start_in_time_end_the_job(tmp_path: Path) -> None:
    slow = executable(tmp_path / "slow", "exec sleep 600")
    words = ("-np", "2", "-H", "no-such-host:2", "--start-timeout", "1")
    done = launch(*words, "--mpi-args", f"--prtemca plm_ssh_agent {slow}", "true")
    assert done.returncode == 1
    missing = "2 of 2 ranks (0, 1) on no-such-host had not started after 1 seconds"
    assert f"hvdlite-run: {missing} (--start-timeout)" in done.stderr
    assert done.stderr.count("\n") == 1


@over_agents
@pytest.mark.parametrize(
    ("words", "level", "said"),
    [
        (["--bogus", "touch"], "info", "unknown flag --bogus"),
        (["-np", "0", "touch"], "info", "-np/--num-proc: "),
        (["-np", "1", "train.py"], "info", "the command 'train.py': there is no such file\n"),
        (["-np", "1", "/tmp"], "info", "the command '/tmp': it is a folder"),
        (["-np", "1", "touch"], "loud", "HVDLITE_LOG_LEVEL"),
    ],
)
def test_nothing_is_started_when_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    words: list[str], level: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", level)
    assert main([*words, str(tmp_path / "started")]) == 2
    error = capfd.readouterr().err
    assert error.startswith("hvdlite-run: ") and said in error and error.count("\n") == 1
    assert not (tmp_path / "started").exists()


@with_openmpi
@over_agents
def test_version_and_build(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_build, "COMPILED_PATHS", ())
    monkeypatch.setattr(check_build, "DEVICE_PATHS", ())
    assert main(["--version"]) == main(["--check-build"]) == 0
    first, *lines = capfd.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert first == hvdlite.__version__
    for said in ("[X] NumPy", "[X] Open MPI", "[X] MPI (mpi4py", "[X] TCP", "<- used", "[X] ring"):
        assert said in text
