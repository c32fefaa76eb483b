"""hvdlite-run over MPICH, for real where that is the MPI of this environment."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdlite.launcher.mpirun.mpi import HYDRA
from tests.launcher.jobs import executable, launch, start, wait_until_up
from tests.launcher.mpirun import USED
from tests.launcher.other_hosts import python
from tests.launcher.test_other_hosts import may_not_mount

pytestmark = [
    pytest.mark.usefixtures("with_mpirun"),
    pytest.mark.skipif(
        USED is None or USED.kind != HYDRA,
        reason="MPICH is not the MPI here: make an environment with hvdlite[mpich]",
    ),
]


def test_every_rank_runs() -> None:
    done = launch("-np", "4", *python("print(rank, os.environ['PMI_SIZE'])"))
    assert sorted(done.stdout.splitlines()) == [f"[{r}]<stdout>:{r} 4" for r in range(4)]
    assert (done.returncode, done.stderr) == (0, "")


JOB = """
import numpy as np, hvdlite.numpy as hvd
hvd.init()
assert hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum).tolist() == [6.0] * 3
"""


def test_a_job_of_hvdlite_ends_well() -> None:
    for _ in range(3):  # ranks leave at slightly different times
        done = launch("-np", "3", *python(JOB))
        assert (done.returncode, done.stderr) == (0, "")


def test_the_rank_that_fails_is_named_not_the_ones_that_notice() -> None:
    script = JOB + "if rank == 1: sys.exit(5)\nwhile True: hvd.allreduce(np.ones(3), name='more')"
    done = launch("-np", "3", *python(script))
    assert done.returncode == 5
    assert "hvdlite-run: rank 1 failed with exit code 5; the job has been ended" in done.stderr


@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(3)", 3)]
)
def test_the_first_rank_that_fails_ends_the_job(end: str, code: int) -> None:
    script = f"if rank == 1: {end}\ntime.sleep(0.5)\nprint('mine', flush=True)\ntime.sleep(600)"
    done = launch("-np", "3", *python(script))
    assert done.returncode == code
    assert done.stdout.count("mine") == 2
    assert "hvdlite-run: rank 1 " in done.stderr


# Called instead of ssh: OPTIONS HOST COMMAND. There, the launcher's directory does not exist.
SSH = """\
while [ "$1" != other ]; do shift; done
shift
exec unshare -m sh -c "mount -t tmpfs none '$TMPDIR' && $*"
"""


@pytest.mark.skipif(may_not_mount(), reason="may not mount in a namespace of its own")
def test_lines_of_ranks_on_another_host_are_whole(tmp_path: Path) -> None:
    """Each rank says its lines in parts, while others speak."""
    ssh = executable(tmp_path / "ssh", SSH)
    script = (
        "for line in range(30):\n"
        "    for part in range(3):\n"
        "        os.write(1, b'%d-%d-%d ' % (rank, line, part))\n"
        "        time.sleep(0.002 * (rank + part) % 0.007)\n"
        "    os.write(1, b'end\\n')"
    )
    words = ("-np", "4", "--no-check-hosts", "-H", "localhost:1,other:3")
    done = launch(*words, f"--mpi-args=-launcher-exec {ssh}", *python(script))
    whole = [
        f"[{rank}]<stdout>:{''.join(f'{rank}-{line}-{part} ' for part in range(3))}end"
        for rank in range(4) for line in range(30)
    ]  # fmt: skip
    assert sorted(done.stdout.splitlines()) == sorted(whole)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["mpich", "MPICH", "impi"])
def test_mpich_may_be_chosen_by_name(name: str) -> None:
    done = launch("-np", "3", *python(JOB), MPI4PY_MPIABI=name)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(number: signal.Signals) -> None:
    with start("-np", "2", *python("print('up'); time.sleep(600)")) as process:
        wait_until_up(process, 2)
        process.send_signal(number)
        process.communicate(timeout=20)
    assert process.returncode == 128 + number
