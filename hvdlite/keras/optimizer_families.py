"""The families of optimizers in Keras 2 and 3, and the methods by which each applies gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.tensors.compression import FeedbackCompressor
from hvdlite.keras.framework import keras
from hvdlite.keras.gradient_exchange import Exchange, Settings

Entry = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """One family of optimizers.

    Gradients come in through the methods in `entries`. The `guarded` methods behind them may only
    be called from there, with gradients that have been reduced.
    """

    package: str
    base: str  # The common base class, as a path inside the package.
    loss_scaler: str  # The class that scales losses for this family, with its module.
    entries: Mapping[str, Entry]
    guarded: Sequence[str]
    # Whether Keras replaces an optimizer of this family by another one.
    is_replaced: Callable[[], bool] = lambda: False

    @property
    def module(self) -> Any:
        """The package, imported."""
        return sys.modules[self.package]

    def owns(self, optimizer: Any) -> bool:
        """Return whether the optimizer belongs to this family."""
        if self.package not in sys.modules:
            return False
        cls = self.module
        for name in self.base.split("."):
            cls = getattr(cls, name)
        return isinstance(optimizer, cls)

    @property
    def loss_scaler_class(self) -> type:
        """The class that scales losses for optimizers of this family."""
        module, _, name = self.loss_scaler.rpartition(".")
        cls: type = getattr(import_module(module), name)
        return cls


def kind_of(optimizer: Any) -> Kind:
    """Return the family of an optimizer.

    Raises `ValueError` for an object of another kind, and for an optimizer that Keras replaces.
    """
    for kind in KINDS:
        if not kind.owns(optimizer):
            continue
        if kind.is_replaced():
            raise ValueError(
                "without the behavior of TensorFlow 2, Keras replaces this optimizer by another "
                "one: wrap one of tf_keras.optimizers.legacy"
            )
        return kind
    raise ValueError(
        f"hvdlite.keras.DistributedOptimizer wraps an optimizer of Keras, not {optimizer!r}"
    )


def parts_of(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer, and those that it passes gradients to, and they in turn."""
    yield optimizer
    for part in inside_of(optimizer):
        yield from parts_of(part)


def inside_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that it passes gradients to itself."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [*([] if inner is None else [inner]), *getattr(optimizer, "optimizers", ())]


