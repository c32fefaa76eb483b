"""Real ranks train with Keras 2, and Keras 3 on JAX and PyTorch; test_tf.py has TensorFlow."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tests.parallel.jobs import MPI, TCP, ranks, run_command

PRELOAD = ("tests.lean", "tests.keras.training")
KERAS3 = (3, "tensorflow", {})
TORCH = (3, "torch", {"KERAS_BACKEND": "torch"})
JAX = (3, "jax", {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"})
KERAS2 = (2, "tf_keras", {"TF_USE_LEGACY_KERAS": "1"})


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize(
    ("size", "needed", "variables", "transport"),
    [
        pytest.param(*KERAS3, MPI, id="Keras 3-mpi", marks=pytest.mark.soak),
        pytest.param(*TORCH, TCP, id="torch-tcp", marks=pytest.mark.elsewhere),
        pytest.param(*TORCH, MPI, id="torch-mpi", marks=pytest.mark.soak),
        pytest.param(*JAX, TCP, id="jax-tcp", marks=pytest.mark.jax),
        pytest.param(*KERAS2, TCP, id="Keras 2-tcp", marks=pytest.mark.elsewhere),
        pytest.param(*KERAS2, MPI, id="Keras 2-mpi", marks=pytest.mark.soak),
    ],
    indirect=["transport"],
)
def test_training(size: int, needed: str, variables: dict[str, str]) -> None:
    for module in ("keras", needed):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = ranks(size, sys.executable, "-m", "tests.parallel.worker_keras", preload=PRELOAD)
    result = run_command(command, timeout=200, TF_CPP_MIN_LOG_LEVEL="2", **variables)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout
