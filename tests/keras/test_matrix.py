"""All that an optimizer of Keras does with gradients comes after the reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import hvdlite.keras as hvd
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import (
    EAGERLY,
    adam,
    assert_close,
    fit,
    fit_together,
    make_model,
    train,
    train_together,
)

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
    "several": with_options(
        clipnorm=0.05, weight_decay=0.05, use_ema=True, ema_overwrite_frequency=2
    ),
    "loss scale": with_options(loss_scale_factor=8.0),
    "loss scaler, clipped": scaled(clipnorm=0.05, use_ema=True, ema_momentum=0.5),
    "accumulation": with_options(gradient_accumulation_steps=2),
    "passes": in_passes,
}
OF_KERAS_3 = {"loss scale", "accumulation", "passes"}
# What a loop of the user's own has no part in, or has to know of.
ONLY_BY_FIT = {"average", "loss scale", "loss scaler, clipped"}


def kinds(names: Iterable[str]) -> pytest.MarkDecorator:
    marks = {name: [keras3_only] if name in OF_KERAS_3 else [] for name in names}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) for name in marks]
    )


@kinds(sorted(OPTIMIZERS.keys() - ONLY_BY_FIT - {"adam"}))  # Which test_optimizer.py has.
def test_in_a_loop_of_the_users_own(name: str) -> None:
    make = OPTIMIZERS[name]
    found = train_together(2, lambda: make(hvd.DistributedOptimizer))
    assert_close(found, train(make_model(), make(alone)))


@kinds(sorted(ONLY_BY_FIT))
def test_in_eager_fit(name: str) -> None:
    make = OPTIMIZERS[name]
    found = fit_together(2, lambda: make(hvd.DistributedOptimizer), run_eagerly=True)
    assert_close(found, fit(make_model(), make(alone), run_eagerly=True))


def test_all_at_once_in_compiled_fit() -> None:
    test_each_in_compiled_fit("several")


@kinds(sorted(OPTIMIZERS.keys() - {"several"}))
def test_each_in_compiled_fit(name: str) -> None:
    make = OPTIMIZERS[name]
    found = fit_together(2, lambda: make(hvd.DistributedOptimizer))
    assert_close(found, fit(make_model(), make(alone), **EAGERLY))
