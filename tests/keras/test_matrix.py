"""All that an optimizer of Keras does with gradients, in `fit` of any kind, as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

import hvdlite.keras as hvd
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import adam, assert_close, fit, fit_together, make_model, sgd

keras3_only = pytest.mark.skipif(LEGACY, reason="new in Keras 3")
Wrap = Callable[..., Any]


def with_options(**options: Any) -> Callable[[Wrap], Any]:
    return lambda wrap: wrap(
        keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **options})
    )


def scaled(**options: Any) -> Callable[[Wrap], Any]:
    scaler = (keras.mixed_precision if LEGACY else keras.optimizers).LossScaleOptimizer
    optimizer = with_options(**options)
    return lambda wrap: wrap(scaler(optimizer(lambda plain: plain), initial_scale=8.0))


def in_passes(wrap: Wrap) -> Any:
    """Two passes, which alone Keras itself adds up."""
    if wrap is alone:
        return with_options(gradient_accumulation_steps=2)(wrap)
    return with_options()(
        lambda optimizer: wrap(
            optimizer, backward_passes_per_step=2, average_aggregated_gradients=True
        )
    )


def alone(optimizer: Any) -> Any:
    return optimizer


OPTIMIZERS = {
    "momentum": lambda wrap: wrap(sgd()),
    "adam": lambda wrap: wrap(adam()),
    "weight decay": with_options(weight_decay=0.05),
    "schedule": with_options(
        learning_rate=keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "clipnorm": with_options(clipnorm=0.05),
    "global clipnorm": with_options(global_clipnorm=0.05),
    "clipvalue": with_options(clipvalue=0.02),
    "average": with_options(use_ema=True, ema_momentum=0.5),
    "average in between": with_options(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "loss scale": with_options(loss_scale_factor=8.0),
    "loss scaler": scaled(),
    "loss scaler, clipped": scaled(clipnorm=0.05, use_ema=True, ema_momentum=0.5),
    "accumulation": with_options(gradient_accumulation_steps=2),
    "passes": in_passes,
}
OF_KERAS_3 = {"loss scale", "accumulation", "passes"}


# Compiled, what Keras does with each gradient by itself is one more operation of the same graph.
BY_GRADIENT = {"weight decay", "clipnorm", "clipvalue", "average", "loss scale"}
# By test_optimizer.py and test_loss_scaling.py.
COMPILED_ELSEWHERE = {"adam", "average in between", "loss scaler"}


def cases() -> Iterator[Any]:
    for name, eagerly in product(OPTIMIZERS, (False, True)):
        marks = [keras3_only] if name in OF_KERAS_3 else []
        if name in BY_GRADIENT | COMPILED_ELSEWHERE and not eagerly:
            marks.append(pytest.mark.soak)
        yield pytest.param(name, eagerly, marks=marks)


@pytest.mark.parametrize(("name", "eagerly"), [*cases()])
def test_ranks_train_as_one(name: str, eagerly: bool) -> None:
    make = OPTIMIZERS[name]
    found = fit_together(2, lambda: make(hvd.DistributedOptimizer), run_eagerly=eagerly)
    assert_close(found, fit(make_model(), make(alone), run_eagerly=eagerly))
