"""DTensor and its placements, where each version of torch has them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import (
        DTensor,
        Partial,
        Replicate,
        Shard,
        distribute_tensor,
        placement_types,
    )
    from torch.distributed.tensor.experimental import implicit_replication
else:
    _module = import_module("torch.distributed.tensor")
    if not hasattr(_module, "DTensor"):  # before torch 2.5
        _module = import_module("torch.distributed._tensor")
    DTensor, distribute_tensor = _module.DTensor, _module.distribute_tensor
    Partial, Replicate, Shard = _module.Partial, _module.Replicate, _module.Shard
    placement_types = import_module(f"{_module.__name__}.placement_types")
    implicit_replication = import_module(f"{_module.__name__}.experimental").implicit_replication

__all__ = [
    "DTensor",
    "Partial",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "implicit_replication",
    "placement_types",
]
