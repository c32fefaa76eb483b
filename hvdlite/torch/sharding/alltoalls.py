"""A tensor that is cut along another dimension: DTensor's alltoall, on a CPU as well.

DTensor gathers the whole tensor on every rank of a CPU mesh and cuts it, as gloo once had no
alltoall. hvdlite has one, by which a rank receives one n-th of these bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from hvdlite.torch.process_group.checks import BACKEND
from hvdlite.torch.sharding.dtensor import placement_types

# The function by which a placement turns into one of another dimension.
_NAME = "shard_dim_alltoall"


@functools.cache
def use_alltoalls() -> None:
    """Have DTensor change the cut dimension by an alltoall on meshes over hvdlite.

    A release of torch without that function goes on as it is.
    """
    gathering: Callable[..., Any] | None = getattr(placement_types, _NAME, None)
    if gathering is None:
        return

    @functools.wraps(gathering)
    def exchange(tensor: Any, gathered: int, cut: int, mesh: Any, axis: int) -> Any:
        group = mesh.get_group(axis)
        if mesh.device_type != "cpu" or dist.get_backend(group) != BACKEND:
            return gathering(tensor, gathered, cut, mesh, axis)
        return _exchange(tensor, gathered, cut, group)

    setattr(placement_types, _NAME, exchange)


def _exchange(tensor: torch.Tensor, gathered: int, cut: int, group: Any) -> torch.Tensor:
    """Return what is cut along `cut` of a tensor that was cut along `gathered`, evenly.

    torch's own operator for it asks some releases' groups for a backend in C++.
    """
    sent = torch.stack(tensor.chunk(group.size(), cut)).contiguous()
    came: torch.Tensor = wait_tensor(  # type: ignore[no-untyped-call]
        all_to_all_single(sent, None, None, group)
    )
    return torch.cat(came.unbind(), gathered)
