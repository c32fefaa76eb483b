"""Training with Keras on real ranks, with each of its backends and with Keras 2."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tests.parallel.jobs import ranks, run_command


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize(
    ("size", "needed", "variables"),
    [
        pytest.param(3, "tensorflow", {}, id="Keras 3"),
        pytest.param(3, "torch", {"KERAS_BACKEND": "torch"}, id="torch"),
        pytest.param(2, "tf_keras", {"TF_USE_LEGACY_KERAS": "1"}, id="Keras 2"),
    ],
)
def test_training(size: int, needed: str, variables: dict[str, str]) -> None:
    for module in ("keras", needed):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = ranks(size, sys.executable, "-m", "tests.parallel.worker_keras")
    result = run_command(command, timeout=100, TF_CPP_MIN_LOG_LEVEL="2", **variables)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout
