"""Training on real ranks whose tensors take the way of an accelerator."""

from __future__ import annotations

import sys

import pytest

from tests.parallel.jobs import ranks, run_command

pytest.importorskip("torch", reason="the extra 'torch' is not installed")


def test_training_on_devices_has_the_bits_of_one_process() -> None:
    worker = (sys.executable, "-m", "tests.parallel.worker_devices")
    command = ranks(2, *worker, preload=("tests.lean", "hvdlite.torch"))
    result = run_command(command, timeout=60, HVDLITE_DEVICES="gloo")
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        assert f"rank {rank} trained on ['host'], staged 0" in result.stdout, result.stdout
