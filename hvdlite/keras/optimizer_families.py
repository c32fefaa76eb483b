"""The kinds of optimizers that Keras 2 and 3 have, and the ways by which each applies gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hvdlite.keras.gradient_exchange import Exchange

Entry = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """One family of optimizers.

    Gradients come in by the `entries`. What lies behind them is `guarded`: it may only be called
    from there, with gradients that have been reduced.
    """

    package: str
    base: str  # where in the package the class of all of this kind is
    loss_scaler: str  # the module, and the name, of the class that scales losses for this kind
    entries: Mapping[str, Entry]
    guarded: Sequence[str]
    is_replaced: Callable[[], bool] = lambda: False  # by Keras, with an optimizer that it makes

    @property
    def module(self) -> Any:
        """The package, imported."""
        return sys.modules[self.package]

    def owns(self, optimizer: Any) -> bool:
        """Whether the optimizer is of this kind."""
        if self.package not in sys.modules:
            return False
        cls = self.module
        for name in self.base.split("."):
            cls = getattr(cls, name)
        return isinstance(optimizer, cls)

    @property
    def loss_scaler_class(self) -> type:
        """The class of optimizers that wrap one of this kind."""
        module, _, name = self.loss_scaler.rpartition(".")
        cls: type = getattr(import_module(module), name)
        return cls


def kind_of(optimizer: Any) -> Kind:
    """Raises `ValueError` for what is no optimizer of Keras, or one that Keras will not use."""
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
    """The optimizer, and those that it passes gradients to."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for each in [*([] if inner is None else [inner]), *getattr(optimizer, "optimizers", ())]:
        yield from parts_of(each)


def _apply(
    method: Entry, exchange: Exchange, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """``apply()`` of Keras 3, which ``apply_gradients()`` calls too."""
    gradients = list(grads)
    variables = None if trainable_variables is None else list(trainable_variables)
    if variables:
        _build_for_branches(optimizer, variables, exchange)
    known = _trainable_variables(optimizer) if variables is None else variables
    if not gradients or len(known) != len(gradients):
        return method(optimizer, gradients, variables)  # it says what is wrong
    return exchange.through(
        gradients,
        known,
        lambda reduced: method(optimizer, reduced, variables),
        lambda: _count_pass(optimizer),
    )


def _trainable_variables(optimizer: Any) -> list[Any]:
    """Those that an optimizer of Keras 3 was built with; a loss scaler may keep none itself."""
    built = [getattr(each, "_trainable_variables", []) for each in parts_of(optimizer)]
    return max(built, key=len)


def _stateless_apply(
    method: Entry,
    exchange: Exchange,
    optimizer: Any,
    optimizer_variables: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    """``stateless_apply()`` of Keras 3."""
    if exchange.settings.passes > 1:
        raise ValueError("stateless_apply() keeps no gradients: backward_passes_per_step must be 1")
    return exchange.through(
        list(grads),
        _trainable_variables(optimizer),
        lambda reduced: method(optimizer, optimizer_variables, reduced, trainable_variables),
        lambda: None,
    )


def _apply_gradients(
    method: Entry, exchange: Exchange, optimizer: Any, grads_and_vars: Any, *args: Any, **kw: Any
) -> Any:
    """``apply_gradients()``; in Keras 3 for optimizers that do not call ``apply()`` there."""
    pairs = list(grads_and_vars)
    if not pairs:
        return method(optimizer, pairs, *args, **kw)
    variables = [variable for _, variable in pairs]
    _build_for_branches(optimizer, variables, exchange)
    result = exchange.through(
        [gradient for gradient, _ in pairs],
        variables,
        lambda reduced: method(optimizer, list(zip(reduced, variables, strict=True)), *args, **kw),
        lambda: _count_pass(optimizer),
    )
    return result if exchange.accumulator is None else optimizer.iterations


def _build_for_branches(optimizer: Any, variables: list[Any], exchange: Exchange) -> None:
    """Make the variables of an optimizer of Keras 3 before a graph branches."""
    if exchange.accumulator is not None and not getattr(optimizer, "built", True):
        optimizer.build(variables)


def _count_pass(optimizer: Any) -> None:
    """A pass was made that changes no weights; learning-rate schedules count it."""
    for each in parts_of(optimizer):
        if not hasattr(each, "inner_optimizer"):
            each.iterations.assign_add(1)


def _tensorflow_1() -> bool:
    return not import_module("tensorflow").__internal__.tf2.enabled()


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
        is_replaced=_tensorflow_1,
    ),
    Kind(
        "tf_keras",
        "optimizers.legacy.Optimizer",
        "tf_keras.src.mixed_precision.loss_scale_optimizer.LossScaleOptimizer",
        {"apply_gradients": _apply_gradients},
        ("_distributed_apply", "_resource_apply_dense", "_resource_apply_sparse"),
    ),
]
