"""NCCL by hvdlite's own binding, for any framework."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.devices.interface import Buffer, Stream
from hvdlite.common.devices.nccl.binding import DTYPES, OPS, Nccl
from hvdlite.common.devices.nccl.communicator import Forms, NcclCommunicator
from hvdlite.common.devices.nccl.context import CudaContext, DeviceMemory
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.common.settings.config import Config

NAME = "nccl"
KIND = "cuda"


def may_share_devices() -> bool:
    """Return whether NCCL was told, as it must be, that ranks share a GPU; 2.30 and newer can."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") == "1"


class Framework(Forms, Protocol):
    """Where tensors, streams and contexts come from."""

    def context(self, device: Any, local_rank: int) -> Any:
        """Return the context of a device, or of that of the local rank."""

    def using(self, context: Any) -> AbstractContextManager[Any]:
        """Return a context manager in which the thread uses the device."""

    def error(self, context: Any) -> str:
        """Return why the device has failed, or ""."""

    def connected(self, context: Any, nccl: Nccl) -> None:
        """Do what is left to do when the context is first used for communication."""


class NcclLibrary:
    """See `hvdlite.common.devices.interface.DeviceLibrary`."""

    name = NAME
    device_kind = KIND

    def __init__(
        self,
        nccl: Nccl,
        framework: Framework,
        *,
        shares_devices: bool = False,
        blocks: bool = False,
    ) -> None:
        """`shares_devices` says whether two ranks may use one device.

        `blocks` chooses communicators that block, whose calls graphs record.
        """
        self._blocks, self.nccl, self.shares_devices = blocks, nccl, shares_devices
        self._framework = framework

    def supports(self, collective: str, dtype: str, op: ReduceOp | None) -> bool:
        """Return whether NCCL reduces the dtype; all are moved, as bytes."""
        return op is None or (op in OPS and dtype in DTYPES)

    def context(self, device: Any, local_rank: int) -> Any:
        """Return the context of `device`, or of the one that the local rank has."""
        return self._framework.context(device, local_rank)

    def unique_id(self) -> bytes:
        return self.nccl.unique_id()

    def connect(self, unique_id: bytes, index: int, size: int, context: Any) -> NcclCommunicator:
        """Connect with the other members, within the time that a job has to start."""
        with self._framework.using(context):
            self._framework.connected(context, self.nccl)
            return NcclCommunicator(
                self.nccl,
                self._framework,
                unique_id,
                index,
                size,
                seconds=Config.from_environ().start_timeout_seconds,
                blocks=self._blocks,
                device_error=lambda: self._framework.error(context),
            )


class CudaFramework:
    """Devices by the CUDA runtime alone."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._lock = threading.Lock()  # Lets one thread prepare a context.

    def dtype(self, buffer: Buffer) -> str:
        """Return the name of the dtype of a `DeviceMemory`."""
        return str(buffer.dtype)

    def stream(self, stream: Stream) -> int:
        return int(stream)

    def context(self, device: Any, local_rank: int) -> CudaContext:
        """Return the context of the device with this number."""
        number = local_rank % max(self._cuda.device_count(), 1) if device is None else int(device)
        return CudaContext(self._cuda, number)

    def using(self, context: CudaContext) -> AbstractContextManager[None]:
        """Return a context manager in which the thread uses the device."""
        return self._cuda.on(context.device)

    def error(self, context: CudaContext) -> str:
        """Return why the device has failed, or ""."""
        return context.error

    def connected(self, context: CudaContext, nccl: Nccl) -> None:
        """Let a communicator of one member multiply: the CUDA runtime itself has no kernels."""
        with self._lock:
            if context.multiply is not None:
                return
            seconds = Config.from_environ().start_timeout_seconds
            alone = NcclCommunicator(nccl, self, nccl.unique_id(), 0, 1, seconds=seconds)

            def multiply(buffer: DeviceMemory, factor: float, stream: Stream) -> None:
                alone.scale(buffer, factor, stream)
                if reason := alone.async_error():
                    raise RuntimeError(reason)

            context.multiply, context.end_multiply = multiply, alone.abort
