"""Which calls take the way of a GPU: those whose tensors are all on one that a library reduces.

A rank decides by what it knows without the others: whether its job has a library for GPUs, and
where its tensors are. Ranks whose tensors are in other places get an error that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import tensorflow as tf

from hvdlite.common.devices.nccl.binding import DTYPES
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.tf.accelerators.library import Accelerator, accelerator_of

DEVICE_TYPE = "GPU"  # Of tensors that a library reduces, in TensorFlow's words.
HOST_TYPE = "CPU"


class _Call(Protocol):
    @property
    def tensors(self) -> Sequence[tf.Tensor]: ...

    @property
    def runtime(self) -> Callable[[], Runtime]: ...

    @property
    def inputs(self) -> Sequence[tf.Tensor]: ...


def accelerator_now(call: _Call) -> Accelerator | None:
    """Return the GPU that has all tensors of a call, made eagerly; None if they are on the host."""
    tensors = call.tensors
    if not tensors or not all(_is_on_device(each) and _is_reduced(each) for each in tensors):
        return None
    return accelerator_of(call.runtime())


def _is_on_device(tensor: tf.Tensor) -> bool:
    # Tensors of 32-bit integers say that they are on a GPU, and their memory is the host's.
    return f":{DEVICE_TYPE}:" in tensor.backing_device


def _is_reduced(tensor: tf.Tensor) -> bool:
    return tensor.dtype.name in DTYPES


def is_placed(call: _Call, runtime: Runtime | None) -> bool:
    """Return whether a call in a graph runs on the GPU: one without splits, which hosts read."""
    if not call.tensors or len(call.inputs) > len(call.tensors):
        return False
    if accelerator_of(runtime) is None:
        return False
    return bool(tf.config.list_physical_devices(DEVICE_TYPE)) and all(
        _is_reduced(tensor) and _may_be_on_device(tensor) for tensor in call.tensors
    )


def _may_be_on_device(tensor: tf.Tensor) -> bool:
    device = tensor.device
    named = tf.DeviceSpec.from_string(device).device_type if device else None
    return named in (None, DEVICE_TYPE)


def placing(on_device: bool) -> AbstractContextManager[Any]:
    """Return a context in which operations of collectives are made."""
    if not tf.config.list_physical_devices("GPU"):
        return nullcontext()  # They are on the host anyway.
    device: AbstractContextManager[Any] = tf.device(
        f"/device:{DEVICE_TYPE if on_device else HOST_TYPE}:*"
    )
    return device
