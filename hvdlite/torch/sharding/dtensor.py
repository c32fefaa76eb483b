"""DTensor and its placements, where each version of torch has them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import (
        DTensor,
        Replicate,
        Shard,
        distribute_tensor,
        placement_types,
    )
else:
    _module = import_module("torch.distributed.tensor")
    if not hasattr(_module, "DTensor"):  # before torch 2.5
        _module = import_module("torch.distributed._tensor")
    DTensor, distribute_tensor = _module.DTensor, _module.distribute_tensor
    Replicate, Shard = _module.Replicate, _module.Shard
    placement_types = import_module(f"{_module.__name__}.placement_types")

__all__ = [
    "DTensor",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "placement_types",
]
