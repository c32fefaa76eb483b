"""Tensors of TensorFlow on a GPU, as the engine sees them: memory, and an event.

    eager     TensorFlow computes, then lends the memory; the result is memory of TensorFlow's where
              its shape is known before, else it is copied there on the device
    graphs    the compiled operation gives addresses, and an event on TensorFlow's stream

Where a collective is staged, the engine copies the memory to the host and back.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.common.devices.interface import Event
from hvdlite.common.devices.nccl.context import DeviceMemory, ForeignEvent
from hvdlite.common.tensors.adapter import HostBuffer, Place, TensorSpec, numpy_dtype
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter
from hvdlite.tf.accelerators.library import KIND, Accelerator, accelerator_of

# -- the addresses of TensorFlow's tensors, by DLPack


class _Tensor(ctypes.Structure):
    """The beginning of a ``DLManagedTensor``, which is a ``DLTensor``."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("dimensions", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_pointer_of: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = c_void_p
_pointer_of.argtypes = ctypes.py_object, ctypes.c_char_p


class Ready:
    """An event that has occurred."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def make_wait(self, stream: int) -> None:
        """Do nothing."""


READY: Any = Ready()


class DeviceTensor:
    """A tensor: its memory, which may be read after an event, and where its result goes."""

    __slots__ = ("accelerator", "dtype", "host", "memory", "ready", "result", "shape", "tensor")

    def __init__(
        self,
        accelerator: Accelerator,
        shape: tuple[int, ...],
        dtype: str,
        memory: DeviceMemory | None = None,
        *,
        ready: Event = READY,
        tensor: tf.Tensor | None = None,
        result: DeviceTensor | None = None,
    ) -> None:
        self.accelerator, self.shape, self.dtype = accelerator, shape, dtype
        self.memory, self.ready = memory, ready
        self.tensor = tensor  # The eager tensor whose memory it is.
        self.result = result  # Of the same shape, for collectives that keep the shape.
        self.host: Array | None = None  # A result that was staged, and has no memory.

    @property
    def nbytes(self) -> int:
        """The size."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def values(self) -> Array:
        """Return the values of a result on the host."""
        flat = self.host
        if flat is None:
            assert self.memory is not None
            flat = self.accelerator.to_host(self.memory)
        return flat.reshape(self.shape)


def lent(accelerator: Accelerator, tensor: tf.Tensor, *, keeps_shape: bool) -> DeviceTensor:
    """Return an eager tensor, which is computed now, with memory for a result of its shape."""
    result = None
    if keeps_shape:
        room = room_like(tensor, tuple(tensor.shape))
        if room.backing_device == tensor.backing_device:
            result = _wrapped(accelerator, room)
    return _wrapped(accelerator, tensor, result)


