"""The variables of models and optimizers, and how their values are broadcast.

Variables of Keras 3 (of any backend), of Keras 2 and of TensorFlow are alike here: all of them have
`numpy()`, `assign(value)`, `shape` and `dtype`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hvdlite import numpy as hvd
from hvdlite.common.gradients.variables import Sources
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.keras.framework import tools
from hvdlite.keras.optimizer_families import KINDS, parts_of
from hvdlite.keras.subclass import Distributed, exchange_of, lasting_only


def sources() -> Sources:
    """Return what tells the variables of the Keras backend apart.

    Raises `NotImplementedError` for a backend that hvdlite has no adapter for.
    """
    backend_sources: Sources = tools().Reducer.sources
    return backend_sources


def model_variables(model: Any) -> list[Any]:
    """Return all weights of the model, those of batch norms included; none before it is built.

    The states of random generators are no weights: ranks keep their own.
    """
    try:
        return list(model.weights)
    except ValueError:  # Keras 2 raises it for a model that is not built.
        return []


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer the model was compiled with, and all that are attributes of it."""
    others = [value for value in vars(model).values() if any(kind.owns(value) for kind in KINDS)]
    return [model.optimizer, *others]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the state of the optimizer that is the same on all ranks.

    The gradients that Keras accumulates locally are not, nor are parts of a state that is divided.
    """
    own: list[Any] = []
    for part in parts_of(optimizer):
        own += getattr(part, "_accumulated_gradients", None) or ()
        if isinstance(part, Distributed):
            own += exchange_of(part).own_state(part)
    return without(all_optimizer_variables(optimizer), own)


def all_optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the state of the optimizer, but for what backward passes of hvdlite have added up."""
    with lasting_only(optimizer):
        variables = getattr(optimizer, "variables", ())
        return list(variables() if callable(variables) else variables)


def without(variables: Iterable[Any], excluded: Iterable[Any]) -> list[Any]:
    """Return `variables` without duplicates and without those that are `excluded`."""
    key_of = sources().key_of
    rest = {key_of(variable): variable for variable in variables}
    for variable in excluded:
        rest.pop(key_of(variable), None)
    return list(rest.values())


def broadcast_values(
    variables: Sequence[Any],
    root_rank: int,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Assign to each variable its value on `root_rank`. All values are sent at the same time.

    Every rank gives variables of the same shapes and dtypes in the same order. Raises `ValueError`
    for a foreign root, and `HorovodInternalError` when ranks disagree or one is lost.
    """
    values = [np.asarray(variable.numpy()) for variable in variables]
    handles = [
        hvd.broadcast_async(value, root_rank, f"{name}.{index}", process_set)
        for index, value in enumerate(values)
    ]
    results = [hvd.synchronize(handle) for handle in handles]
    if hvd.rank() != root_rank:
        for variable, result in zip(variables, results, strict=True):
            variable.assign(result)


def build_optimizer_for(optimizer: Any, model: Any) -> None:
    """Make the variables that a first step would make, unless they are there.

    The model is built.
    """
    if getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        return
    legacy = getattr(optimizer, "_create_all_weights", None)  # Keras 2.
    build = getattr(optimizer, "build", legacy)
    if build is not None:
        build(model.trainable_variables)
