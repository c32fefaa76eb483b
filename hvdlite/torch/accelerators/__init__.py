"""Tensors of PyTorch in the memory of accelerators: contexts, and libraries."""

from __future__ import annotations

import torch.distributed as dist

from hvdlite.common.devices.interface import DeviceLibrary
from hvdlite.common.devices.libraries import register
from hvdlite.torch.device_modules import accelerator_kind


def register_libraries() -> None:
    """Let `init` find the libraries that torch has, unless this build has no distributed."""
    if dist.is_available():
        register("c10d", _of_accelerator)
        register("gloo", _of_host, by_name_only=True)
    register("nccl", _of_cuda, by_name_only=True)


def _of_accelerator() -> DeviceLibrary | None:
    if accelerator_kind() is None:
        return None
    from hvdlite.torch.accelerators.c10d import of_accelerator

    return of_accelerator()


def _of_host() -> DeviceLibrary | None:
    from hvdlite.torch.accelerators.c10d import of_host

    return of_host()


def _of_cuda() -> DeviceLibrary | None:
    from hvdlite.torch.accelerators.nccl import of_cuda

    return of_cuda()
