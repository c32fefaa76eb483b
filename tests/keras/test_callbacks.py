"""The callbacks in `fit`; run once more for the other backend, and for Keras 2."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite import numpy as hvd
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.runtime.process_state import this_process
from hvdlite.common.settings.config import Config
from hvdlite.keras import DistributedOptimizer, callbacks
from hvdlite.keras.callbacks import broadcast
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import EAGERLY, batches
from tests.ranks import run_ranks

RATE, MOMENTUM = 0.1, 0.9

# The callbacks are tried one by one, mostly without a distributed optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:the optimizer of this model is not distributed")

INPUTS = np.array([[1.0, 2.0], [3.0, -1.0]], np.float32)
TARGETS = np.array([[1.0], [0.0]], np.float32)


def line(weights: Any, optimizer: Any, **compile_arguments: Any) -> Any:
    """A model with two weights, and no bias."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.array(weights, np.float32).reshape(2, 1)])
    model.compile(optimizer, loss="mse", **{**EAGERLY, **compile_arguments})
    return model


def fit(model: Any, *used: Any, **arguments: Any) -> Any:
    """Batches of one sample each, two in an epoch."""
    given = batches(INPUTS, TARGETS, arguments.pop("batch_size", 1))
    return model.fit(**given, callbacks=list(used), verbose=0, **arguments)


def sgd(rate: float = RATE, momentum: float = MOMENTUM) -> Any:
    return keras.optimizers.SGD(rate, momentum=momentum)


def oracle(
    weights: Any, rates: list[float], momentum: float = MOMENTUM, velocity: Any = 0.0
) -> np.ndarray:
    """The weights after a step of SGD with each of the rates; the velocity follows the rate."""
    weights, before = np.array(weights, np.float64).reshape(2, 1), RATE
    for step, rate in enumerate(rates):
        x, y = INPUTS[step % 2][None], TARGETS[step % 2][None]
        gradient = 2 * x.T @ (x @ weights - y)
        velocity = momentum * velocity * (rate / before) - rate * gradient
        weights, before = weights + velocity, rate
    return weights


# -- broadcast


def distributed() -> Any:
    return DistributedOptimizer(sgd())


def scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer)


def several(default: Any, other: Any, paths: str = ".*head/.*") -> Any:
    """A MultiOptimizer with another optimizer for some layers."""
    choices = keras.optimizers.OptimizerMap(default, {paths: other})
    return keras.optimizers.MultiOptimizer(choices)


# What makes an optimizer, the layer that each rank has for itself, and what is said.
FORGOTTEN: list[tuple[Callable[[], Any], str | None, str | None]] = [
    (sgd, None, "not distributed: .* Compile it with optimizer=hvd.DistributedOptimizer"),
    (distributed, None, None),
]
if hasattr(keras.optimizers, "MultiOptimizer"):  # Not in Keras 3.12.
    FORGOTTEN += [
        (lambda: several(distributed(), sgd()), None, "SGD, inside the optimizer of this model"),
        (lambda: scaled(several(sgd(), distributed())), None, "SGD, inside"),
        (lambda: several(sgd(), sgd()), None, "the optimizer of this model is not distributed"),
        (lambda: several(distributed(), sgd()), "body", "SGD, inside"),
        (lambda: several(distributed(), sgd()), "head", None),
        (lambda: several(distributed(), distributed()), None, None),
        (lambda: scaled(several(distributed(), distributed())), None, None),
        (lambda: DistributedOptimizer(several(sgd(), sgd())), None, None),
        (lambda: several(sgd(), distributed(), ".*(body|head)/.*"), None, None),  # nothing for one
    ]


