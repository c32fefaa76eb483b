"""Device meshes over the ranks of the job, and how tensors are placed on them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from hvdlite.common.layouts.exchange import simplified
from hvdlite.common.layouts.layout import Layout, from_cuts, on_mesh, prime_factors
from hvdlite.common.runtime.basics import size
from hvdlite.torch.process_group.checks import BACKEND
from hvdlite.torch.process_group.registration import init_process_group
from hvdlite.torch.sharding.dtensor import Replicate, Shard, placement_types

# The function by which a placement turns into one of another dimension.
_ALLTOALL = "shard_dim_alltoall"


def mesh(
    shape: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    device: str = "cpu",
) -> Any:
    """Return a `DeviceMesh` of all ranks, row by row; makes the process group where there is none.

    `shape` None: the prime factors of the number of ranks, so that any strategy on 2^k ranks cuts
    along neighbouring axes. `names` has one name for each axis. Every rank must call it. From then
    on DTensor cuts tensors along another dimension by an alltoall, also on a CPU. Raises
    `ValueError` for a shape with another number of ranks than the job, and for wrong names.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        init_process_group()
    found = prime_factors(size()) if shape is None else tuple(shape)
    ranks = Layout(found, ()).ranks
    if ranks != size():
        raise ValueError(f"a mesh of shape {found} has {ranks} ranks, and the job has {size()}")
    if names is not None and (len(names) != len(found) or len(set(names)) != len(found)):
        raise ValueError(
            f"a mesh of shape {found} has {len(found)} different names, not {tuple(names)}"
        )
    use_alltoalls()
    return init_device_mesh(device, found, mesh_dim_names=None if names is None else tuple(names))


@functools.cache
def use_alltoalls() -> None:
    """Have DTensor change the cut dimension by an alltoall on meshes over hvdlite, also on a CPU.

    It gathers the whole tensor on every rank of a CPU mesh and cuts it, as gloo once had no
    alltoall. By that of hvdlite a rank receives one n-th of these bytes. A release of torch without
    that function goes on as it is.
    """
    gathering: Callable[..., Any] | None = getattr(placement_types, _ALLTOALL, None)
    if gathering is None:
        return

    @functools.wraps(gathering)
    def exchange(tensor: Any, gathered: int, cut: int, mesh: Any, axis: int) -> Any:
        group = mesh.get_group(axis)
        if mesh.device_type != "cpu" or dist.get_backend(group) != BACKEND:
            return gathering(tensor, gathered, cut, mesh, axis)
        # torch's own operator for it asks some releases' groups for a backend in C++.
        sent = torch.stack(tensor.chunk(group.size(), cut)).contiguous()
        came: torch.Tensor = wait_tensor(  # type: ignore[no-untyped-call]
            all_to_all_single(sent, None, None, group)
        )
        return torch.cat(came.unbind(), gathered)

    setattr(placement_types, _ALLTOALL, exchange)


def layout(device_matrix: Sequence[int], tensor_map: Sequence[int | Sequence[int]]) -> Layout:
    """Return the layout with this device matrix and tensor map. Raises `ValueError`."""
    return Layout(device_matrix, tensor_map)


def placements(cuts: Sequence[int] | Layout, mesh: Any) -> list[Any]:
    """Return DTensor's placements of a tensor that is cut into ``cuts[i]`` parts in dimension i.

    The ranks that are left repeat the parts, neighbours having the same. A `Layout` is placed as it
    is. Raises `ValueError` where the mesh has no axes for it.
    """
    given = cuts if isinstance(cuts, Layout) else from_cuts(cuts, mesh.size())
    return [
        Replicate() if dimension is None else Shard(dimension)
        for dimension in on_mesh(simplified(given), tuple(mesh.shape))
    ]


def nearest_placements(layout: Layout, mesh: Any) -> list[Any]:
    """Return the placements of a layout, or the finest ones whose cuts a mesh has axes for.

    Ranks then hold other parts than the layout says, of as many elements or more.
    """
    try:
        return placements(layout, mesh)
    except ValueError:
        pass
    axes = tuple(mesh.shape)
    dimensions = range(len(layout.cuts))

    def parts(choice: tuple[int | None, ...]) -> list[int]:
        return [
            math.prod(n for n, d in zip(axes, choice, strict=True) if d == i) for i in dimensions
        ]

    fitting = [
        choice
        for choice in itertools.product([None, *dimensions], repeat=len(axes))
        if all(cut % n == 0 for cut, n in zip(layout.cuts, parts(choice), strict=True))
    ]
    found = max(fitting, key=lambda choice: math.prod(parts(choice)))
    return [Replicate() if dimension is None else Shard(dimension) for dimension in found]
