"""Training with TensorFlow on real ranks, twice in one process, as one process would."""

from __future__ import annotations

import sys

import pytest

from tests.parallel.jobs import ranks, run_command

pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
PRELOAD = ("tests.lean", "hvdlite.tf", "keras")
LIMIT_SECONDS = 200
pytestmark = [pytest.mark.timeout(LIMIT_SECONDS + 20), pytest.mark.usefixtures("transport")]


def test_training() -> None:
    size = 2  # on two cores TensorFlow starts slowly enough
    command = ranks(size, sys.executable, "-m", "tests.parallel.worker_tf", preload=PRELOAD)
    result = run_command(command, timeout=LIMIT_SECONDS, TF_CPP_MIN_LOG_LEVEL="3")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout
