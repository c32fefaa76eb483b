"""The tensors of a module as DTensors, and which layout a tensor is held in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.layouts.layout import Layout, from_placements, whole
from hvdlite.torch.sharding.dtensor import DTensor, Shard, distribute_tensor
from hvdlite.torch.sharding.meshes import nearest_placements
from hvdlite.torch.sharding.planning.planner import named_tensors


def distribute(
    module: torch.nn.Module, layouts: Mapping[str, Layout], mesh: Any
) -> dict[str, tuple[torch.Tensor, int]]:
    """Make parameters and buffers DTensors in these layouts, with the values of rank 0.

    Parameters keep their attributes and their hooks, which get DTensors. Those on the meta device
    get memory for their parts alone. Returns the buffers among these that no checkpoint has, by
    their names: the local tensors, and the versions that they are made with.
    """
    unfilled_buffers: dict[str, tuple[torch.Tensor, int]] = {}
    cut: dict[int, Any] = {}
    in_checkpoints = module.state_dict().keys()
    for name, (first, tensor) in named_tensors(module).items():
        if name != first:
            continue
        where = nearest_placements(layouts[name], mesh)
        if tensor.is_meta:
            value = _unfilled(tensor, mesh, where)
            if name not in in_checkpoints and value.numel():
                local = value._local_tensor
                unfilled_buffers[name] = local, local._version
        else:
            value = distribute_tensor(tensor.detach(), mesh, where)
        cut[id(tensor)] = value
        if isinstance(tensor, torch.nn.Parameter):
            parameter = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
            parameter.__dict__.update(tensor.__dict__)
            parameter._backward_hooks = tensor._backward_hooks
            parameter._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
            cut[id(tensor)] = parameter
    for submodule in module.modules():
        tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
        for table in tables:
            table.update({name: cut[id(each)] for name, each in table.items() if id(each) in cut})
    return unfilled_buffers


def _unfilled(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """Return a DTensor in place of one without memory: NaN, or 0, until values are loaded."""
    local = list(tensor.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size(axis)
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    device, value = mesh.device_type, 0 if is_exact else float("nan")
    return DTensor.from_local(
        torch.full(local, value, dtype=tensor.dtype, device=device), mesh, placements,
        run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def held_layout(tensor: Any, ranks: int) -> Layout:
    """Return the layout of a parameter or buffer as it is held."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.ndim, ranks)
    return layout_of_placements(tuple(tensor.device_mesh.shape), tensor.placements, tensor)


def layout_of_placements(mesh_shape: Sequence[int], placements: Any, tensor: Any) -> Layout:
    """Return the layout of a tensor that is placed so, which divides evenly."""
    dimensions = [each.dim if isinstance(each, Shard) else None for each in placements]
    held = from_placements(mesh_shape, dimensions, tensor.ndim)
    return Layout(held.device_matrix, held.tensor_map)