def _apply(
    method: Entry, exchange: Exchange, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Replace ``apply()`` of Keras 3, which ``apply_gradients()`` calls too."""
    gradients = list(grads)
    variables = None if trainable_variables is None else list(trainable_variables)
    if variables:
        _build_for_branches(optimizer, variables, exchange)
    built = exchange.sources(built_variables(optimizer))
    targets = built if variables is None else variables
    if not gradients or len(targets) != len(gradients):
        return method(optimizer, gradients, variables)  # Keras raises the error.
    return exchange.through(
        gradients,
        targets,
        lambda reduced: method(optimizer, reduced, exchange.targets(variables)),
        lambda: _count_pass(optimizer),
    )


def built_variables(optimizer: Any) -> list[Any]:
    """Return the variables an optimizer of Keras 3 was built with; a loss scaler may have none."""
    built = [getattr(part, "_trainable_variables", []) for part in parts_of(optimizer)]
    return max(built, key=len)


def _stateless_apply(
    method: Entry,
    exchange: Exchange,
    optimizer: Any,
    optimizer_variables: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    """Replace ``stateless_apply()`` of Keras 3, which ``fit()`` calls with JAX."""
    gradients, given = list(grads), list(trainable_variables)
    state = list(optimizer.variables)
    if not exchange.is_stateless:
        raise ValueError("stateless_apply() keeps no gradients: backward_passes_per_step must be 1")
    built = built_variables(optimizer)
    variables = exchange.sources(built)
    as_many = len(gradients) == len(variables) == len(given)
    if exchange.is_reduced or not as_many or len(state) != len(optimizer_variables):
        return method(optimizer, optimizer_variables, gradients, given)  # Keras raises errors.
    known = [*zip(variables, given, strict=True), *zip(state, optimizer_variables, strict=True)]

    def step(reduced: list[Any]) -> None:
        # A loss scaler returns its own variables and the inner ones: it knows no sums of passes.
        with exchange.lasting_only():
            lasting = [exchange.targets(built), list(optimizer.variables)]
            before = [_values(variables) for variables in lasting]
            after = method(optimizer, before[1], reduced, before[0])
        for variable, value in zip([*lasting[0], *lasting[1]], [*after[0], *after[1]], strict=True):
            variable.assign(value)

    with keras.StatelessScope(known):
        exchange.through(gradients, variables, step, lambda: _count_pass(optimizer))
        return _values(variables), _values(state)


def _values(variables: Sequence[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def _apply_gradients(
    method: Entry, exchange: Exchange, optimizer: Any, grads_and_vars: Any, *args: Any, **kw: Any
) -> Any:
    """Replace ``apply_gradients()``.

    In Keras 3 for optimizers that do not call ``apply()`` there.
    """
    pairs = list(grads_and_vars)
    if not pairs:
        return method(optimizer, pairs, *args, **kw)
    variables = [variable for _, variable in pairs]
    _build_for_branches(optimizer, variables, exchange)
    result = exchange.through(
        [gradient for gradient, _ in pairs],
        variables,
        lambda reduced: method(
            optimizer, list(zip(reduced, exchange.targets(variables), strict=True)), *args, **kw
        ),
        lambda: _count_pass(optimizer),
    )
    return result if exchange.accumulator is None else optimizer.iterations


def _build_for_branches(optimizer: Any, variables: list[Any], exchange: Exchange) -> None:
    """Make the variables of an optimizer of Keras 3 before a graph branches."""
    if exchange.accumulator is not None and not getattr(optimizer, "built", True):
        optimizer.build(variables)


def _count_pass(optimizer: Any) -> None:
    """Count a pass that changes no weights, for learning-rate schedules."""
    for part in parts_of(optimizer):
        if not hasattr(part, "inner_optimizer"):
            part.iterations.assign_add(1)


KINDS = [
    Kind(
        "keras",
        "optimizers.Optimizer",
        "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer",
        {
            "apply": _apply,
            "apply_gradients": _apply_gradients,
            "stateless_apply": _stateless_apply,
        },
        (
            "_backend_apply_gradients",
            "_backend_update_step",
            "_parallel_update_step",
            "update_step",
        ),
    ),
    Kind(
        "tf_keras",
        "optimizers.Optimizer",
        "tf_keras.src.mixed_precision.loss_scale_optimizer.LossScaleOptimizerV3",
        {"apply_gradients": _apply_gradients},
        ("_internal_apply_gradients", "_distributed_apply_gradients_fn", "update_step"),
        is_replaced=lambda: not import_module("tensorflow").__internal__.tf2.enabled(),
    ),
    Kind(
        "tf_keras",
        "optimizers.legacy.Optimizer",
        "tf_keras.src.mixed_precision.loss_scale_optimizer.LossScaleOptimizer",
        {"apply_gradients": _apply_gradients},
        ("_distributed_apply", "_resource_apply_dense", "_resource_apply_sparse"),
    ),
]


# -- which optimizers can step over shards: those that treat each element on its own


KNOWN_TO_LOOK_AT_WHOLE = {"adafactor", "muon", "lamb", "lars", "shampoo", "novograd"}
_NEED = (
    "shard_state=True steps over a flat shard, which is a piece of many variables, so that it "
    "needs an optimizer that treats each element on its own, as SGD and Adam do. Leave shard_state "
    "out"
)
_SHAPES = ((3, 4), (5,))


def check_shardable(optimizer: Any, kind: Kind, settings: Settings) -> None:
    """Raise `ValueError` where the optimizer, or an option, needs more than a part of the state."""
    if kind.package != "keras":
        raise ValueError(f"shard_state=True needs an optimizer of Keras 3, not of {kind.package}")
    objections = {
        "a loss scaler decides by all gradients: put it around the distributed optimizer": (
            hasattr(optimizer, "inner_optimizer")
        ),
        "it gives each variable an optimizer of its own, and a shard is stepped over by one: wrap "
        "each that it has inside": hasattr(optimizer, "optimizers"),
        "it is built already: wrap it before": getattr(optimizer, "built", True),
        "clipnorm looks at whole variables: use clipvalue": optimizer.clipnorm is not None,
        "global_clipnorm looks at all gradients: use clipvalue": (
            optimizer.global_clipnorm is not None
        ),
        "use_ema keeps averages of whole variables": optimizer.use_ema,
        "groups have no place in flat shards": settings.groups is not None,
        "local layers have no place in flat shards": settings.local_layers is not None,
        "a segmentation has no place in flat shards": settings.reduction.segmentation is not None,
        f"Compression.{settings.reduction.compression} needs whole gradients": isinstance(
            settings.reduction.compression, FeedbackCompressor
        ),
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
    if _begins_with_weights(optimizer):
        raise ValueError(
            f"shard_state=True: the state of {type(optimizer).__name__} begins with the weights, "
            "and a shard has none yet when state is made for it: leave shard_state out"
        )


def check_variable(variable: Any, who: str, remedy: str) -> None:
    """Raise `ValueError` for a variable whose step is more than that of its elements."""
    reasons = {
        "has a constraint, which looks at all of it": (
            getattr(variable, "constraint", None) is not None
        ),
        "is overwritten with its gradient, as in 8-bit training": getattr(
            variable, "overwrite_with_gradient", False
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{who}: {variable.path} {reason}: {remedy}")


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


def _begins_with_weights(optimizer: Any) -> bool:
    """Return whether its state, before any step, is another one for other weights.

    A copy of a rank's own weights would be no state either: they are made equal after it is built.
    """
    random = np.random.default_rng(2)
    states = []
    try:
        for _ in range(2):
            twin = type(optimizer).from_config(optimizer.get_config())
            twin.build([keras.Variable(random.normal(size=5), dtype="float32", trainable=False)])
            states.append([keras.ops.convert_to_numpy(each.value) for each in twin.variables])
    except (TypeError, NotImplementedError):  # its configuration does not make another one
        return False
    return not all(map(np.array_equal, *states))


def _row(arrays: Sequence[Any]) -> Any:
    return np.concatenate([np.reshape(each, -1) for each in arrays])


def _train(optimizer: Any, values: Sequence[Any], steps: Sequence[Sequence[Any]]) -> list[Any]:
    twin = type(optimizer).from_config(optimizer.get_config())
    variables = [keras.Variable(value, dtype="float32", trainable=False) for value in values]
    for gradients in steps:
        twin.apply([keras.ops.convert_to_tensor(each, "float32") for each in gradients], variables)
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]