@pytest.mark.parametrize(("make", "local", "words"), FORGOTTEN)
def test_an_optimizer_that_was_forgotten_is_warned_of(
    make: Callable[[], Any], local: str | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others are to drift from."""
    heard: list[str] = []
    monkeypatch.setattr(broadcast, "warn_user", heard.append)

    def main(rank: int) -> None:
        layers = [keras.layers.Dense(2, name=name) for name in ("body", "head")]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(make(), loss="mse")
        variables = model.get_layer(local).weights if local else None
        callback = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=variables)
        callback.set_model(model)
        callback.on_train_begin()

    run_ranks(1, main)
    assert not heard
    run_ranks(2, main)
    assert len(heard) == (2 if words else 0)
    assert all(re.search(words, text) for text in heard if words)


def test_other_models_are_refused_before_the_first_batch() -> None:
    def main(rank: int) -> None:
        layers = [keras.layers.Dense(2) for _ in range(1 + rank)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(DistributedOptimizer(sgd()), loss="mse")
        callback = callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(model)
        with pytest.raises(ValueError, match=r"rank 0 has .* variables .*, rank 1 has"):
            callback.on_train_begin()

    run_ranks(2, main)


def test_the_first_step_is_that_of_the_root() -> None:
    def main(rank: int) -> list[np.ndarray]:
        model = line([rank, rank + 1], sgd(), run_eagerly=False)
        seen: list[np.ndarray] = []

        class Watch(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                seen.append(self.model.get_weights()[0].copy())

        fit(model, callbacks.BroadcastGlobalVariablesCallback(1), Watch())
        return [*seen, model.get_weights()[0]]

    for seen in run_ranks(3, main):
        for steps, weights in enumerate(seen):
            expected = oracle([1, 2], [RATE] * steps)
            np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_ranks_with_an_optimizer_of_their_job_train_as_one() -> None:
    def main(rank: int) -> np.ndarray:
        model = line([rank, -rank], DistributedOptimizer(sgd(0.01)), run_eagerly=False)
        begin = callbacks.BroadcastGlobalVariablesCallback(0)
        rows = slice(rank, rank + 1)
        model.fit(INPUTS[rows], TARGETS[rows], epochs=3, verbose=0, callbacks=[begin])
        return np.array(model.get_weights()[0])

    weights, velocity = np.zeros((2, 1)), 0.0
    for _ in range(3):
        gradient = 2 * INPUTS.T @ (INPUTS @ weights - TARGETS) / 2
        velocity = MOMENTUM * velocity - 0.01 * gradient
        weights = weights + velocity
    for result in run_ranks(2, main):
        np.testing.assert_allclose(result, weights, rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sgd(0.01),
        pytest.param(
            lambda: keras.optimizers.legacy.SGD(0.01, MOMENTUM),
            marks=pytest.mark.skipif(not LEGACY, reason="not in Keras 3"),
        ),
    ],
)
def test_the_state_of_the_optimizer_may_be_on_the_root_alone(make: Any) -> None:
    def main(rank: int) -> tuple[np.ndarray, list[Any]]:
        model = line([1, 2], make())
        if rank == 0:
            fit(model, epochs=2)
        fit(model, callbacks.BroadcastGlobalVariablesCallback(0))
        optimizer = model.optimizer
        state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        return model.get_weights()[0], [np.asarray(each.numpy()) for each in state]

    (weights, state), (other_weights, other_state) = run_ranks(2, main)
    np.testing.assert_allclose(weights, oracle([1, 2], [0.01] * 6), rtol=1e-5)
    np.testing.assert_array_equal(weights, other_weights)
    assert len(state) == len(other_state) >= 1
    for own, other in zip(state, other_state, strict=True):
        np.testing.assert_array_equal(own, other)


class Later(keras.Model):  # type: ignore[misc]
    """Has no weights before it sees data; how many layers is said by each rank."""

    def __init__(self, start: float, layers: int = 1) -> None:
        super().__init__()
        initializer = keras.initializers.Constant(start)
        self.parts = [
            keras.layers.Dense(1, use_bias=False, kernel_initializer=initializer)
            for _ in range(layers)
        ]

    def call(self, inputs: Any) -> Any:
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def test_a_model_that_is_built_by_fit() -> None:
    """Ranks have the same weights after the first batch, which is early enough for a check."""

    def main(rank: int) -> np.ndarray:
        model = Later(float(rank))
        model.compile(DistributedOptimizer(sgd()), loss="mse", run_eagerly=True)
        for _ in range(3):
            fit(model, callbacks.BroadcastGlobalVariablesCallback(0))
        return np.array(model.get_weights()[0])

    first, second = run_ranks(2, main, config=Config(check_weights=1))
    np.testing.assert_array_equal(first, second)


def test_models_of_different_sizes_are_refused() -> None:
    def main(rank: int) -> None:
        model = Later(1.0, layers=1 + rank)
        model.compile(sgd(), loss="mse", run_eagerly=True)
        with pytest.raises(ValueError, match=r"rank 0 has \d+ variables .* rank 1 has \d+"):
            fit(model, callbacks.BroadcastGlobalVariablesCallback(0))

    run_ranks(2, main)


def test_it_is_done_once() -> None:
    def main(rank: int) -> list[float]:
        model = line([1, 1], sgd(0.0))
        callback = callbacks.BroadcastGlobalVariablesCallback(0)
        fit(model, callback)
        model.set_weights([np.full((2, 1), rank)])
        fit(model, callback)
        assert callback.broadcast_done
        return list(model.get_weights()[0].ravel())

    assert run_ranks(2, main) == [[0, 0], [1, 1]]


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends a `fit` on all ranks, after a batch of this epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch: int | None = epoch
        self.now = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.now == self.epoch:
            self.epoch = None
            raise InterruptedError


def falling(epoch: int, rate: float) -> float:
    return 0.02 / (1 + epoch)


def trained_with_backups(
    folder: Path, rank: int, used: list[Any], model: Any, begins: list[int]
) -> Any:
    """`fit` for four epochs with a backup on the root alone, which is rank 1."""
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begins.append(epoch))
    backup = [keras.callbacks.BackupAndRestore(folder)] if rank == 1 else []
    rates = keras.callbacks.LearningRateScheduler(falling)
    rows = batches(INPUTS[rank : rank + 1], TARGETS[rank : rank + 1], 1)
    model.fit(**rows, epochs=4, verbose=0, callbacks=[*backup, *used, rates, note])
    return model.get_weights()[0]


@pytest.mark.skipif(LEGACY, reason="Keras 2 keeps the epoch of a backup to itself")
@pytest.mark.parametrize("again", ["another job", "the same callbacks"])
def test_all_ranks_go_on_from_the_backup_of_the_root(tmp_path: Path, again: str) -> None:
    """The oracle is one process that nobody has interrupted."""

    def main(rank: int) -> tuple[list[int], Any]:
        used = [callbacks.BroadcastGlobalVariablesCallback(1), Interrupt(2)]
        model = line([1, 2 * rank], DistributedOptimizer(sgd()))
        with pytest.raises(InterruptedError):
            trained_with_backups(tmp_path, rank, used, model, [])
        if again == "another job":
            used = [callbacks.BroadcastGlobalVariablesCallback(1)]
            model = line([rank, 3], DistributedOptimizer(sgd()))
        begins: list[int] = []
        return begins, trained_with_backups(tmp_path, rank, used, model, begins)

    alone = line([1, 2], sgd())
    rates = keras.callbacks.LearningRateScheduler(falling)
    fit(alone, rates, batch_size=2, epochs=4)
    for begins, weights in run_ranks(2, main):
        assert begins == [2, 3]
        np.testing.assert_allclose(weights, alone.get_weights()[0], rtol=1e-5)


@pytest.mark.skipif(LEGACY, reason="Keras 2 keeps the epoch of a backup to itself")
@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (0, "rank 0 begins at epoch 0, rank 1 begins at epoch 0, with a backup"),
        (2, "rank 0 begins at epoch 0, rank 1 begins at epoch 2, with a backup"),
        (4, "rank 0 begins at epoch 0, rank 1 has no epoch left, with a backup"),
    ],
)
def test_a_backup_that_is_restored_too_late_is_refused(saved: int, words: str) -> None:
    class Restore(keras.callbacks.Callback):  # type: ignore[misc]
        """What `BackupAndRestore` does, without its file."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.model._initial_epoch = saved

    def main(rank: int) -> None:
        model = line([1, 2], DistributedOptimizer(sgd()))
        late = [Restore()] if rank == 1 else []
        with pytest.raises(ValueError, match=f"{words}: put BackupAndRestore before"):
            fit(model, callbacks.BroadcastGlobalVariablesCallback(0), *late, epochs=3)

    run_ranks(2, main)


def test_ranks_that_begin_at_different_epochs_are_refused() -> None:
    def main(rank: int) -> None:
        own = hvd.add_process_set([0, 1])
        callback = callbacks.BroadcastGlobalVariablesCallback(0, process_set=own)
        model = line([1, 2], sgd())
        fit(model, callback, initial_epoch=1, epochs=2)
        if rank == 2:
            fit(model, callback, initial_epoch=0, epochs=2)
            return
        with pytest.raises(ValueError, match=r"epoch 1, rank 1 .* epoch 0: .*initial_epoch on all"):
            fit(model, callback, initial_epoch=1 - rank, epochs=2)

    run_ranks(3, main)


@pytest.mark.parametrize("registered", [False, True])
def test_local_variables_are_left_alone(registered: bool) -> None:
    def main(rank: int) -> list[list[float]]:
        layers = [keras.Input((2,)), keras.layers.Dense(2, name="own"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.set_weights([np.full(each.shape, rank) for each in model.get_weights()])
        model.compile(sgd(0.0), loss="mse", **EAGERLY)
        own = model.get_layer("own").weights
        callback = callbacks.BroadcastGlobalVariablesCallback(
            0, local_variables=None if registered else own
        )
        if registered:
            for each in own:
                callback.register_local_var(each)
        fit(model, callback)
        return [sorted(set(each.ravel())) for each in model.get_weights()]

    assert run_ranks(2, main) == [[[0]] * 4, [[1], [1], [0], [0]]]


def test_optimizers_that_are_attributes_of_the_model() -> None:
    def main(rank: int) -> float:
        model = line([1, 2], sgd())
        model.second = keras.optimizers.Adam()
        model.second.build(model.trainable_variables)
        for each in model.second._momentums:
            each.assign(np.full(each.shape, float(rank)))
        fit(model, callbacks.BroadcastGlobalVariablesCallback(1))
        return float(np.mean(model.second._momentums[0].numpy()))

    assert run_ranks(2, main) == [1, 1]


def test_ranks_of_a_process_set_train_a_model_of_their_own() -> None:
    def main(rank: int) -> tuple[list[float], float, float]:
        own = hvd.add_process_set([1, 2])
        model = line([rank, rank], sgd(0.0))
        warmup = callbacks.LearningRateWarmupCallback(0.0, 1, process_set=own)
        fit(model, callbacks.BroadcastGlobalVariablesCallback(2, process_set=own), warmup)
        logs = {"loss": float(rank)}
        callbacks.MetricAverageCallback(process_set=own).on_epoch_end(0, logs)
        return list(model.get_weights()[0].ravel()), logs["loss"], warmup.multiplier(0.0)

    expected = [([0, 0], 0, 1), ([2, 2], 1.5, 0.75), ([2, 2], 1.5, 0.75)]
    assert run_ranks(3, main) == expected


def test_a_local_variable_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"not 'dense'; .* layer\.weights"):
        callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["dense"])


@pytest.mark.skipif(LEGACY, reason="Keras 2 does not accumulate gradients")
def test_accumulated_gradients_stay_with_their_rank() -> None:
    def main(rank: int) -> np.ndarray:
        optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
        model = line([1, 2], optimizer)
        optimizer.build(model.trainable_variables)
        for each in optimizer._accumulated_gradients:
            each.assign(np.full(each.shape, float(rank)))
        fit(model, callbacks.BroadcastGlobalVariablesCallback(0), epochs=1)
        return np.array(model.get_weights()[0])

    first, second = run_ranks(2, main)
    np.testing.assert_allclose(first - second, RATE / 2, rtol=1e-5)


@pytest.mark.skipif(LEGACY, reason="Keras 2 has no states of generators in the model")
def test_ranks_keep_their_own_dropout() -> None:
    def main(rank: int) -> list[int]:
        dropout = keras.layers.Dropout(0.5, seed=rank)
        model = keras.Sequential([keras.Input((2,)), dropout, keras.layers.Dense(1)])
        model.compile(sgd(), loss="mse", **EAGERLY)
        fit(model, callbacks.BroadcastGlobalVariablesCallback(0))
        return [int(each) for each in np.asarray(dropout.seed_generator.state.numpy())]

    first, second = run_ranks(2, main)
    assert first != second


# -- metrics


def test_metrics_are_averaged() -> None:
    values = [
        {"loss": 1.0, "acc": 0.5, "val_loss": 3.0},
        {"loss": 2.0, "acc": 1.0, "val_loss": 5.0},
    ]

    def main(rank: int) -> dict[str, Any]:
        logs = dict(sorted(values[rank].items(), reverse=rank == 1))
        callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        return logs

    for logs in run_ranks(2, main):
        assert logs == {"acc": 0.75, "loss": 1.5, "val_loss": 4.0}
        assert all(type(each) is float for each in logs.values())


def test_what_is_no_number_stays_as_it_is() -> None:
    def main(rank: int) -> dict[str, Any]:
        logs = {
            "loss": np.float32(np.nan if rank == 0 else 1),
            "of_classes": np.array([rank, 1.0]),
            "note": f"of rank {rank}",
            "nothing": None,
        }
        callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        return logs

    for rank, logs in enumerate(run_ranks(2, main)):
        assert np.isnan(logs["loss"])
        np.testing.assert_array_equal(logs["of_classes"], [0.5, 1.0])
        assert (logs["note"], logs["nothing"]) == (f"of rank {rank}", None)


@pytest.mark.parametrize(
    "logs, text",
    [
        ({"loss": 1.0}, r"rank 0 has loss, val_loss, rank 1 has loss\."),
        ({}, r"rank 1 has none\."),
        ({"loss": np.ones(2), "val_loss": 1.0}, r"rank 1 has loss\(2,\), val_loss\."),
    ],
)
def test_ranks_with_other_metrics_are_named(logs: dict[str, Any], text: str) -> None:
    def main(rank: int) -> None:
        own = {"loss": 1.0, "val_loss": 2.0} if rank == 0 else logs
        with pytest.raises(ValueError, match="metrics of epoch 3: .*" + text):
            callbacks.MetricAverageCallback().on_epoch_end(3, dict(own))

    run_ranks(2, main)


def test_later_callbacks_see_the_average() -> None:
    def main(rank: int) -> tuple[float, list[float], list[float]]:
        model = line([rank, rank], sgd(0.0, 0.0))
        seen: list[float] = []
        watch = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda _, logs: seen.append(logs["loss"])
        )
        own = float(np.mean((INPUTS @ np.full((2, 1), rank) - TARGETS) ** 2))
        history = fit(model, callbacks.MetricAverageCallback(), watch).history
        return own, seen, history["loss"]

    results = run_ranks(2, main)
    mean = np.mean([own for own, _, _ in results])
    for _, seen, history in results:
        np.testing.assert_allclose([*seen, *history], [mean] * 2, rtol=1e-6)


