"""DTensor and its placements, where each version of torch has them, and new ones for little."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

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
    "gradient_of",
    "placement_types",
    "wrapped",
]


_detach = torch.ops.aten.detach.default


class _Gradient(DTensor):
    """A DTensor until autograd keeps it, in `.grad`, where it is one of torch's own class.

    Autograd detaches each gradient that it keeps. DTensor's way to do so takes 6 us of a core,
    which in a model with hundreds of parameters is as much as the whole way in.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _detach:
            return _made(args[0]._local_tensor, args[0]._spec)
        of_dtensors: Any = super().__torch_dispatch__
        return of_dtensors(func, types, args, kwargs or {})

    # Hooks and `torch.autograd.grad` give this class to a user; copies of it are of torch's.

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_made(self._local_tensor, self._spec), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made(self._local_tensor, self._spec).__reduce_ex__(protocol)


def _made(local: torch.Tensor, spec: Any, kind: Any = DTensor) -> Any:
    # Its __init__ does nothing, through decorators that take longer than all else here. Nobody
    # changes a spec: DTensor's own operators share one among many tensors.
    return kind.__new__(kind, local, spec, requires_grad=False)


def wrapped(local: torch.Tensor, spec: Any) -> Any:
    """Return a DTensor of what this rank holds, which is cut as another one, in its own dtype."""
    return _made(local, _of_dtype(spec, local.dtype))


def gradient_of(local: torch.Tensor, spec: Any) -> Any:
    """Return the same for autograd, which takes it for the gradient of a parameter."""
    return _made(local, _of_dtype(spec, local.dtype), _Gradient)


def _of_dtype(spec: Any, dtype: torch.dtype) -> Any:
    meta = spec.tensor_meta
    return (
        spec
        if meta.dtype == dtype
        else spec.shallow_copy_with_tensor_meta(meta._replace(dtype=dtype))
    )
