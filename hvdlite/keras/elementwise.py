"""Which optimizers of Keras can step over shards: those that treat each element on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.keras.framework import keras
from hvdlite.keras.gradient_exchange import Settings
from hvdlite.keras.optimizer_families import parts_of

KNOWN_TO_LOOK_AT_WHOLE = {"adafactor", "muon", "lamb", "lars", "shampoo", "novograd"}
_NEED = (
    "shard_state=True steps over a flat shard, which is a piece of many variables, so that it "
    "needs an optimizer that treats each element on its own, as SGD and Adam do. Leave shard_state "
    "out"
)
_SHAPES = ((3, 4), (5,))


def check_shardable(optimizer: Any, settings: Settings) -> None:
    """Raise `ValueError` where the optimizer, or an option, needs more than a part of the state."""
    objections = {
        "a loss scaler decides by all gradients": len(list(parts_of(optimizer))) > 1,
        "it is built already: wrap it before": getattr(optimizer, "built", True),
        "clipnorm looks at whole variables: use clipvalue": optimizer.clipnorm is not None,
        "global_clipnorm looks at all gradients: use clipvalue": (
            optimizer.global_clipnorm is not None
        ),
        "use_ema keeps averages of whole variables": optimizer.use_ema,
        "groups have no place in flat shards": settings.groups is not None,
        "local layers have no place in flat shards": settings.local_layers is not None,
        "a segmentation has no place in flat shards": settings.reduction.segmentation is not None,
        "op must be Average or Sum": settings.reduction.scaling.op
        not in (ReduceOp.AVERAGE, ReduceOp.SUM),
        "variables are excluded from weight decay by name": bool(
            getattr(optimizer, "_exclude_from_weight_decay", None)
            or getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
        ),
    }
    for reason, applies in objections.items():
        if applies:
            raise ValueError(f"shard_state=True: {type(optimizer).__name__}: {reason}")
    if any(cls.__name__.lower() in KNOWN_TO_LOOK_AT_WHOLE for cls in type(optimizer).__mro__):
        raise ValueError(f"{type(optimizer).__name__} looks at whole variables: {_NEED}")
    if not treats_elements_alone(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__}: a step over a flat variable gives other values than one "
            f"over the variables: {_NEED}"
        )


def treats_elements_alone(optimizer: Any) -> bool:
    """Return whether a few steps of small variables of its own are the same when they are flat."""
    random = np.random.default_rng(1)
    values = [random.normal(size=shape) for shape in _SHAPES]
    steps = [[random.normal(size=shape) for shape in _SHAPES] for _ in range(3)]
    try:
        apart = _train(optimizer, values, steps)
        flat = _train(optimizer, [_row(values)], [[_row(step)] for step in steps])
    except (TypeError, NotImplementedError):  # its configuration does not make another one
        return True
    return bool(np.allclose(_row(apart), flat[0], rtol=1e-4, atol=1e-6))


def _row(arrays: Sequence[Any]) -> Any:
    return np.concatenate([np.reshape(each, -1) for each in arrays])


def _train(optimizer: Any, values: Sequence[Any], steps: Sequence[Sequence[Any]]) -> list[Any]:
    twin = type(optimizer).from_config(optimizer.get_config())
    variables = [keras.Variable(value, dtype="float32", trainable=False) for value in values]
    for gradients in steps:
        twin.apply([keras.ops.convert_to_tensor(each, "float32") for each in gradients], variables)
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]
