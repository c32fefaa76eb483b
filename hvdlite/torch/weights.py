"""What ranks compare of an optimizer of PyTorch: parameters, its state and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hvdlite.common.tensors.comparison import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    Compared,
    factors,
    of_array,
    sums_of,
)
from hvdlite.common.tensors.numpy_adapter import Array
from hvdlite.torch.dtypes import DTYPE_NAMES

_BLOCKS_AT_ONCE = 4096  # Of a tensor on a device: 32 MiB, as much again for the products.


def of_tensor(name: str, tensor: torch.Tensor, shown: str = "") -> Compared:
    """Return a dense tensor to compare, whose bytes stay on its device."""
    data = tensor.detach()
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    flat = data.contiguous().reshape(-1).view(torch.uint8)

    def block(number: int) -> bytes:
        part = flat[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] if number or large else flat
        return part.cpu().numpy().tobytes()

    def sums() -> Array:
        return sums_of(flat.numpy()) if flat.device.type == "cpu" else sums_on_device(flat)

    size = flat.numel()
    large = size > BLOCK_BYTES
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    return Compared(name, dtype, tuple(tensor.shape), size, sums, block, shown)


def sums_on_device(flat: torch.Tensor) -> Array:
    """Return what `sums_of` returns, computed where the bytes are: integers of 64 bits wrap."""
    if flat.storage_offset() % 8:  # A part of a buffer, which torch does not see as words.
        flat = flat.clone()
    missing, whole = -flat.numel() % BLOCK_BYTES, flat.numel() // BLOCK_BYTES * BLOCK_BYTES
    signed = torch.from_numpy(factors().view(np.int64)).to(flat.device)
    sums = [
        (_mixed(part).view(-1, BLOCK_WORDS) * signed).sum(1)
        for part in torch.split(flat[:whole], _BLOCKS_AT_ONCE * BLOCK_BYTES)
        if part.numel()
    ]
    if whole < flat.numel():
        last = torch.nn.functional.pad(flat[whole:], (0, missing))
        sums.append((_mixed(last) * signed).sum().reshape(1))
    if not sums:
        return np.empty(0, np.uint64)
    array: Array = torch.cat(sums).cpu().numpy().view(np.uint64)
    return array


def _mixed(part: torch.Tensor) -> torch.Tensor:
    words = part.view(torch.int64)
    return words ^ (words >> 32 & 0xFFFFFFFF)


# Returns what the ranks that are compared have alike of a tensor; None where they have nothing so.
Alike = Callable[[torch.Tensor], torch.Tensor | None]


def whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that is dense and no `DTensor`."""
    dense = tensor.layout is torch.strided and not hasattr(tensor, "to_local")
    return tensor if dense else None


def weights_of(
    optimizer: Any,
    names: Mapping[torch.Tensor, str],
    *,
    state: bool,
    alike: Alike = whole,
    shown: Mapping[torch.Tensor, str] | None = None,
) -> Iterator[Compared]:
    """Yield the parameters that have names, the options of their groups, and with `state` that.

    An error calls parameters as `shown` does, by default by their names. Left out is what `alike`
    leaves out, and what is neither a tensor nor a number.
    """
    for number, group in enumerate(vars(optimizer)["param_groups"]):
        known = [parameter for parameter in group["params"] if parameter in names]
        if known:
            yield from _items(f"param_groups[{number}]", "", group, alike)
        for parameter in known:
            tensor, name = alike(parameter), names[parameter]
            called = "" if shown is None else shown[parameter]
            if tensor is not None:
                yield of_tensor(name, tensor, called)
                if state:
                    yield from _items(name, called, optimizer.state.get(parameter, {}), alike)


def _items(owner: str, called: str, values: Mapping[str, Any], alike: Alike) -> Iterator[Compared]:
    for key in sorted(map(str, values)):
        value = values.get(key)
        shown = called and f"{called}: {key}"
        if isinstance(value, torch.Tensor):
            tensor = alike(value)
            if tensor is not None:
                yield of_tensor(f"{owner}: {key}", tensor, shown)
        elif isinstance(value, (int, float)):
            yield of_array(f"{owner}: {key}", np.array(value))._replace(shown=shown)
