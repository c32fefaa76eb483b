"""hvdlite-run over MPICH, for real where that is the MPI of this environment."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from hvdlite.launcher.mpi import HYDRA, find_all
from tests.launcher.jobs import RANK, launch, start

USED = next(find_all(os.environ), None)
pytestmark = pytest.mark.skipif(
    USED is None or USED.kind != HYDRA,
    reason="MPICH is not the MPI here: make an environment with hvdlite[mpich]",
)


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", RANK + script)


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


@pytest.mark.parametrize("name", ["mpich", "MPICH", "impi"])
def test_mpich_may_be_chosen_by_name(name: str) -> None:
    done = launch("-np", "3", *python(JOB), MPI4PY_MPIABI=name)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(number: signal.Signals) -> None:
    with start("-np", "2", *python("print('up'); time.sleep(600)")) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().endswith("up\n")
        process.send_signal(number)
        process.communicate(timeout=5)
    assert process.returncode == 128 + number
