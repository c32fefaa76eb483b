"""DTensor and its placements, where each version of torch has them, and what ranks hold of one."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

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
    "local_tensor",
    "placement_types",
]


class _Local(torch.autograd.Function):
    """What this rank holds of a DTensor, whose gradient is a DTensor that is cut as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        held: torch.Tensor = tensor._local_tensor
        ctx.spec, ctx.strides = tensor._spec, held.stride()
        return held.view_as(held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient.stride() != ctx.strides:
            # Plain parameters get gradients with their own strides, too.
            size = gradient.shape
            gradient = gradient.new_empty_strided(size, ctx.strides).copy_(gradient)
        made: Any = DTensor
        return made(gradient, copy.copy(ctx.spec), requires_grad=False)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor, which shares its memory.

    `DTensor.to_local` has its gradient made by a second function of autograd, which takes three
    times as long; a model has hundreds of parameters.
    """
    if not isinstance(tensor, DTensor):
        plain: torch.Tensor = tensor
        return plain
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        held: torch.Tensor = tensor._local_tensor
        return held
    local: torch.Tensor = _Local.apply(tensor)  # type: ignore[no-untyped-call]
    return local
