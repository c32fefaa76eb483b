"""What a framework's adapter tells the floors below about its tensors.

The engine sees a tensor only as a `HostBuffer`: a flat numpy array on the host, with a promise of
when it may be read and what must happen after it was written. A device is whatever makes those
promises: for the CPU both are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

HOST_DEVICE = "cpu"


class TensorSpec(NamedTuple):
    """What ranks compare about a tensor."""

    dtype: str  # numpy's name, or "bfloat16"
    shape: tuple[int, ...]
    device: str  # "cpu", "cuda", ...: the kind of device, without a number


@runtime_checkable
class HostBuffer(Protocol):
    """A tensor's bytes on the host, as a flat contiguous array of the tensor's dtype."""

    array: NDArray[Any]

    def wait(self) -> None:
        """Sleep until `array` may be read (a ready event of the device). Engine thread."""

    def commit(self) -> None:
        """`array` has been written: start copying it to the device. Engine thread."""


class CpuBuffer:
    """Host memory itself: always ready, nothing to commit."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def wait(self) -> None:
        """Host memory is always ready."""

    def commit(self) -> None:
        """Host memory needs no copy."""


class Adapter(Protocol[T]):
    """The tensors of one framework."""

    def spec(self, tensor: T) -> TensorSpec:
        """dtype, shape and device. Raises `ValueError` for a dtype that no collective takes."""

    def input(self, tensor: T) -> HostBuffer:
        """The tensor's values; a non-contiguous tensor is copied. Calling thread."""

    def empty_like(self, tensor: T, shape: tuple[int, ...]) -> T:
        """A new contiguous tensor of the same dtype and device. Any thread."""

    def output(self, tensor: T) -> HostBuffer:
        """A buffer that `commit` carries into `tensor` (contiguous or not). Any thread."""

    def read_splits(self, splits: Any) -> list[int]:
        """alltoall's splits as ints. Raises `ValueError` where they are not one row of ints."""

    def make_splits(self, splits: Sequence[int], like: Any) -> Any:
        """Received splits in the form of the splits that were given (None: none were)."""

    def finish(self, tensor: T) -> None:
        """The user takes `tensor` after `synchronize`: order it behind `commit`. Calling thread."""


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a `TensorSpec.dtype`; bfloat16 is ml_dtypes'."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(name)
