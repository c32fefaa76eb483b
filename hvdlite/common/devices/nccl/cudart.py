"""The functions of the CUDA runtime that streams, events and memory need."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from hvdlite.common.devices.nccl.binding import CUDART, Found, load

log = logging.getLogger("hvdlite")
SUCCESS, NOT_READY = 0, 600
NOT_BLOCKING_STREAM = 1  # It does not wait for the default stream of the device.
BLOCKING_EVENT, EVENT_WITHOUT_TIME = 1, 2
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESSES = 1, 2, 3, 4
_BUS_ID_BYTES = 32
_OWN_GRAPHS_ALONE = 1  # cudaStreamCaptureModeThreadLocal.
_ATTRIBUTE_BYTES = 256  # More than any release writes.

_ADDRESS = POINTER(c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaGetDeviceCount": (POINTER(c_int),),
    "cudaGetDevice": (POINTER(c_int),),
    "cudaSetDevice": (c_int,),
    "cudaDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cudaStreamCreateWithFlags": (_ADDRESS, c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cudaEventCreateWithFlags": (_ADDRESS, c_uint),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventQuery": (c_void_p,),
    "cudaEventSynchronize": (c_void_p,),
    "cudaEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cudaEventDestroy": (c_void_p,),
    "cudaHostAlloc": (_ADDRESS, c_size_t, c_uint),
    "cudaFreeHost": (c_void_p,),
    "cudaMallocAsync": (_ADDRESS, c_size_t, c_void_p),
    "cudaFreeAsync": (c_void_p, c_void_p),
    "cudaPointerGetAttributes": (c_void_p, c_void_p),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "cudaGetLastError": (),
    "cudaThreadExchangeStreamCaptureMode": (POINTER(c_int),),
}


class CudaError(RuntimeError):
    """A function of the CUDA runtime has failed."""


class CudaRuntime:
    """The library. Any thread may use it; `on` chooses the device of the thread."""

    def __init__(self, chosen: str = "") -> None:
        """Load the file `chosen`, or the one that is found; see `binding.load` for errors."""
        found = load(CUDART, chosen)
        self.path = found.path
        self._text = found.library.cudaGetErrorString
        self._text.argtypes, self._text.restype = (c_int,), c_char_p
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(found.library, name, None)
            if function is None:
                raise CudaError(f"{found.path} has no function {name}: CUDA 11.2 is the oldest")
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self._is_in_use = _is_in_use(found)
        # What contexts know of each other's streams, as memory of one is used on streams of others.
        # Guards the two below. The garbage collector may free memory while a thread holds it.
        self.stream_lock = threading.RLock()
        self.streams: set[int] = set()  # Those of contexts that exist.
        # The ends of those that do not, as events: memory may be freed later than a stream.
        self.stream_ends: dict[int, Any] = {}

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; return its result code."""
        return int(self._functions[name](*arguments))

    def do(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises `CudaError` if it fails."""
        code = self.call(name, *arguments)
        if code != SUCCESS:
            raise CudaError(f"{name}: {self.error_text(code)}")

    def error_text(self, code: int) -> str:
        """Return what CUDA says about a result code."""
        return f"CUDA reports {self._text(code).decode(errors='replace')!r} (code {code})"

    def new(self, name: str, *arguments: Any) -> int:
        """Return the address of what a function makes."""
        made = c_void_p()
        self.do(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def milliseconds(self, earlier: int, later: int) -> float:
        """Return the time between two events, which have occurred."""
        elapsed = c_float()
        self.do("cudaEventElapsedTime", ctypes.byref(elapsed), earlier, later)
        return elapsed.value

    def function(self, name: str) -> Any:
        return self._functions[name]

    def device_of(self, address: int) -> int:
        """Return the number of the device that has the memory at an address."""
        attributes = (c_int * (_ATTRIBUTE_BYTES // ctypes.sizeof(c_int)))()
        self.do("cudaPointerGetAttributes", attributes, address)
        return attributes[1]

    def device_count(self) -> int:
        """Return how many devices this process sees; 0 where there is no driver."""
        count = c_int()
        return count.value if self.call("cudaGetDeviceCount", ctypes.byref(count)) == SUCCESS else 0

    def bus_id(self, device: int) -> str:
        """Return the place of a device on the bus of its host, such as "0000:3b:00.0"."""
        text = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self.do("cudaDeviceGetPCIBusId", text, _BUS_ID_BYTES, device)
        return text.value.decode()

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Let the calling thread use a device, and the one that it used before again.

        A device that this process has not used is not chosen again: that would begin to use it, by
        some hundred megabytes of its memory. A new thread has chosen the first one in this way.
        """
        before = c_int()
        self.do("cudaGetDevice", ctypes.byref(before))
        self.do("cudaSetDevice", device)
        try:
            yield
        finally:
            if before.value != device and self._uses(before.value):
                self.do("cudaSetDevice", before.value)

    def _uses(self, device: int) -> bool:
        """Return whether this process has used a device; True where nobody knows."""
        flags, used = c_uint(), c_int()
        known = self._is_in_use is not None and not self._is_in_use(
            device, ctypes.byref(flags), ctypes.byref(used)
        )
        return bool(used.value) if known else True

    def begin_thread(self) -> None:
        """Let other threads record graphs while the calling one asks events.

        CUDA else ends the recording of any thread with an error.
        """
        self.do("cudaThreadExchangeStreamCaptureMode", ctypes.byref(c_int(_OWN_GRAPHS_ALONE)))


def _is_in_use(found: Found) -> Any:
    """Return the driver's function that knows it; None where there is no driver."""
    libraries = [found.library]  # A stand-in for the runtime is the driver as well.
    with suppress(OSError):
        libraries.append(ctypes.CDLL("libcuda.so.1"))
    for library in libraries:
        function = getattr(library, "cuDevicePrimaryCtxGetState", None)
        if function is not None:
            function.argtypes, function.restype = (c_int, POINTER(c_uint), POINTER(c_int)), c_int
            return function
    return None


def begin_thread(chosen: str) -> None:
    """Do as `CudaRuntime.begin_thread`, where there is one that another framework has loaded."""
    try:
        CudaRuntime(chosen).begin_thread()
    except (OSError, RuntimeError, ValueError) as error:
        log.debug("graphs of other threads are not let alone: %s", error)