# -- a loss that is no number


def stops(rank: int, bad: float, **arguments: Any) -> list[int]:
    """The batches of two epochs of four; the inputs of the third are `bad` on rank 1."""
    seen: list[int] = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    inputs = np.tile(INPUTS, (2, 1))
    inputs[2] = bad if rank == 1 else inputs[2]
    optimizer = DistributedOptimizer(
        sgd(), process_set=arguments.get("process_set", global_process_set)
    )
    used = [callbacks.TerminateOnNaN(**arguments), count]
    rows = batches(inputs, np.tile(TARGETS, (2, 1)), 1)
    line([1, 2], optimizer).fit(**rows, verbose=0, epochs=2, callbacks=used)
    return seen


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_all_ranks_end_with_the_batch_of_which_one_has_no_loss(
    bad: float, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(2, lambda rank: stops(rank, bad)) == [[0, 1, 2]] * 2
    assert capfd.readouterr().out.count("batch 2: the loss of rank 1 is NaN or infinite") == 1


@pytest.mark.timeout(60)
def test_all_ranks_raise_where_one_has_no_loss() -> None:
    def main(rank: int) -> None:
        with pytest.raises(RuntimeError, match="batch 2: the loss of rank 1 is NaN or infinite"):
            stops(rank, np.nan, raise_error=True)

    run_ranks(2, main)


@pytest.mark.timeout(60)
def test_ranks_of_another_process_set_go_on() -> None:
    def main(rank: int) -> list[int]:
        own = [hvd.add_process_set([each]) for each in (0, 1)]
        pair = hvd.add_process_set([1, 2])
        return stops(rank, np.nan, process_set=pair if rank else own[0])

    assert run_ranks(3, main) == [[0, 1, 2, 3] * 2, [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    "make",
    [callbacks.TerminateOnNaN, partial(callbacks.BroadcastGlobalVariablesCallback, 0)],
)
def test_independent_workers_of_servers_are_told_why_they_are_no_ranks(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_process, "no_rank", "independent workers have no collectives")
    with pytest.raises(ValueError, match="independent workers have no collectives"):
        fit(line([1, 2], sgd()), make())


# -- learning rates


def on_one_rank(main: Callable[[], Any]) -> Any:
    return run_ranks(1, lambda rank: main())[0]


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """The learning rate of each batch, and what the logs say in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.optimizer.learning_rate.numpy()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logged.append(logs["lr"])


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"multiplier": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"multiplier": 0.5, "start_epoch": 1}, [9, 9, 1, 1, 0.5, 0.5]),
        ({"multiplier": 0.5, "end_epoch": 2}, [1, 1, 0.5, 0.5, 0.5, 0.5]),
        ({"multiplier": lambda epoch: epoch + 1}, [1, 1, 2, 2, 3, 3]),
        ({"multiplier": lambda epoch: epoch, "staircase": False}, [0, 0.5, 1, 1.5, 2, 2.5]),
        (
            {"multiplier": lambda epoch: epoch, "staircase": False, "steps_per_epoch": 4},
            [0, 0.25, 1, 1.25, 2, 2.25],
        ),
    ],
)
def test_a_schedule(arguments: dict[str, Any], expected: list[float]) -> None:
    def main() -> Rates:
        rates = Rates()
        model = line([0, 0], sgd(9e-3, 0.0))
        schedule = callbacks.LearningRateScheduleCallback(1e-3, **arguments)
        fit(model, schedule, rates, epochs=3)
        return rates

    rates = on_one_rank(main)
    np.testing.assert_allclose(rates.seen, np.array(expected) * 1e-3, rtol=1e-6)
    np.testing.assert_allclose(rates.logged, np.array(expected)[1::2] * 1e-3, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_the_warmup_reaches_the_rate_with_its_last_batch(
    size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(rank: int) -> list[float]:
        rates = Rates()
        model = line([0, 0], sgd(9e-3, 0.0), run_eagerly=True)
        warmup = callbacks.LearningRateWarmupCallback(4e-3, warmup_epochs=2, verbose=1)
        fit(model, warmup, rates, epochs=3)
        return rates.seen

    steps = np.array([1, 2, 3, 4, 4, 4]) / 4
    expected = 4e-3 * (1 / size + (1 - 1 / size) * steps)
    for seen in run_ranks(size, main):
        np.testing.assert_allclose(seen, expected, rtol=1e-6)
    said = capsys.readouterr().out
    assert said.strip() == "Epoch 2: finished gradual learning rate warmup to 0.004."


def test_each_fit_has_its_own_number_of_steps() -> None:
    def main() -> list[float]:
        rates = Rates()
        model = line([0, 0], sgd(9e-3, 0.0))
        schedule = callbacks.LearningRateScheduleCallback(1.0, lambda e: e, staircase=False)
        given = callbacks.LearningRateScheduleCallback(
            1.0, lambda e: e, start_epoch=1, staircase=False, steps_per_epoch=5
        )
        for rows in (4, 8, 4):
            ones = np.ones((rows, 2), np.float32)
            used = [schedule, given, rates]
            model.fit(**batches(ones, ones[:, :1], 2), epochs=2, verbose=0, callbacks=used)
        return rates.seen

    two, four = [0, 1 / 2, 1, 1 + 1 / 5], [0, 1 / 4, 1 / 2, 3 / 4, 1, 6 / 5, 7 / 5, 8 / 5]
    np.testing.assert_allclose(on_one_rank(main), [*two, *four, *two], rtol=1e-6)


def kinds_of_sgd() -> list[Callable[[], Any]]:
    scaling = (keras.mixed_precision if LEGACY else keras.optimizers).LossScaleOptimizer
    kinds: list[Callable[[], Any]] = [
        sgd,
        lambda: scaling(sgd()),
        lambda: DistributedOptimizer(sgd()),
        lambda: scaling(DistributedOptimizer(sgd())),
    ]
    return [*kinds, lambda: keras.optimizers.legacy.SGD(RATE, MOMENTUM)] if LEGACY else kinds


@pytest.mark.parametrize(
    ("make", "correct"), [*((each, True) for each in kinds_of_sgd()), (sgd, False)]
)
def test_the_velocity_follows_the_rate(make: Callable[[], Any], correct: bool) -> None:
    def main() -> np.ndarray:
        model = line([1, 2], make(), run_eagerly=make is not sgd and EAGERLY["run_eagerly"])
        schedule = callbacks.LearningRateScheduleCallback(RATE, 0.5, momentum_correction=correct)
        fit(model, schedule, epochs=3)
        return np.array(model.get_weights()[0])

    rates = [RATE, RATE, RATE / 2, RATE / 2, RATE / 4, RATE / 4]
    corrected = oracle([1, 2], rates)
    assert np.allclose(on_one_rank(main), corrected, rtol=1e-4) is correct


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda: keras.optimizers.RMSprop(RATE, momentum=MOMENTUM), 1 / 4),
        (lambda: keras.optimizers.Adam(RATE), 1),
    ],
)
def test_the_velocity_of_rmsprop_follows_the_rate_and_adam_is_left_alone(
    make: Callable[[], Any], factor: float
) -> None:
    def main() -> list[np.ndarray]:
        optimizer = make()
        model = line([1, 2], optimizer)
        fit(model)
        schedule = callbacks.LearningRateScheduleCallback(RATE / 4, 1.0)
        schedule.set_model(model)
        before = [np.array(each.numpy()) for each in optimizer._momentums]
        schedule.on_epoch_begin(0)
        return [*before, *(np.array(each.numpy()) for each in optimizer._momentums)]

    before, after = on_one_rank(main)
    np.testing.assert_allclose(after, before * factor, rtol=1e-6 if factor < 1 else 0)


def test_a_rate_of_zero_has_no_velocity_to_correct() -> None:
    def main() -> np.ndarray:
        model = line([1, 2], sgd())
        schedule = callbacks.LearningRateScheduleCallback(RATE, lambda epoch: float(epoch > 0))
        fit(model, schedule, epochs=2)
        return np.array(model.get_weights()[0])

    np.testing.assert_allclose(on_one_rank(main), oracle([1, 2], [RATE] * 2), rtol=1e-5)


def test_an_optimizer_with_a_schedule_of_its_own_is_refused() -> None:
    def main() -> None:
        own = keras.optimizers.schedules.CosineDecay(RATE, 10)
        model = line([1, 2], keras.optimizers.SGD(own))
        with pytest.raises(ValueError, match=r"LearningRateWarmupCallback .* SGD .*CosineDecay"):
            fit(model, callbacks.LearningRateWarmupCallback(RATE))

    on_one_rank(main)


def test_data_of_unknown_length_needs_the_number_of_steps() -> None:
    def main() -> None:
        model = line([1, 2], sgd())
        warmup = callbacks.LearningRateWarmupCallback(RATE)
        warmup.set_model(model)
        warmup.set_params({"verbose": 0, "epochs": 1, "steps": None})
        with pytest.raises(ValueError, match="steps_per_epoch="):
            warmup.on_train_begin()
        warmup.set_params({"samples": 10, "batch_size": 3})
        warmup.on_train_begin()
        assert warmup.steps_per_epoch == 3

    on_one_rank(main)


def test_a_first_rate_is_needed() -> None:
    with pytest.raises(ValueError, match="initial_lr"):
        callbacks.LearningRateScheduleCallback(None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="initial_lr"):
        callbacks.LearningRateWarmupCallback(None)  # type: ignore[arg-type]


# -- checkpoints


@pytest.mark.parametrize("only, ending", [(False, ".keras"), (True, ".weights.h5")])
def test_the_best_model_is_kept(only: bool, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"best{ending}"
    model = line([1, 2], sgd(0.0, 0.0))
    best = callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=only)
    with pytest.raises(ValueError, match="set its filepath"):
        fit(model, best)
    best.filepath = path
    fit(model, best)
    model.set_weights([np.full((2, 1), 100.0)])
    fit(model, best)  # worse
    other = line([7, 7], sgd())
    if only:
        other.load_weights(str(path))
    else:
        other = keras.models.load_model(str(path))
    np.testing.assert_array_equal(other.get_weights()[0].ravel(), [1, 2])


# -- the other frameworks


def test_callbacks_of_one_keras_serve_models_of_the_other() -> None:
    """tf_keras may be in use without TF_USE_LEGACY_KERAS."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras 2 is TensorFlow only")
    other = pytest.importorskip("keras" if LEGACY else "tf_keras", reason="it is not installed")

    def main(rank: int) -> tuple[np.ndarray, list[float]]:
        model = other.Sequential([other.Input((2,)), other.layers.Dense(1, use_bias=False)])
        model.set_weights([np.full((2, 1), 1.0 + rank)])
        model.compile(other.optimizers.SGD(RATE, momentum=MOMENTUM), loss="mse", **EAGERLY)
        used = [
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=1),
            callbacks.MetricAverageCallback(),
        ]
        return fit(model, *used).history["lr"], model.get_weights()[0]

    rates = [RATE * 0.75, RATE]
    for logged, weights in run_ranks(2, main):
        np.testing.assert_allclose(logged, RATE, rtol=1e-6)
        np.testing.assert_allclose(weights, oracle([1, 1], rates), rtol=1e-5)
