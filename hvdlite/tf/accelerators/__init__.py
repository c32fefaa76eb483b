"""Tensors of TensorFlow on GPUs, which hvdlite's own binding to NCCL reduces there."""

from __future__ import annotations

from hvdlite.common.devices.interface import DeviceLibrary
from hvdlite.common.devices.libraries import register


def register_libraries() -> None:
    """Let `init` find NCCL for the tensors of TensorFlow."""
    register("nccl:tensorflow", _of_gpu)


def _of_gpu() -> DeviceLibrary | None:
    from hvdlite.tf.accelerators.library import of_gpu

    return of_gpu()
