"""Mixed precision: all ranks scale the loss alike, and skip the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import (
    BATCH,
    INPUTS,
    TARGETS,
    apply_gradients,
    assert_close,
    assert_same,
    fit,
    fit_alone,
    fit_together,
    make_model,
    numpy_of,
    sgd,
    share,
    tensor,
    variable,
    wrapped,
)
from tests.ranks import run_ranks

keras3_only = pytest.mark.skipif(LEGACY, reason="new in Keras 3")
Scaler = (keras.mixed_precision if LEGACY else keras.optimizers).LossScaleOptimizer
STEPS = {"dynamic_growth_steps": 3, "initial_scale": 4.0}

AROUND = [
    pytest.param(lambda: hvd.DistributedOptimizer(Scaler(sgd(), **STEPS)), id="wrapped"),
    pytest.param(lambda: Scaler(hvd.DistributedOptimizer(sgd()), **STEPS), id="inside"),
    pytest.param(
        lambda: Scaler(hvd.DistributedOptimizer(sgd(), shard_state=True), **STEPS),
        id="inside with shards",
        marks=keras3_only,
    ),
]
if LEGACY:
    AROUND += [
        pytest.param(
            lambda: hvd.DistributedOptimizer(
                Scaler(keras.optimizers.legacy.SGD(0.1, momentum=0.9), **STEPS)
            ),
            id="wrapped legacy",
        ),
        pytest.param(
            lambda: Scaler(
                hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.1, momentum=0.9)), **STEPS
            ),
            id="inside legacy",
        ),
    ]


def scale_of(optimizer: Any) -> float:
    scale = optimizer.loss_scale if LEGACY else optimizer.dynamic_scale
    (value,) = numpy_of([scale])
    return float(value)


def scaled(optimizer: Any, gradient: float) -> Any:
    """The gradient of the loss that the optimizer has scaled."""
    if LEGACY:
        optimizer.get_scaled_loss(tensor(1))  # or the optimizer warns
        (unscaled,) = optimizer.get_unscaled_gradients([tensor([gradient * scale_of(optimizer)])])
        return unscaled
    scale = scale_of(optimizer) if optimizer.built else STEPS["initial_scale"]
    return tensor([gradient * scale])


@pytest.mark.parametrize("make", AROUND)
def test_an_overflow_on_one_rank_skips_the_step_on_all(make: Callable[[], Any]) -> None:
    def train(rank: int) -> list[tuple[float, float]]:
        weights, optimizer = variable([0]), make()
        course = []
        for gradient in (1.0, np.inf if rank == 1 else 1.0, 2.0, 2.0, 2.0):
            apply_gradients(optimizer, [(scaled(optimizer, gradient * (rank + 1)), weights)])
            course.append((round(float(weights.numpy()[0]), 5), scale_of(optimizer)))
        return course

    course, *others = run_ranks(3, train)
    assert others == [course] * 2
    assert [scale for _, scale in course] == [4, 2, 2, 2, 4]
    assert course[0][0] == course[1][0]  # skipped

    alone, optimizer = variable([0]), sgd()
    for gradient in (1.0, 2.0, 2.0, 2.0):
        optimizer.apply_gradients([(tensor([2 * gradient]), alone)])
    np.testing.assert_allclose(course[-1][0], alone.numpy()[0], rtol=1e-5)


@pytest.mark.parametrize("make", AROUND)
def test_fit(make: Callable[[], Any]) -> None:
    assert_close(fit_together(2, make), fit_alone(sgd))


@keras3_only
def test_compile_puts_a_scaler_around_the_optimizer() -> None:
    def train(rank: int) -> list[np.ndarray]:
        keras.mixed_precision.set_global_policy("mixed_float16")  # of this thread
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        weights = fit(model, optimizer, rank, 2, built=False)
        assert type(model.optimizer) is Scaler
        inputs = INPUTS[:6] * (1e30 if rank == 0 else 1)  # no float16 holds this
        model.fit(inputs, TARGETS[:6], verbose=0)
        assert scale_of(model.optimizer) == 2.0**14
        assert all(np.isfinite(each).all() for each in weights)
        return [*weights, *numpy_of(model.get_weights())]

    assert_same(run_ranks(2, train))


PASSES = [
    pytest.param(
        lambda inner: Scaler(hvd.DistributedOptimizer(inner, backward_passes_per_step=2), **STEPS),
        id="inside",
    ),
    pytest.param(
        lambda inner: hvd.DistributedOptimizer(Scaler(inner, **STEPS), backward_passes_per_step=2),
        id="wrapped",
    ),
]


@keras3_only
@pytest.mark.parametrize("make", PASSES)
def test_passes_add_up_with_a_scaler(make: Callable[[Any], Any]) -> None:
    def train(rank: int) -> list[tuple[float, float]]:
        weights, optimizer = variable([0]), make(keras.optimizers.SGD(1.0))
        course = []
        for gradient in (1.0, 2.0, np.inf if rank == 0 else 1.0, 1.0, 3.0, 3.0):
            apply_gradients(optimizer, [(scaled(optimizer, gradient + rank), weights)])
            scale = scale_of(optimizer) if optimizer.built else 4.0
            course.append((float(weights.numpy()[0]), scale))
        return course

    for course in run_ranks(2, train):
        assert course == [(0, 4), (-4, 4), (-4, 4), (-4, 2), (-4, 2), (-11, 2)]


@keras3_only
@pytest.mark.parametrize("make", PASSES)
def test_a_model_trains_with_passes_and_a_scaler(make: Callable[[Any], Any]) -> None:
    """The oracle is Keras' own accumulation in one process, which does not see the overflow."""
    count = 6  # batches: the second step overflows, in its first pass, on one rank

    def run(model: Any, optimizer: Any, rank: int, size: int) -> list[np.ndarray]:
        model.compile(optimizer=optimizer, loss="mse")
        inputs, targets = share(INPUTS, rank, size), share(TARGETS, rank, size)
        rows = BATCH // size
        for batch in range(count):
            if size == 1 and batch in (2, 3):
                continue
            place = slice(rows * (batch % 3), rows * (batch % 3 + 1))
            factor = np.float32(np.inf if batch == 2 and rank == 1 else 1)
            model.train_on_batch(inputs[place], targets[place] * factor)
        if size > 1:
            assert scale_of(optimizer) == STEPS["initial_scale"] / 2
        model.fit(inputs, targets, batch_size=rows, epochs=2, shuffle=False, verbose=0)
        return numpy_of(model.get_weights())

    def together(rank: int) -> list[np.ndarray]:
        # The sums of passes are divided by nothing, unlike those of Keras.
        return run(make_model(), make(keras.optimizers.SGD(0.05, momentum=0.9)), rank, 2)

    found = run_ranks(2, together)
    assert_same(found)
    alone = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    assert_close(found[0], run(make_model(), alone, 0, 1))


def test_a_scaler_around_what_has_a_distributed_one_inside_is_refused() -> None:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("newer than this Keras")

    def step(rank: int) -> None:
        inside = keras.optimizers.OptimizerMap(wrapped(sgd)())
        optimizer = Scaler(keras.optimizers.MultiOptimizer(inside))
        with pytest.raises(RuntimeError, match="wrap the LossScaleOptimizer"):
            optimizer.apply_gradients([(tensor([1]), variable([0]))])

    run_ranks(2, step)


def test_local_variables_and_dynamic_scaling_do_not_go_together() -> None:
    def step(rank: int) -> None:
        weights, inner = variable([0]), wrapped(sgd)()
        inner.register_local_var(weights)
        with pytest.raises(ValueError, match="loss_scale_factor"):
            Scaler(inner).apply_gradients([(tensor([1]), weights)])

    run_ranks(2, step)
