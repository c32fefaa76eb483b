"""The names of torch's dtypes, tensors as numpy arrays, and torch's casts of 16-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdlite.common.collectives.kernels import Casts, register_casts
from hvdlite.common.tensors.adapter import numpy_dtype

_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
# Older versions of torch lack the unsigned types beyond uint8.
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in _NAMES if hasattr(torch, name)
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the memory of a contiguous host tensor as a flat array."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # numpy() of torch does not know ml_dtypes.
        bits: NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.reshape(-1).view(numpy_dtype("bfloat16"))
    array: NDArray[Any] = tensor.numpy()
    return array.reshape(-1)


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return the memory of a flat array as a tensor."""
    if array.itemsize == 2 and array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _cast(destination: NDArray[Any], source: NDArray[Any]) -> None:
    if source.flags.writeable:
        as_tensor(destination).copy_(as_tensor(source))
    else:  # torch has no read-only tensors.
        np.copyto(destination, source, casting="unsafe")


def use_torch_casts() -> None:
    """Let torch convert between float32 and 16-bit floats, as it is faster than numpy.

    The results have the bits of numpy's; only the payload of a NaN may differ.
    """
    for name in ("float16", "bfloat16"):
        register_casts(name, Casts(widen=_cast, narrow=_cast))
