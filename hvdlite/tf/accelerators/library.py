"""NCCL for tensors of TensorFlow: the library, and copies between their memory and the host's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.common.devices.nccl.binding import DTYPES, MissingLibraryError, Nccl, NcclError
from hvdlite.common.devices.nccl.context import CudaContext, DeviceMemory
from hvdlite.common.devices.nccl.cudart import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    CudaError,
    CudaRuntime,
)
from hvdlite.common.devices.nccl.library import CudaFramework, NcclLibrary, may_share_devices
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.tensors.numpy_adapter import Array

log = logging.getLogger("hvdlite")

KIND = "gpu"  # Not "cuda": one process may have tensors of PyTorch too.
NAME = "tensorflow:nccl"


class Accelerator:
    """The GPU of one rank, for tensors of TensorFlow."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self.cuda = cuda
        self.copied_bytes = 0  # Between the device and the host, in both directions.
        self._lock = threading.Lock()  # Guards the two below.
        self._context: CudaContext | None = None
        # Stands for the stream of tensors on the CPU, which only tests let take this way.
        self.stream_of_host = 0
        self._copies: tuple[CudaContext, int] | None = None  # With the stream that copies.

    def use(self, context: CudaContext) -> CudaContext:
        """Remember the context of the device on which this rank communicates."""
        with self._lock:
            self._context = self._context or context
        return context

    def empty(self, count: int, dtype: str) -> DeviceMemory:
        """Allocate memory without values for the stream of the calling thread."""
        assert self._context is not None, "no library has asked for a context"
        return self._context.empty(count, dtype)

    def to_host(self, memory: DeviceMemory) -> Array:
        """Return the values, whose computation has ended."""
        values = np.empty(memory.numel(), numpy_dtype(memory.dtype))
        self._copy(values.ctypes.data, memory.data_ptr(), values.nbytes, DEVICE_TO_HOST)
        self.copied_bytes += values.nbytes
        return values

    def to_device(self, memory: DeviceMemory, values: Array) -> None:
        """Copy a contiguous array; the memory has it on return."""
        self._copy(memory.data_ptr(), values.ctypes.data, values.nbytes, HOST_TO_DEVICE)
        self.copied_bytes += values.nbytes

    def copy(self, target: DeviceMemory, source: DeviceMemory) -> None:
        """Copy on the device; the target has the values on return."""
        self._copy(target.data_ptr(), source.data_ptr(), source.nbytes, DEVICE_TO_DEVICE)

    def give(self, address: int, result: Any, stream: int) -> None:
        """Copy the result of a collective, or an array, to memory of a graph, on its stream."""
        memory = getattr(result, "memory", None)
        if memory is None:
            values = np.ascontiguousarray(getattr(result, "host", result))
            source, count, kind = values.ctypes.data, values.nbytes, HOST_TO_DEVICE
        else:
            source, count, kind = memory.data_ptr(), memory.nbytes, DEVICE_TO_DEVICE
        if not count:
            return
        context, _ = self._copying(self.cuda.device_of(address))
        with self.cuda.on(context.device):
            self.cuda.do("cudaMemcpyAsync", address, source, count, kind, stream)
            if memory is not None:
                context.keep(memory, stream)  # It is freed when the stream has copied.
            if self.stream_of_host:  # That orders no tensors on the CPU.
                self.cuda.do("cudaStreamSynchronize", stream)

    def _copy(self, target: int, source: int, count: int, kind: int) -> None:
        if not count:
            return
        on_device = target if kind == HOST_TO_DEVICE else source
        context, stream = self._copying(self.cuda.device_of(on_device))
        with self._lock, self.cuda.on(context.device):
            self.cuda.do("cudaMemcpyAsync", target, source, count, kind, stream)
            self.cuda.do("cudaStreamSynchronize", stream)

    def _copying(self, device: int) -> tuple[CudaContext, int]:
        with self._lock:
            if self._copies is None:
                context = CudaContext(self.cuda, device)
                self._copies = context, context.new_stream()
            return self._copies

    def lift(self, values: Array, local_rank: int) -> DeviceMemory:
        """Return memory of the device with a contiguous array."""
        known = local_rank % max(self.cuda.device_count(), 1)
        context, stream = self._copying(self._context.device if self._context else known)
        with context.allocating(stream):
            memory = context.empty(values.size, values.dtype.name)
        self.to_device(memory, values)
        return memory


