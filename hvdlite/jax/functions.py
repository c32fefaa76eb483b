"""Broadcasts of pytrees and Python objects, and the gathering of objects."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from hvdlite.common.api import objects
from hvdlite.common.api.objects import array_forms
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.tensors.adapter import DTYPES
from hvdlite.jax.sharded_state.shards import is_shard
from hvdlite.jax.trees import from_host, is_array, to_host

broadcast_object = objects.broadcast_object
allgather_object = objects.allgather_object


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the pytree with the arrays of the global rank `root_rank`; blocks.

    `params` is any pytree, such as parameters or the state of an optimizer, of the same structure,
    shapes and dtypes on all ranks. Leaves that are no arrays stay as they are, and so do parts of a
    state that is divided among the ranks. Arrays stay on the devices on which they are. Raises
    `ValueError` for arrays that are traced.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_shard)
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
        raise ValueError(
            "broadcast_parameters needs values, and these are traced: call it outside of jax.jit, "
            "before the first step"
        )
    handles, kinds = {}, {}
    for path, leaf in leaves:
        if is_array(leaf):
            name = f"broadcast_parameters.{jax.tree_util.keystr(path)}"
            values = to_host(leaf)
            dtype = values.dtype
            kinds[path] = dtype, values.shape
            if dtype.name not in DTYPES or not dtype.isnative:  # Collectives move it as bytes.
                values = np.ravel(values).view(np.uint8)
            handles[path] = array_forms.broadcast_async(values, root_rank, name, process_set)
    received = []
    for path, leaf in leaves:
        if path not in handles:
            received.append(leaf)
            continue
        dtype, shape = kinds[path]
        values = array_forms.synchronize(handles[path]).view(dtype).reshape(shape)
        received.append(from_host(values, leaf))
    return jax.tree_util.tree_unflatten(structure, received)


__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]
