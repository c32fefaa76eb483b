"""What a load fills that an optimizer, or another object, does not hold yet.

Tensors, dicts and lists are made as the checkpoint has them; tensors that are there stay, and are
loaded in place.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from hvdlite.checkpoint.keys import nested
from hvdlite.checkpoint.manifest import Manifest, Place, Record
from hvdlite.checkpoint.tensors import Context
from hvdlite.torch.dtypes import DTYPES

_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def complete_parameters(
    state: dict[str, dict[str, Any]], parameters: Mapping[str, torch.Tensor], context: Context
) -> None:
    """Make the state of parameters what the checkpoint has, of which the optimizer may have none.

    Raises `ValueError` where it has no such parameter.
    """
    manifest = context.manifest
    assert manifest is not None
    prefix = f"{context.prefix}state."
    found: dict[str, list[str]] = {}
    for full_name in manifest.names:
        if not full_name.startswith(prefix):
            continue
        name, _, key = full_name.removeprefix(prefix).rpartition(".")
        while name not in state and key.isdigit():  # A place in a list.
            name, _, key = name.rpartition(".")
        if name not in state:
            raise ValueError(
                f"the checkpoint has {full_name!r}, and the optimizer no parameter of that name: "
                "give the state the same models, under the same names, as it was saved with"
            )
        found.setdefault(name, []).append(full_name)
    for name, full_names in found.items():
        entries = nested(full_names, f"{prefix}{name}.", state[name], manifest.keys)
        new = functools.partial(_new, parameters[name], manifest.tensors.get(name))
        state[name] |= _as_saved(state[name], entries, manifest, new)


def completed(own: Any, name: str, context: Context) -> Any:
    """Return `own` as the checkpoint has what is of this name below the owner; "" for all of it."""
    manifest = context.manifest
    assert manifest is not None
    full_name = f"{context.prefix}{name}"
    if name and full_name in manifest.values:
        return _as_saved(own, full_name, manifest, _zeros)
    prefix = f"{full_name}." if name else full_name
    names = [each for each in manifest.names if each.startswith(prefix)]
    found = nested(names, prefix, own, manifest.keys)
    return _as_saved(own, found, manifest, _zeros) if found else own


def _as_saved(
    own: Any, found: Any, manifest: Manifest, new: Callable[[Record], torch.Tensor]
) -> Any:
    """Return what a checkpoint can be loaded into that has tensors and lists where `own` has not.

    `found` is a name, or dicts of such by the keys of dicts and lists. Tensors that are there stay.
    """
    if loads_itself(own):
        return own
    if isinstance(found, str):
        record = manifest.tensors.get(found)
        if record is not None:
            return own if isinstance(own, _ARRAYS) else new(record)
        # One value, in which there are no tensors.
        if isinstance(own, Mapping):
            return _alike(own, {}) if manifest.values[found] == {} else None
        return tree_map(lambda each: None if isinstance(each, _ARRAYS) else each, own)
    is_list = isinstance(own, (list, tuple))
    places = {key.index: each for key, each in found.items() if isinstance(key, Place)}
    if len(places) == len(found) and (is_list or places.keys() == set(range(len(places)))):
        held: Any = dict(enumerate(own)) if is_list else {}
        items = [
            _as_saved(held.get(index), places[index], manifest, new)
            if index in places
            else held.get(index)
            for index in range(max(places) + 1)
        ]
        return tuple(items) if isinstance(own, tuple) else items
    found = {str(key) if isinstance(key, Place) else key: each for key, each in found.items()}
    held = own if isinstance(own, Mapping) else {}
    made = {key: each for key, each in held.items() if key in found or loads_itself(each)}
    for key, each in found.items():
        made[key] = _as_saved(held.get(key), each, manifest, new)
    return _alike(own, made)


def loads_itself(value: Any) -> bool:
    """Return whether an object gives its state, and takes one back."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _alike(own: Any, made: dict[Any, Any]) -> Any:
    """Return a dict as one of the same type, such as a Counter."""
    if type(own) is dict or not isinstance(own, dict):
        return made
    new = copy.copy(own)
    new.clear()
    new.update(made)
    return new


def _new(parameter: torch.Tensor, of_parameter: Record | None, record: Record) -> torch.Tensor:
    """Return a tensor for a state, as large as the part of its parameter where it is cut alike."""
    full_shape = tuple(parameter.shape) if of_parameter is None else of_parameter.shape
    if record.shape == full_shape:
        return torch.zeros_like(parameter, dtype=DTYPES[record.dtype], requires_grad=False)
    return _zeros(record)


def _zeros(record: Record) -> torch.Tensor:
    return torch.zeros(record.shape, dtype=DTYPES[record.dtype])
