"""``python -m hvdlite.bench`` as a job: all commands run, and a wrong result fails the job."""

from __future__ import annotations

import re
import sys

import pytest

from tests.forks import NUMPY
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, run_command

pytestmark = pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
LAUNCHER = [sys.executable, "-m", "hvdlite.launcher", "-np", "2"]


def test_a_job_runs_every_command() -> None:
    done = run_command([*LAUNCHER, sys.executable, "-m", "hvdlite.bench"], preload=NUMPY)
    assert done.returncode == 0, done.stdout
    titles = re.findall(r"(\w+), 2 ranks", done.stdout)
    assert titles == ["helloworld", "ring", "latency", "bandwidth"], done.stdout


def test_a_job_with_a_wrong_result_fails() -> None:
    program = (
        "import sys, hvdlite.numpy as hvd; from hvdlite import bench; real = hvd.allreduce_;"
        "hvd.allreduce_ = lambda array, **options: real(array, **options) + hvd.rank();"
        "sys.exit(bench.main(['latency', '--bytes', '8']))"
    )
    done = run_command([*LAUNCHER, sys.executable, "-c", program], preload=NUMPY)
    assert done.returncode == 1, done.stdout
    assert "allreduce of 8 bytes: rank 1 has 2.0 at index 0, and not 1.0" in done.stdout
