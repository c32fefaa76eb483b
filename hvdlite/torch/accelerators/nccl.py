"""NCCL by hvdlite's own binding, for tensors of PyTorch; see common/devices/nccl."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from hvdlite.common.devices.nccl.binding import Nccl
from hvdlite.common.devices.nccl.library import KIND, NcclLibrary, may_share_devices
from hvdlite.common.settings.config import Config
from hvdlite.torch.accelerators.context import TorchContext, context_of
from hvdlite.torch.dtypes import DTYPE_NAMES


class TorchFramework:
    """Devices, streams and memory by ``torch.cuda``."""

    def dtype(self, buffer: torch.Tensor) -> str:
        """Return the name of the dtype of a tensor."""
        return DTYPE_NAMES[buffer.dtype]

    def stream(self, stream: Any) -> int:
        """Return the address of a ``torch.cuda.Stream``."""
        return int(stream.cuda_stream)

    def context(self, device: Any, local_rank: int) -> TorchContext:
        """Return the context of `device`, or of the one that the local rank has."""
        return context_of(KIND, device, local_rank)

    def using(self, context: TorchContext) -> AbstractContextManager[Any]:
        """Return a context manager in which the thread uses the device."""
        return torch.cuda.device(context.device)

    def error(self, context: TorchContext) -> str:
        """Return "": torch raises what the device reports."""
        return ""

    def connected(self, context: TorchContext, nccl: Nccl) -> None:
        """Do nothing: torch has kernels."""


def of_cuda(*, blocks: bool = False) -> NcclLibrary | None:
    """Return the library where this process sees devices of NVIDIA; None for others.

    `blocks` is for graphs; see `NcclLibrary`.
    Raises `NcclError` and `MissingLibraryError` as `Nccl` does.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    nccl = Nccl(Config.from_environ().nccl_library)
    return NcclLibrary(nccl, TorchFramework(), shares_devices=may_share_devices(), blocks=blocks)
