"""Two ranks on one GPU or two: see docs/devices.md. They are skipped where there is none."""

from __future__ import annotations

import os
import sys
from functools import cache

import pytest

from hvdlite.common.devices.nccl.binding import Nccl
from tests.gpu.programs import PROGRAMS
from tests.parallel.jobs import ranks, run_command

SHARES_GPUS = 23000  # NCCL 2.30.


@cache
def obstacle() -> str:
    """Return why tests on GPUs cannot run here, or ""."""
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    # torch.cuda.nccl.version() is that which torch was compiled with, whatever is loaded.
    if torch.cuda.device_count() < 2 and Nccl().version < SHARES_GPUS:
        return "one GPU, and NCCL is older than 2.30: name a newer libnccl.so.2 in LD_PRELOAD"
    return ""


def run(name: str, device: str, **variables: str) -> None:
    command = ranks(2, sys.executable, "-m", "tests.gpu.programs", name, device)
    result = run_command(command, timeout=220, **variables)
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        assert f"rank {rank}: {name} is right" in result.stdout, result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("devices", ["auto", "nccl"])
@pytest.mark.parametrize("name", [*PROGRAMS])
def test_two_ranks_on_gpus(name: str, devices: str) -> None:
    if obstacle():
        pytest.skip(obstacle())
    if name in ("graph", "tensorflow") and devices == "nccl":
        pytest.skip("it has hvdlite's own binding to NCCL also with auto")
    if name == "tensorflow":
        tf = pytest.importorskip("tensorflow", reason="the extra 'tensorflow' is not installed")
        if not tf.config.list_physical_devices("GPU"):
            pytest.skip("TensorFlow sees no GPU: it needs the wheel with CUDA")
    preloaded = {name: os.environ[name] for name in ("LD_PRELOAD",) if name in os.environ}
    run(name, "cuda", HVDLITE_DEVICES=devices, NCCL_MULTI_RANK_GPU_ENABLE="1", **preloaded)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["sums", "training"])
def test_the_programs_are_right_on_the_cpu(name: str) -> None:
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    run(name, "cpu", HVDLITE_DEVICES="gloo")
