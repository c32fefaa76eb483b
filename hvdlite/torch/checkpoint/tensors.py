"""Tensors, modules and optimizers of PyTorch for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import torch

from hvdlite.checkpoint.tensors import Array, Context, Owner, Part, Tensors
from hvdlite.common.layouts.layout import from_placements
from hvdlite.torch.checkpoint import optimizers
from hvdlite.torch.dtypes import DTYPE_NAMES, as_array, as_tensor


class TorchTensors(Tensors):
    """Tensors on any device, DTensors, and objects that have a `state_dict`."""

    def is_tensor(self, value: Any) -> bool:
        """Return whether `value` is a tensor or an array."""
        return isinstance(value, torch.Tensor) or super().is_tensor(value)

    def kind(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of what this rank holds. Raises `ValueError` for other dtypes."""
        if not isinstance(tensor, torch.Tensor):
            return super().kind(tensor)
        if tensor.layout is not torch.strided:
            raise ValueError(f"a tensor is {tensor.layout}: call to_dense() for a checkpoint")
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"checkpoints have no {tensor.dtype}: convert the tensor")
        return DTYPE_NAMES[tensor.dtype], tuple(local(tensor).shape)

    def array(self, tensor: Any) -> Array:
        """Return the values on the host."""
        if not isinstance(tensor, torch.Tensor):
            return super().array(tensor)
        values = local(tensor).detach().cpu().contiguous()
        return as_array(values).reshape(tuple(values.shape))

    def store(self, tensor: Any, values: Array) -> Any:
        """Copy values into a tensor, and return it."""
        if not isinstance(tensor, torch.Tensor):
            return super().store(tensor, values)
        # torch has no read-only tensors, and warns of arrays that are.
        flat = np.ravel(values if values.flags.writeable else values.copy())
        with torch.no_grad():
            local(tensor).copy_(as_tensor(flat).reshape(values.shape))
        return tensor

    def part(self, tensor: Any) -> Part | None:
        """Return the part of a DTensor that this rank holds.

        Raises `ValueError` where that is not one block.
        """
        if not is_dtensor(tensor):
            return None
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        # FSDP after tensor parallelism cuts one dimension in another order, by a subclass of Shard.
        kinds = {type(each).__name__ for each in tensor.placements}
        if not kinds <= {"Shard", "Replicate"} or coordinate is None:
            raise ValueError(
                f"a DTensor with {tensor.placements} on {mesh} is not one block on this rank, and "
                "cannot be read from a checkpoint of safetensors"
            )
        dimensions = [each.dim if each.is_shard() else None for each in tensor.placements]
        layout = from_placements(tuple(mesh.shape), dimensions, tensor.ndim)
        index = int(np.ravel_multi_index(coordinate, tuple(mesh.shape)))
        return Part(tuple(tensor.shape), layout.box(tuple(tensor.shape), index))

    def owner(self, thing: Any, context: Context) -> Owner | None:
        """Return the tensors of a module, an optimizer, or another object with a `state_dict`."""
        if isinstance(thing, torch.nn.Module):
            return _module(thing)
        if isinstance(thing, torch.optim.Optimizer):
            return optimizers.owner(thing, context, self.whole.get(id(thing)))
        if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            return Owner(thing, dict(thing.state_dict()), thing.load_state_dict)
        return None

    def gather_of(self, thing: Any, name: str) -> Callable[[], Any] | None:
        """Return what gathers the state of an optimizer with ``shard_state=True``.

        Raises `ValueError` for the state dict of one, which is a part of a state.
        """
        if isinstance(thing, dict) and {"state", "param_groups", "shards"} <= thing.keys():
            raise ValueError(
                f"{name!r} is the state_dict() of an optimizer with shard_state=True, of which "
                "each rank has another part: give the optimizer itself, or its consolidate()"
            )
        if isinstance(thing, torch.optim.Optimizer) and optimizers.is_divided(thing):
            return thing.consolidate  # type: ignore[attr-defined, no-any-return]
        return None


def _module(module: torch.nn.Module) -> Owner:
    tree = dict(module.state_dict())

    def install(loaded: dict[str, Any]) -> None:
        # Tensors were loaded in place; modules may have extra state that is none.
        if not all(isinstance(value, torch.Tensor) for value in loaded.values()):
            module.load_state_dict(loaded)

    return Owner(module, tree, install)


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Return whether `value` is a DTensor, without importing what has them."""
    return isinstance(value, torch.Tensor) and type(value).__name__ == "DTensor"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, in its own memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        held: torch.Tensor = tensor.to_local()
    return held
