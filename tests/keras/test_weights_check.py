"""HVDLITE_CHECK_WEIGHTS with the optimizers of Keras: in graphs, eagerly, and with local state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.common.settings.config import Config
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import EAGERLY, INPUTS, TARGETS, batches, make_model, sgd
from tests.ranks import run_ranks

SIZE, STEPS, EVERY = 2, 20, 5
Fault = Callable[[int, int, Any], None]  # (rank, step, model)


class Faults(keras.callbacks.Callback):
    def __init__(self, rank: int, fault: Fault) -> None:
        super().__init__()
        self._rank, self._fault, self._step = rank, fault, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        self._fault(self._rank, self._step, self.model)


def train(
    make: Callable[[], Any], fault: Fault = lambda *_: None, eager: bool = False, **options: Any
) -> str:
    """What all ranks are told; empty where nothing has diverged."""
    models = [make_model() for _ in range(SIZE)]

    def main(rank: int) -> str:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(make(), **options)
        model.compile(optimizer, loss=keras.losses.MeanSquaredError(), run_eagerly=eager)
        rows = batches(INPUTS[rank::SIZE][:8], TARGETS[rank::SIZE][:8], 2)
        try:
            model.fit(**rows, epochs=STEPS // 4, verbose=0, callbacks=[Faults(rank, fault)])
        except Exception as error:
            return str(error)
        return ""

    texts = run_ranks(SIZE, main, config=Config(check_weights=EVERY))
    assert len({text.partition("(ranks")[0][:80] for text in texts}) == 1, texts
    return texts[0]


@pytest.mark.parametrize(
    ("options", "eager"),
    [
        ({}, True),
        ({"backward_passes_per_step": 2}, False),
        pytest.param(
            {"shard_state": True},
            False,
            marks=pytest.mark.skipif(LEGACY, reason="shards are for Keras 3"),
        ),
    ],
    ids=["eager", "passes", "sharded"],
)
def test_normal_training_is_no_fault(options: dict[str, Any], eager: bool) -> None:
    assert train(sgd, eager=eager, **options) == ""


@pytest.mark.parametrize("eager", [False, True])
def test_a_weight_that_changes_on_one_rank(eager: bool) -> None:
    def fault(rank: int, step: int, model: Any) -> None:
        if (rank, step) == (1, 8):
            weights = model.get_weights()
            weights[2][4, 1] = np.nextafter(weights[2][4, 1], np.float32(9))
            model.set_weights(weights)

    text = train(lambda: keras.optimizers.SGD(0.0), fault, eager)
    assert "weights have diverged at step 10: ranks 0 and 1 differ" in text
    assert "in 1 of" in text and "kernel': element [4, 1] is" in text
    assert "They were equal after step 5" in text


def test_a_state_that_changes_on_one_rank() -> None:
    def fault(rank: int, step: int, model: Any) -> None:
        if (rank, step) == (0, 15):
            velocity = model.optimizer._velocities[1]
            velocity.assign(np.asarray(velocity.numpy()) + 1)

    text = train(lambda: keras.optimizers.RMSprop(0.0), fault)
    assert "at step 15: ranks 0 and 1 differ" in text and "in 1 of" in text
    assert "first in 'state." in text


def test_ranks_that_begin_with_other_weights() -> None:
    def fault(rank: int, step: int, model: Any) -> None:
        if (rank, step) == (0, 1):
            model.set_weights([weight + 1 for weight in model.get_weights()])

    text = train(sgd, fault, EAGERLY["run_eagerly"])
    assert "at step 2: " in text and "BroadcastGlobalVariablesCallback" in text


def test_layers_of_one_rank_are_not_compared() -> None:
    models = [make_model() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=model.layers[-1]
        )
        model.compile(optimizer, loss="mse")
        model.fit(**batches(INPUTS[rank::SIZE], TARGETS[rank::SIZE], 1), verbose=0)

    run_ranks(SIZE, main, config=Config(check_weights=EVERY))
    kernels = [model.get_weights()[2] for model in models]
    assert not np.array_equal(*kernels)
