"""DTensor and its placements, where each version of torch has them, and what ranks hold of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    "local_tensors",
    "placement_types",
    "wrapped",
]


# So many bytes of gradients are held back at most until all of a function's inputs have theirs.
_TOGETHER_BYTES = 1 << 22


class _Locals(torch.autograd.Function):
    """What this rank holds of DTensors, whose gradients are DTensors that are cut as they are."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        held = [each._local_tensor for each in tensors]
        ctx.like = [(each._spec, local.stride()) for each, local in zip(tensors, held, strict=True)]
        return tuple(local.view_as(local) for local in held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(
            None if gradient is None else _cut_alike(gradient, *like)
            for gradient, like in zip(gradients, ctx.like, strict=True)
        )


def _cut_alike(gradient: torch.Tensor, spec: Any, strides: Sequence[int]) -> Any:
    """Return the gradient of a DTensor, of which this rank has a part."""
    if gradient.stride() != strides:
        # Plain parameters get gradients with their own strides, too.
        gradient = gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
    return wrapped(gradient, spec)


def wrapped(local: torch.Tensor, spec: Any) -> Any:
    """Return a DTensor of what this rank holds, which is cut as another one, in its own dtype."""
    meta = spec.tensor_meta
    if meta.dtype != local.dtype:
        spec = spec.shallow_copy_with_tensor_meta(meta._replace(dtype=local.dtype))
    made: Any = DTensor
    # Its __init__ does nothing, through decorators that take longer than all else here. Nobody
    # changes a spec: DTensor's own operators share one among many tensors.
    return made.__new__(made, local, spec, requires_grad=False)


def local_tensors(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return what this rank holds of tensors, which shares their memory.

    `DTensor.to_local` takes a function of autograd for each of them, and another one for its
    gradient; a model has hundreds of parameters. Here small ones have a function together.
    """
    found = [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
    if torch.is_grad_enabled():
        for places in _together(tensors, found):
            locals_: Any = _Locals.apply(*(tensors[place] for place in places))  # type: ignore[no-untyped-call]
            for place, local in zip(places, locals_, strict=True):
                found[place] = local
    return found


def _together(tensors: Sequence[Any], held: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the places of neighbours that need gradients, few enough bytes at a time."""
    places: list[int] = []
    held_back = 0
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and tensor.requires_grad:
            if places and held_back + held[place].nbytes > _TOGETHER_BYTES:
                yield places
                places, held_back = [], 0
            places.append(place)
            held_back += held[place].nbytes
    if places:
        yield places