class TensorFlowFramework(CudaFramework):
    """Devices for tensors of TensorFlow."""

    def __init__(self, cuda: CudaRuntime) -> None:
        super().__init__(cuda)
        self.accelerator = Accelerator(cuda)

    def context(self, device: Any, local_rank: int) -> CudaContext:
        """Return the context of the device with this number.

        TensorFlow does not wait for events of others, so its threads wait for results.
        """
        context = super().context(device, local_rank)
        context.threads_wait = True
        return self.accelerator.use(context)


class TensorFlowLibrary(NcclLibrary):
    """See `NcclLibrary`."""

    name = NAME
    device_kind = KIND

    def __init__(self, nccl: Nccl, framework: TensorFlowFramework, **options: bool) -> None:
        super().__init__(nccl, framework, **options)
        self.accelerator = framework.accelerator


FAILURES = (MissingLibraryError, NcclError, CudaError)  # Of `load_libraries`.


def obstacle() -> str:
    """Return why TensorFlow has no GPU of NVIDIA here, or ""."""
    if not tf.test.is_built_with_cuda():
        return f"TensorFlow {tf.version.VERSION} was built without CUDA"
    if not tf.config.list_physical_devices("GPU"):
        return f"TensorFlow {tf.version.VERSION} sees no GPU"
    return ""


def load_libraries() -> tuple[Nccl, CudaRuntime]:
    """Return NCCL and the CUDA runtime that are here. Raises `FAILURES`, and `ConfigError`."""
    config = Config.from_environ()
    return Nccl(config.nccl_library), CudaRuntime(config.cudart_library)


def of_gpu() -> TensorFlowLibrary | None:
    """Return the library where TensorFlow sees GPUs of NVIDIA and NCCL is there; None elsewhere."""
    if obstacle():
        return None
    try:
        nccl, cuda = load_libraries()
    except FAILURES as error:
        log.warning("tensors of TensorFlow on GPUs go through host memory: %s", error)
        return None
    return TensorFlowLibrary(nccl, TensorFlowFramework(cuda), shares_devices=may_share_devices())


def accelerator_of(runtime: Runtime | None) -> Accelerator | None:
    """Return the GPU of a rank; None where everything goes through host memory."""
    if runtime is None:
        return None
    library = runtime.engine.devices.library_of(KIND)
    return library.accelerator if isinstance(library, TensorFlowLibrary) else None


# -- which calls take the way of a GPU: those whose tensors are all on one that a library reduces

# A rank decides by what it knows without the others: whether its job has a library for GPUs, and
# where its tensors are. Ranks whose tensors are in other places get an error that names them.


DEVICE_TYPE = "GPU"  # Of tensors that a library reduces, in TensorFlow's words.
HOST_TYPE = "CPU"


def accelerator_now(
    tensors: Sequence[tf.Tensor], runtime: Callable[[], Runtime]
) -> Accelerator | None:
    """Return the GPU that has all tensors of a call, made eagerly; None if they are on the host."""
    for tensor in tensors:
        # Tensors of 32-bit integers say that they are on a GPU, and their memory is the host's.
        if f":{DEVICE_TYPE}:" not in tensor.backing_device or tensor.dtype.name not in DTYPES:
            return None
    return accelerator_of(runtime()) if tensors else None


def is_placed(tensors: Sequence[tf.Tensor], inputs: int, runtime: Runtime | None) -> bool:
    """Return whether a call in a graph runs on the GPU: one without splits, which hosts read.

    `inputs` counts its tensors, and its splits.
    """
    if not tensors or inputs > len(tensors):
        return False
    if accelerator_of(runtime) is None or not tf.config.list_physical_devices(DEVICE_TYPE):
        return False
    for tensor in tensors:
        device = tf.DeviceSpec.from_string(tensor.device).device_type if tensor.device else None
        if tensor.dtype.name not in DTYPES or device not in (None, DEVICE_TYPE):
            return False
    return True


def placing(on_device: bool) -> AbstractContextManager[Any]:
    """Return a context in which operations of collectives are made."""
    if not tf.config.list_physical_devices("GPU"):
        return nullcontext()  # They are on the host anyway.
    device: AbstractContextManager[Any] = tf.device(
        f"/device:{DEVICE_TYPE if on_device else HOST_TYPE}:*"
    )
    return device
