"""Ranks on another host: one that has other temporary files, made by a mount namespace."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.jobs import IMPATIENT, RANK, executable, start, wait_until_up
from tests.launcher.mpirun import with_openmpi
from tests.limits import HANG_SECONDS

# Called instead of ssh: AGENT HOST COMMAND. There, the launcher's directory does not exist.
AGENT = """\
shift
exec unshare -m sh -c "mount -t tmpfs none '$TMPDIR' && $*"
"""


def may_not_mount() -> bool:
    if shutil.which("unshare") is None:
        return True
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode != 0


pytestmark = [
    pytest.mark.usefixtures("with_mpirun"),
    with_openmpi,
    pytest.mark.skipif(may_not_mount(), reason="may not mount in a namespace of its own"),
]


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    agent = executable(tmp_path / "agent", AGENT)
    hosts = ("-np", "3", "-H", "localhost:1,other-host:2")
    return (*hosts, f"--mpi-args=--prtemca plm_ssh_agent {agent}", sys.executable, "-c")


def test_output_environment_and_place(words: tuple[str, ...]) -> None:
    names = ("MINE", *(f"HVDLITE_{n}_{m}" for n in ("LOCAL", "CROSS") for m in ("RANK", "SIZE")))
    script = f"print('out', rank, *map(os.environ.get, {names})); "
    script += "sys.stderr.write(f'no end {rank}')"
    with start(*words, RANK + script, MINE="x") as process:
        out, err = process.communicate(timeout=HANG_SECONDS)
    places = ("0 1 0 2", "0 2 1 2", "1 2 0 1")
    said = [f"[{rank}]<stdout>:out {rank} x {place}" for rank, place in enumerate(places)]
    assert sorted(out.splitlines()) == said
    assert sorted(err.splitlines()) == [f"[{r}]<stderr>:no end {r}" for r in range(3)]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("end", "code", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", 137, "rank 2 was killed by SIGKILL"),
        ("raise ValueError('bad')", 1, "rank 2 failed: ValueError: bad (exit code 1)"),
    ],
)
def test_a_failure_there_ends_the_job(
    words: tuple[str, ...], end: str, code: int, sentence: str
) -> None:
    script = f"sys.stderr.write('last\\n')\nif rank == 2: {end}\ntime.sleep(600)"
    with start(*words, RANK + script, program=IMPATIENT) as process:
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code
    assert f"hvdlite-run: {sentence}" in err
    assert "[2]<stderr>:last\n" in err


def test_a_rank_there_says_that_it_is_only_a_victim(words: tuple[str, ...]) -> None:
    script = (
        "from hvdlite.common.base.errors import HorovodInternalError as Internal\n"
        "from hvdlite.common.base.report_failure import report_uncaught\n"
        "report_uncaught()\n"
        "if rank == 2: raise Internal('rank 1 is gone', 1)\n"
        "import atexit; atexit.register(time.sleep, 1)\n"
        "if rank == 1: raise ValueError('it was me')\n"
    )
    with start(*words, RANK + script) as process:
        _, err = process.communicate(timeout=HANG_SECONDS)
    lines = err.splitlines()
    assert lines[-1].startswith("hvdlite-run: rank 1 failed: ValueError: it was me (exit code 1)")
    assert [line for line in lines if line.startswith("[2]")] == [
        "[2]<stderr>:HorovodInternalError: rank 1 is gone (<string>, line 7)"
    ]


def test_a_signal_ends_ranks_there(words: tuple[str, ...]) -> None:
    with start(*words, RANK + "print('up', flush=True); time.sleep(600)") as process:
        wait_until_up(process, 3)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
