"""Whole tensors that are loaded into a sharded module."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.torch.sharding.dtensor import DTensor, Replicate, Shard, wrapped
from hvdlite.torch.sharding.planning.planner import named_tensors


def cut_what_is_loaded(module: Any, state_dict: Any, prefix: str, *others: Any) -> None:
    """Put this rank's parts in the place of whole tensors; a hook before a state dict is loaded.

    `Module.load_state_dict` copies plain tensors into plain ones only. What FSDP2 has cut further
    is left to torch's own functions.
    """
    for name, (_, held) in named_tensors(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(held, DTensor) and isinstance(value, torch.Tensor):
            part = None if isinstance(value, DTensor) else _part(value, held)
            if part is not None:
                state_dict[prefix + name] = wrapped(part, held._spec)


def _part(value: torch.Tensor, held: Any) -> torch.Tensor | None:
    """Return this rank's part of a tensor; None where it cannot be cut as a DTensor is."""
    if value.shape != held.shape:
        return None
    for axis, placement in enumerate(held.placements):
        if type(placement) is Shard:
            parts = value.chunk(held.device_mesh.size(axis), placement.dim)
            place = held.device_mesh.get_local_rank(axis)
            # The last ranks have no rows of a tensor with fewer than there are ranks.
            value = parts[place] if place < len(parts) else value.narrow(placement.dim, 0, 0)
        elif type(placement) is not Replicate:
            return None
    return value.detach().clone() if value.shape == held._local_tensor.shape else None
