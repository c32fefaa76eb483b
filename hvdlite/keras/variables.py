"""The variables of models and optimizers: which there are, and how their values travel.

Variables of Keras 3 (of any backend), of Keras 2 and of TensorFlow are alike here: all of them have
`numpy()`, `assign(value)`, `shape` and `dtype`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hvdlite import numpy as hvd
from hvdlite.common.process_sets import ProcessSet, global_process_set
from hvdlite.keras.kinds import KINDS, parts_of


def is_variable(thing: Any) -> bool:
    """Whether it is a variable of Keras or of TensorFlow."""
    return callable(getattr(thing, "assign", None)) and callable(getattr(thing, "numpy", None))


def model_variables(model: Any) -> list[Any]:
    """All weights of the model, those of batch norms included; none before it is built.

    The states of random generators are no weights: ranks keep their own.
    """
    try:
        return list(model.weights)
    except ValueError:  # Keras 2, for a model that is not built
        return []


def optimizers_of(model: Any) -> list[Any]:
    """That which the model was compiled with, and all that are attributes of it."""
    others = [each for each in vars(model).values() if any(kind.owns(each) for kind in KINDS)]
    return [model.optimizer, *others]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The state of the optimizer, without what it accumulates of gradients of this rank alone."""
    variables = getattr(optimizer, "variables", ())
    variables = variables() if callable(variables) else variables
    own = [
        gradient
        for each in parts_of(optimizer)
        for gradient in getattr(each, "_accumulated_gradients", None) or ()
    ]
    return without(variables, own)


def without(variables: Iterable[Any], excluded: Iterable[Any]) -> list[Any]:
    """`variables`, each once, without those that are `excluded`, or are the value of one."""
    known = {id(part) for each in excluded for part in _parts(each)}
    rest = []
    for each in variables:
        parts = {id(part) for part in _parts(each)}
        if not known & parts:
            rest.append(each)
            known |= parts
    return rest


def _parts(variable: Any) -> list[Any]:
    """The variable, and the backend's own that a variable of Keras 3 stands for."""
    inner = getattr(variable, "_value", None)
    return [variable] if inner is None or callable(inner) else [variable, inner]


def broadcast_values(
    variables: Sequence[Any],
    root_rank: int,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Assign to each variable its value on `root_rank`; all values are under way together.

    Every rank gives variables of the same shapes and dtypes in the same order. Raises `ValueError`
    for a foreign root, and `HorovodInternalError` when ranks disagree or one is lost.
    """
    values = [np.asarray(each.numpy()) for each in variables]
    handles = [
        hvd.broadcast_async(value, root_rank, f"{name}.{index}", process_set)
        for index, value in enumerate(values)
    ]
    results = [hvd.synchronize(handle) for handle in handles]
    if hvd.rank() != root_rank:
        for variable, result in zip(variables, results, strict=True):
            variable.assign(result)


def build_optimizer(model: Any) -> None:
    """Make the variables that a first step would make, where the model has been built."""
    optimizer = model.optimizer
    built = getattr(optimizer, "built", getattr(optimizer, "_built", True))
    if not built and model.built:
        optimizer.build(model.trainable_variables)
