"""Optimizers in checkpoints: their state by the names of the parameters that it belongs to.

An optimizer that has not made a step has no state. A load makes what the checkpoint has for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvdlite.checkpoint.manifest import Record
from hvdlite.checkpoint.tensors import Context, Owner
from hvdlite.torch.dtypes import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def is_divided(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank has another part of the state, by ``shard_state=True``."""
    module = sys.modules.get("hvdlite.torch.sharded_state.optimizer")
    if module is None or not isinstance(optimizer, module.ShardingMixin):
        return False
    return bool(optimizer._exchange.reduction.active)


def owner(
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
    if context.manifest is not None:
        _complete(state, dict(zip(names.values(), parameters, strict=True)), context)
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in packed["param_groups"]
    ]
    follows = {
        f"state.{name}.{key}": name
        for name, entries in state.items()
        for key in entries
        if name in known.values()
    }
    tree = {"state": {name: each for name, each in state.items() if each}, "param_groups": groups}

    def install(loaded: dict[str, Any]) -> None:
        if len(loaded["param_groups"]) != len(packed["param_groups"]):
            raise ValueError(
                f"the optimizer has {len(packed['param_groups'])} groups of parameters, and "
                f"{len(loaded['param_groups'])} in the checkpoint"
            )
        restored = {
            number: loaded["state"][n] for number, n in names.items() if n in loaded["state"]
        }
        own = [
            {**group, **new}
            for group, new in zip(packed["param_groups"], loaded["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": restored, "param_groups": own})

    return Owner(optimizer, tree, install, follows)


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


def _complete(
    state: dict[str, dict[str, Any]], parameters: Mapping[str, torch.Tensor], context: Context
) -> None:
    """Add what the checkpoint has for parameters of which the optimizer has no state yet."""
    manifest = context.manifest
    assert manifest is not None
    prefix = f"{context.prefix}state."
    for full_name in manifest.names:
        if not full_name.startswith(prefix):
            continue
        name, _, key = full_name.removeprefix(prefix).rpartition(".")
        if name not in state:
            raise ValueError(
                f"the checkpoint has {full_name!r}, and the optimizer no parameter of that name: "
                "give the state the same models, under the same names, as it was saved with"
            )
        if key not in state[name]:
            record = manifest.tensors.get(full_name)
            state[name][key] = (
                None
                if record is None
                else _new(record, parameters[name], manifest.tensors.get(name))
            )


def _new(record: Record, parameter: torch.Tensor, of_parameter: Record | None) -> torch.Tensor:
    """Return a tensor for a state, as large as the part of its parameter where it is cut alike."""
    dtype = _DTYPES[record.dtype]
    full_shape = tuple(parameter.shape) if of_parameter is None else of_parameter.shape
    if record.shape == full_shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(record.shape, dtype=dtype)
