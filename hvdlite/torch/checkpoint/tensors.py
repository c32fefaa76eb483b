"""Tensors, modules and optimizers of PyTorch for checkpoints.

The state of an optimizer is saved by the names of the parameters that it belongs to. One that has
not made a step has no state: a load makes what the checkpoint has for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_map

from hvdlite.checkpoint import compression
from hvdlite.checkpoint.tensors import Array, Context, Owner, Part, Tensors
from hvdlite.common.layouts.layout import from_placements
from hvdlite.torch.checkpoint.completion import complete_parameters, completed, loads_itself
from hvdlite.torch.dtypes import DTYPE_NAMES, as_array, as_tensor


class TorchTensors(Tensors):
    """Tensors on any device, DTensors, and objects that have a `state_dict`."""

    def is_tensor(self, value: Any) -> bool:
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

    def has_values(self, tensor: Any) -> bool:
        return not isinstance(tensor, torch.Tensor) or not local(tensor).is_meta

    def array(self, tensor: Any) -> Array:
        if not isinstance(tensor, torch.Tensor):
            return super().array(tensor)
        values = local(tensor).detach().cpu().contiguous().resolve_conj().resolve_neg()
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
            return optimizer_state(thing, context, self.whole.get(id(thing)))
        if loads_itself(thing):
            own = dict(thing.state_dict())
            tree = own if context.manifest is None else own | completed(own, "", context)
            return Owner(thing, tree, thing.load_state_dict, takes_all=True)
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
        if isinstance(thing, torch.optim.Optimizer) and is_divided(thing):
            return thing.consolidate  # type: ignore[attr-defined, no-any-return]
        return None


def _module(module: torch.nn.Module) -> Owner:
    tree = dict(module.state_dict())

    def install(loaded: dict[str, Any]) -> None:
        # The module's own tensors were loaded in place. Extra state, and what a hook has copied for
        # the state dict, the module takes back itself.
        own = {_memory(each) for each in (*module.parameters(), *module.buffers())}
        if not all(
            isinstance(value, torch.Tensor)
            and _memory(value) in own
            and not name.endswith(_EXTRA_STATE_KEY_SUFFIX)
            for name, value in loaded.items()
        ):
            module.load_state_dict(loaded)

    return Owner(module, tree, install)


def _memory(tensor: torch.Tensor) -> int | None:
    """Return what two tensors with the same memory have in common; None if it is not strided."""
    held = local(tensor)
    return held.untyped_storage()._cdata if held.layout is torch.strided else None


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Return whether `value` is a DTensor, without importing what has them."""
    kinds = type(value).__mro__ if isinstance(value, torch.Tensor) else ()
    return any(kind.__name__ == "DTensor" for kind in kinds)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, in its own memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        held: torch.Tensor = tensor.to_local()
    return held


def is_divided(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank has another part of the state, by ``shard_state=True``."""
    module = sys.modules.get("hvdlite.torch.sharded_state.optimizer")
    if module is None or not isinstance(optimizer, module.ShardingMixin):
        return False
    return bool(optimizer._exchange.reduction.active)


def optimizer_state(
    optimizer: torch.optim.Optimizer, context: Context, whole: dict[str, Any] | None = None
) -> Owner:
    """Return the state of an optimizer as a tree.

    `whole` is the state dict of one whose state is divided among ranks. Parameters have the names
    of those modules that are in the same state as the optimizer, and numbers otherwise. Raises
    `ValueError` if the checkpoint has state for parameters of other names, and for a divided state
    that was not gathered.
    """
    if whole is None and is_divided(optimizer):
        raise ValueError(
            "each rank has another part of the state of an optimizer with shard_state=True: "
            "give its consolidate()"
        )
    packed = optimizer.state_dict() if whole is None else whole
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    known = dict(_named_parameters(context.state, ""))
    names = {
        number: known.get(id(parameter), str(number))
        for number, parameter in zip(numbers, parameters, strict=True)
    }
    state = {names[number]: dict(packed["state"].get(number, {})) for number in numbers}
    # What belongs to no parameter: a count of all steps, mostly.
    others = {key: value for key, value in packed["state"].items() if key not in names}
    groups: Any = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in packed["param_groups"]
    ]
    # Numbers of numpy, which schedules compute, are no tensors here.
    groups = tree_map(lambda each: each.item() if isinstance(each, np.generic) else each, groups)
    if context.manifest is not None:
        complete_parameters(state, dict(zip(names.values(), parameters, strict=True)), context)
        others |= completed(others, "others", context)
        groups = completed(groups, "param_groups", context)
    follows = {
        f"state.{name}.{key}": name
        for name, entries in state.items()
        for key in entries
        if name in known.values()
    }
    of_parameters = {name: each for name, each in state.items() if each}
    tree: dict[str, Any] = {"state": of_parameters, "param_groups": groups}
    if others:
        tree["others"] = others
    remembered = packed.get("compression", {}) if hasattr(optimizer, "load_compression") else {}
    entries, layouts = compression.described(remembered, context.manifest, context.prefix)

    def install(loaded: dict[str, Any]) -> None:
        if len(loaded["param_groups"]) != len(packed["param_groups"]):
            raise ValueError(
                f"the optimizer has {len(packed['param_groups'])} groups of parameters, and "
                f"{len(loaded['param_groups'])} in the checkpoint"
            )
        restored = {
            number: loaded["state"][n] for number, n in names.items() if n in loaded["state"]
        } | loaded.get("others", {})
        own = [
            {**group, **new}
            for group, new in zip(packed["param_groups"], loaded["param_groups"], strict=True)
        ]
        new: dict[str, Any] = {"state": restored, "param_groups": own}
        if entries:
            new["compression"] = compression.restored(loaded[compression.KEY])
        optimizer.load_state_dict(new)

    return Owner(optimizer, tree | entries, install, follows=follows, layouts=layouts)


def _named_parameters(state: Any, prefix: str) -> Iterator[tuple[int, str]]:
    """Yield the identities and full names of the parameters of all modules of a state."""
    if isinstance(state, torch.nn.Module):
        for name, parameter in state.named_parameters():
            yield id(parameter), f"{prefix}{name}"
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _named_parameters(value, f"{prefix}{key}.")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from _named_parameters(value, f"{prefix}{index}.")