def room_like(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Return a new tensor on the same device, without values."""
    with tf.device(tensor.device):
        return tf.raw_ops.Empty(shape=shape, dtype=tensor.dtype)


def _wrapped(
    accelerator: Accelerator, tensor: tf.Tensor, result: DeviceTensor | None = None
) -> DeviceTensor:
    """Return an eager tensor, whose values are there when this returns, by its own memory.

    Raises `tf.errors.InvalidArgumentError` for a dtype that DLPack has not.
    """
    capsule = tf.experimental.dlpack.to_dlpack(tensor)  # The memory exists as long as this does.
    described = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    address = (described.data or 0) + described.byte_offset
    shape, dtype = tuple(tensor.shape), np.dtype(tensor.dtype.as_numpy_dtype).name
    memory = DeviceMemory(address, math.prod(shape), dtype, capsule)
    return DeviceTensor(accelerator, shape, dtype, memory, tensor=tensor, result=result)


def tensor_of(result: DeviceTensor, like: tf.Tensor) -> tf.Tensor:
    """Return a result as an eager tensor on the device of `like`."""
    if result.tensor is not None:
        return result.tensor
    room = room_like(like, result.shape)
    target = _wrapped(result.accelerator, room).memory
    assert target is not None
    if room.backing_device != like.backing_device:
        with tf.device(like.device):
            return tf.convert_to_tensor(result.values())
    if result.memory is not None:
        result.accelerator.copy(target, result.memory)
    else:
        assert result.host is not None
        result.accelerator.to_device(target, result.host)
    return room


class DeviceAdapter(NumpyAdapter):
    """The adapter of such tensors."""

    def spec(self, tensor: Any) -> TensorSpec:
        """Return dtype, shape and device."""
        return TensorSpec(tensor.dtype, tensor.shape, KIND)

    def place(self, tensor: Any, spec: TensorSpec) -> Place | None:
        """Return None: it is not on the host."""
        return None

    def input(self, tensor: Any) -> HostBuffer:
        """Return the tensor as a buffer."""
        return _Buffer(tensor)

    def empty_like(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        """Return the result of a staged collective."""
        if tensor.result is not None and tensor.result.shape == shape:
            return tensor.result
        return DeviceTensor(tensor.accelerator, shape, tensor.dtype)

    def output(self, tensor: Any) -> HostBuffer:
        """Return the tensor as a buffer."""
        return _Buffer(tensor)


DEVICE_ADAPTER = DeviceAdapter()


class _Buffer:
    """A tensor as a `DeviceInput` or `DeviceOutput`, and its values on the host."""

    __slots__ = ("_array", "_tensor")

    def __init__(self, tensor: DeviceTensor) -> None:
        self._tensor = tensor
        self._array: Array | None = None

    @property
    def on_device(self) -> _Buffer:
        return self

    @property
    def device(self) -> int | None:
        address = self.address
        return self._tensor.accelerator.cuda.device_of(address) if address else None

    @property
    def ready(self) -> Event:
        return self._tensor.ready

    @property
    def buffer(self) -> DeviceMemory:
        assert self._tensor.memory is not None
        return self._tensor.memory

    @property
    def address(self) -> int:
        return self.buffer.data_ptr()

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def new_result(self, shape: tuple[int, ...]) -> tuple[DeviceTensor, HostBuffer]:
        given, result = self._tensor, self._tensor.result
        if result is None or result.shape != shape:
            accelerator = given.accelerator
            memory = accelerator.empty(math.prod(shape), given.dtype)
            result = DeviceTensor(accelerator, shape, given.dtype, memory)
        return result, _Buffer(result)

    def unpack(self) -> None:
        """Do nothing: the buffer is the tensor's memory."""

    def written_by(self, event: Event) -> None:
        """Do nothing: threads wait for results."""

    def wait(self) -> None:
        """Copy the values to the host when they are there."""
        self._tensor.ready.synchronize()
        self._array = self._tensor.accelerator.to_host(self.buffer)

    @property
    def array(self) -> Array:
        """The values of an input, or memory for those of an output."""
        if self._array is None:
            dtype = numpy_dtype(self._tensor.dtype)
            self._array = np.empty(math.prod(self._tensor.shape), dtype)
        return self._array

    def commit(self) -> None:
        """Copy the values to the device, if the result has memory there."""
        if self._tensor.memory is None:
            self._tensor.host = self.array
        else:
            self._tensor.accelerator.to_device(self._tensor.memory, self.array)


def placed_at(
    accelerator: Accelerator,
    source: int,
    target: int | None,
    shape: tuple[int, ...],
    dtype: str,
    event: int,
) -> DeviceTensor:
    """Return the tensor of a graph by the addresses of its input, and of its output if any.

    They may be read and written after an event; the graph keeps them.
    """
    count = math.prod(shape)
    ready = ForeignEvent(accelerator.cuda, event)
    given, result = DeviceMemory(source, count, dtype, None), None
    if target is not None:
        written = DeviceMemory(target, count, dtype, None)
        result = DeviceTensor(accelerator, shape, dtype, written)
    return DeviceTensor(accelerator, shape, dtype, given, ready=ready, result=result)


def lifted(call: Any, arrays: Sequence[Array]) -> Any:
    """Start a call on a GPU with values that Python has on the host."""
    runtime = call.runtime()
    accelerator = accelerator_of(runtime)
    if accelerator is None:
        return call.start(arrays)
    local_rank = runtime.topology.local_rank(runtime.rank)
    tensors = []
    for array in arrays:
        values = np.ascontiguousarray(array)
        memory = accelerator.lift(values, local_rank)
        tensors.append(DeviceTensor(accelerator, array.shape, array.dtype.name, memory))
    return call.start(tensors, DEVICE_ADAPTER)


def on_host(result: Any) -> Array:
    """Return a result as an array."""
    return result.values() if isinstance(result, DeviceTensor) else result
