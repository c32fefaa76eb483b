"""The interface by which a framework's adapter describes its tensors to the engine.

The engine sees a tensor only as a `HostBuffer`: a flat numpy array on the host, with a method that
waits until it may be read, and one that is called after it was written. A device implements both;
for the CPU they do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

HOST_DEVICE = "cpu"
FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))
COMPLEX = frozenset(("complex64", "complex128"))
EXACT = frozenset(
    ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
)
DTYPES = EXACT | FLOATS | COMPLEX  # The names of all dtypes that are communicated.


class TensorSpec(NamedTuple):
    """The properties of a tensor that ranks compare."""

    dtype: str  # The name that numpy gives it, or "bfloat16".
    shape: tuple[int, ...]
    device: str  # The kind of device without its number, such as "cpu" or "cuda".


# Contiguous memory of the host that belongs to a tensor: its address, and an object for as long as
# which it exists. A plain tuple, as one is made for each gradient of each step.
Place: TypeAlias = tuple[int, object]


@runtime_checkable
class HostBuffer(Protocol):
    """A tensor's bytes on the host, as a flat contiguous array of the tensor's dtype."""

    @property
    def array(self) -> NDArray[Any]:
        """The bytes. For a tensor on a device they exist from the first time that they are asked.

        Those of an input may be asked for after `wait`.
        """

    @property
    def nbytes(self) -> int:
        """The size of the array."""

    @property
    def on_device(self) -> Any:
        """A tensor on a device itself: a `DeviceInput` or `DeviceOutput` of common/devices."""

    def wait(self) -> None:
        """Sleep until `array` may be read (a ready event of the device). Engine thread."""

    def commit(self) -> None:
        """Start to copy `array`, which has been written, to the device. Engine thread."""


class CpuBuffer:
    """Host memory itself, which is always ready and needs no copy."""

    __slots__ = ("array",)
    on_device: Any = None

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def wait(self) -> None:
        """Return at once: host memory is always ready."""

    def commit(self) -> None:
        """Do nothing: host memory needs no copy."""


class Adapter(Protocol[T]):
    """What hvdlite asks about the tensors of one framework."""

    def spec(self, tensor: T) -> TensorSpec:
        """Return dtype, shape and device. Raises `ValueError` for an unsupported dtype."""

    def place(self, tensor: T, spec: TensorSpec) -> Place | None:
        """Return the tensor's own memory if it is as `spec` says, contiguous, and on the host."""

    def input(self, tensor: T) -> HostBuffer:
        """Return a buffer of the values; a non-contiguous tensor is copied. Calling thread."""

    def empty_like(self, tensor: T, shape: tuple[int, ...]) -> T:
        """Allocate a tensor of the same dtype and device. Any thread."""

    def output(self, tensor: T) -> HostBuffer:
        """Return a buffer whose `commit` writes to `tensor`, contiguous or not. Any thread."""

    def read_splits(self, splits: Any) -> list[int]:
        """Return alltoall's splits as ints. Raises `ValueError` unless they are one row of ints."""

    def make_splits(self, splits: Sequence[int], like: Any) -> Any:
        """Return received splits in the form of the argument `like`; None stands for no splits."""

    def finish(self, tensor: T) -> None:
        """Order the user's next operations on `tensor` behind `commit`. Calling thread."""

    def finish_all(self, tensors: Sequence[T]) -> None:
        """Do as `finish` does for several tensors."""


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a `TensorSpec.dtype`; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(name)
