"""Members of a communicator on the compiled stand-in for NCCL, as threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.common.devices.nccl.binding import Nccl
from hvdlite.common.devices.nccl.communicator import NcclCommunicator
from hvdlite.common.devices.nccl.context import CudaContext, DeviceMemory
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.common.devices.nccl.library import CudaFramework, NcclLibrary
from hvdlite.common.tensors.adapter import numpy_dtype
from tests.ranks import run_threads

Array = np.ndarray[Any, Any]


class Fake:
    """The library, what it has done, and how it can be made to fail."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.c: Any = ctypes.CDLL(self.path)
        for name in ("fake_hold", "fake_release", "cudaStreamBeginCapture", "cudaGraphLaunch"):
            getattr(self.c, name).argtypes = (ctypes.c_void_p,) * (2 if "Graph" in name else 1)
        for name in ("fake_allocated", "fake_pinned"):
            getattr(self.c, name).argtypes = (ctypes.c_void_p,)
        self.c.cudaStreamBeginCapture.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self.c.cudaStreamEndCapture.argtypes = (
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
        )

    @property
    def journal(self) -> list[str]:
        """What NCCL has done, in order."""
        text = ctypes.create_string_buffer(1 << 16)
        self.c.fake_journal(text, len(text) - 1)
        return text.value.decode().splitlines()

    def library(self) -> NcclLibrary:
        """Return hvdlite's library on this one."""
        return NcclLibrary(Nccl(self.path), CudaFramework(CudaRuntime(self.path)))


class Member:
    """A member of a communicator, on a device of its own."""

    def __init__(self, library: NcclLibrary, unique_id: bytes, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.context: CudaContext = library.context(None, index)
        self.stream = self.context.new_stream()
        self.communicator: NcclCommunicator = library.connect(unique_id, index, size, self.context)

    def give(self, values: Array) -> DeviceMemory:
        """Return the values in memory of the device."""
        with self.context.allocating(self.stream):
            memory = self.context.empty(values.size, values.dtype.name)
            self.context.write(memory, np.ascontiguousarray(values))
        return memory

    def room(self, count: int, dtype: str) -> DeviceMemory:
        """Return memory without values."""
        with self.context.allocating(self.stream):
            return self.context.empty(count, dtype)

    def call(self, method: str, *arguments: Any) -> None:
        """Queue a collective."""
        call = getattr(self.communicator, method)
        self.context.run(self.stream, lambda: call(*arguments, self.stream))

    def read(self, memory: DeviceMemory) -> Array:
        """Return the values when all that is queued is done."""
        self.context.record(self.stream).synchronize()
        return values_of(memory)

    def close(self) -> None:
        """Free everything."""
        self.communicator.close()
        self.context.free_stream(self.stream)


def values_of(memory: DeviceMemory) -> Array:
    """Return what the memory, which is the host's here, has now."""
    copy = ctypes.string_at(memory.data_ptr(), memory.nbytes)
    return np.frombuffer(copy, numpy_dtype(memory.dtype))


def run_members(fake: Fake, size: int, main: Callable[[Member], Any]) -> list[Any]:
    """Run ``main(member)`` in a thread for each; return the results."""
    libraries = [fake.library() for _ in range(size)]
    unique_id = libraries[0].unique_id()

    def body(index: int) -> Any:
        member = Member(libraries[index], unique_id, index, size)
        try:
            return main(member)
        finally:
            member.close()

    return run_threads(size, body)
