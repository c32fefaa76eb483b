"""Optimizers of Keras whose steps servers make: workers and servers as threads.

They are for TensorFlow and, with `KERAS_BACKEND=jax`, for JAX.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
BACKEND = keras.backend.backend()
pytest.importorskip(BACKEND)

from hvdlite.keras import ps  # noqa: E402
from hvdlite.keras.ps import optimizer as served  # noqa: E402
from hvdlite.keras.ps.updater import KerasUpdater  # noqa: E402
from hvdlite.ps import context  # noqa: E402
from hvdlite.ps.layouts.blocks import Block  # noqa: E402
from hvdlite.ps.layouts.layout import Part  # noqa: E402
from hvdlite.ps.tables.clocks import SYNC, Mode  # noqa: E402
from hvdlite.ps.tables.description import TableDescription, describe_table  # noqa: E402
from hvdlite.ps.tables.saved import SavedTable, join  # noqa: E402
from hvdlite.ps.tables.table import Saved  # noqa: E402
from tests.ps.cluster import (  # noqa: E402
    NewCluster,
    in_threads,
)

New = Callable[[], Any]
SGD = partial(keras.optimizers.SGD, 0.1, momentum=0.9, nesterov=True)
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
ADAM = partial(
    keras.optimizers.Adam, SCHEDULE, clipvalue=0.05, weight_decay=0.01, loss_scale_factor=4.0
)


OF_THREAD = threading.local()
Job = Callable[..., None]


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "role", lambda: "worker")
    monkeypatch.setattr(context, "worker", lambda: OF_THREAD.worker)


@pytest.fixture
def job(new_cluster: NewCluster) -> Job:
    """What runs `main(number)` in each worker of a cluster that steps with an optimizer."""

    def run(new: New, main: Callable[[int], None], servers: int = 2, workers: int = 2) -> None:
        cluster = new_cluster(servers, workers, updater_of=lambda _: KerasUpdater(new()))

        def enter(number: int) -> None:
            OF_THREAD.worker = cluster.worker(f"worker {number}", number)
            main(number)

        in_threads(*[partial(enter, number) for number in range(workers)])

    return run


def new_model(seed: int = 1) -> Any:
    initializer = keras.initializers.GlorotUniform(seed)
    layers = [
        keras.layers.Input((6,)),
        keras.layers.Dense(8, "relu", kernel_initializer=initializer),
        keras.layers.Dense(3, kernel_initializer=initializer),
    ]
    return keras.Sequential(layers)


def data(worker: int) -> tuple[Any, Any]:
    made = np.random.default_rng(worker)
    return made.normal(size=(24, 6)).astype("float32"), made.integers(0, 3, 24)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fitted_in_one(new: New) -> list[Any]:
    """Return the weights when one process has the batches of both workers."""
    model = new_model()
    model.compile(optimizer=new(), loss=LOSS)
    halves = [data(worker) for worker in range(2)]
    x, y = (
        np.concatenate([half[place][at : at + 8] for at in range(0, 24, 8) for half in halves])
        for place in range(2)
    )
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    weights: list[Any] = model.get_weights()
    return weights


@pytest.mark.parametrize("new", [SGD, ADAM])
def test_a_compiled_fit_is_that_of_one_process(new: New, job: Job) -> None:
    def main(number: int) -> None:
        model = new_model()
        model.compile(optimizer=ps.DistributedOptimizer(new()), loss=LOSS)
        x, y = data(number)
        model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        assert model.optimizer.finished_steps == model.optimizer.iterations == 9
        assert not any("momentum" in each.path for each in model.optimizer.variables)
        for own, wanted in zip(model.get_weights(), wanted_weights, strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)

    wanted_weights = fitted_in_one(new)
    job(new, main)


def test_weights_that_are_loaded_between_fits_are_warned_of(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So EarlyStopping does that restores the best ones."""
    told: list[str] = []
    monkeypatch.setattr(served, "warn_user", told.append)

    def main(number: int) -> None:
        model = new_model()
        model.compile(optimizer=ps.DistributedOptimizer(SGD()), loss=LOSS)
        x, y = data(number)
        for _ in range(2):
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert not told
        model.set_weights([each + 1 for each in model.get_weights()])
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)

    job(SGD, main, workers=1)
    (words,) = told
    assert "kernel has changed since the last step" in words


@pytest.mark.parametrize("eager", [False, True])
def test_a_fit_raises_a_rollback_and_goes_on_from_its_step(job: Job, eager: bool) -> None:
    """The weights are read anew, and schedules count from there."""
    if eager and BACKEND == "jax":
        pytest.skip("its steps are programs")

    class Loser(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                table, done = self.model.optimizer._hvdlite_on_servers.table, threading.Event()
                error = ps.PsRolledBack("server 0 goes on from step 2", 2)
                table._client.call(lambda: (table._go_back(error), done.set()))
                assert done.wait(20)

    def main(number: int) -> None:
        model = new_model()
        optimizer = ps.DistributedOptimizer(SGD())
        model.compile(optimizer=optimizer, loss=LOSS, run_eagerly=eager)
        fit = partial(model.fit, *data(number), batch_size=8, shuffle=False, verbose=0)
        fit()
        with pytest.raises(ps.PsRolledBack, match="server 0 goes on from step 2") as raised:
            fit(epochs=3, callbacks=[Loser()])
        assert raised.value.version == optimizer.finished_steps == optimizer.iterations == 2
        link = vars(optimizer)["_hvdlite_on_servers"]
        for own, value in zip(model.get_weights(), link._pull(), strict=True):
            np.testing.assert_array_equal(own, value)
        fit()
        assert optimizer.finished_steps == optimizer.iterations == 5

    job(SGD, main, 1, workers=1)


def gradients_of(model: Any, worker: int, step: int) -> list[Any]:
    """The gradients of a batch, as a loop of its own computes them."""
    x, y = (each[8 * step : 8 * step + 8] for each in data(worker))
    if BACKEND == "jax":
        import jax

        def loss_of(weights: Any) -> Any:
            return LOSS(y, model.stateless_call(weights, [], x)[0])

        found: list[Any] = jax.grad(loss_of)([each.value for each in model.trainable_variables])
        return found
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x))
    found = tape.gradient(loss, model.trainable_variables)
    return found


def compiled_apply(optimizer: Any) -> Callable[[list[Any], list[Any]], None]:
    """What applies gradients to variables in a program of TensorFlow or JAX."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        step = tf.function(optimizer.apply)
        return lambda gradients, _: step(gradients)
    import jax

    stateless = jax.jit(optimizer.stateless_apply)

    def apply(gradients: list[Any], variables: list[Any]) -> None:
        state = optimizer.variables
        made = stateless(
            [each.value for each in state], gradients, [each.value for each in variables]
        )
        for variable, value in zip([*variables, *state], [*made[0], *made[1]], strict=True):
            variable.assign(value)

    return apply


# Of each step: the variables of which each worker has no gradient.
LACKS: list[tuple[set[int], set[int]]] = [(set(), set()), ({0, 1}, {0, 1}), ({0}, {0, 3})]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_of_its_own_is_bitwise_that_of_one_process(job: Job, compiled: bool) -> None:
    """What no worker has a gradient of stays as it is, as in Keras, momenta too.

    Where another worker has one, the missing ones are zeros.
    """
    new = partial(SGD, weight_decay=0.1)

    def known(model: Any, worker: int, step: int) -> list[Any]:
        found = gradients_of(model, worker, step)
        return [None if n in LACKS[step][worker] else each for n, each in enumerate(found)]

    def main(number: int) -> None:
        model = new_model()
        optimizer = ps.DistributedOptimizer(new())
        optimizer.build(model.trainable_variables)
        for step in range(3):  # Programs are made anew: other gradients are missing.
            apply = compiled_apply(optimizer) if compiled else optimizer.apply
            apply(known(model, number, step), model.trainable_variables)
        assert optimizer.finished_steps == 3
        for own, value in zip(model.get_weights(), wanted.get_weights(), strict=True):
            np.testing.assert_array_equal(own, value)

    wanted, optimizer = new_model(), new()
    optimizer.build(wanted.trainable_variables)
    for step in range(3):
        means: list[Any] = []
        for pair in zip(*(known(wanted, worker, step) for worker in range(2)), strict=True):
            there = [each for each in pair if each is not None]
            means.append(sum(there) * np.float32(0.5) if there else None)
        optimizer.apply(means, wanted.trainable_variables)
    job(new, main, 1)  # So that a block has variables with a gradient, and others.


@pytest.mark.skipif(BACKEND == "jax", reason="Keras refuses it there: stateless_apply has all")
def test_a_layer_that_is_frozen_between_fits_stays_as_it_is(job: Job) -> None:
    def main(number: int) -> None:
        model = new_model()
        optimizer = ps.DistributedOptimizer(SGD())
        for trainable in (True, False):
            model.layers[0].trainable = trainable
            before = model.get_weights()
            model.compile(optimizer=optimizer, loss=LOSS)
            model.fit(*data(number), batch_size=8, shuffle=False, verbose=0)
        same = [(a == b).all() for a, b in zip(before, model.get_weights(), strict=True)]
        assert same == [True, True, False, False]

    job(SGD, main, workers=1)


def test_gradients_of_other_weights_are_refused(job: Job) -> None:
    def main(number: int) -> None:
        model = new_model(seed=number + 1)
        optimizer = ps.DistributedOptimizer(SGD())
        gradients = [np.zeros(each.shape, "float32") for each in model.trainable_variables]
        try:
            optimizer.apply(gradients, model.trainable_variables)
        except ValueError as error:
            refused.append(str(error))
            optimizer.apply(gradients, model.trainable_variables)  # they are the same now
        weights.append(model.get_weights())

    refused: list[str] = []
    weights: list[Any] = []
    job(SGD, main, 1)  # Two servers may each take the weights of another worker.
    (words,) = refused  # The first worker's weights are those of the servers.
    assert "call optimizer.build(model.trainable_variables) before the first step" in words
    assert all((a == b).all() for a, b in zip(*weights, strict=True))


has_multi_optimizer = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="not in Keras 3.12"
)


def several(optimizer: Any) -> Any:
    """A MultiOptimizer with this one and another inside; None where Keras has none."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return None
    choices = keras.optimizers.OptimizerMap(optimizer, {".*bias": keras.optimizers.Adam()})
    return keras.optimizers.MultiOptimizer(choices)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (keras.optimizers.SGD(clipnorm=1.0), "clipnorm looks at whole variables"),
        (keras.optimizers.SGD(global_clipnorm=1.0), "looks at all gradients"),
        (keras.optimizers.SGD(use_ema=True), "use_ema"),
        (keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps"),
        (keras.optimizers.Adafactor(), "Adafactor looks at whole variables"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "train in bfloat16"),
        pytest.param(
            several(keras.optimizers.SGD()),
            "each variable an optimizer of its own, and servers step by one",
            marks=has_multi_optimizer,
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ps.DistributedOptimizer(optimizer)


SETTINGS: list[tuple[str, Any, str]] = [
    ("momentum", 0.1, r"momentum is 0.1, and was 0.9 when .*: set it before"),
    ("weight_decay", 0.1, "weight_decay is 0.1, and was None"),
    ("clipnorm", 0.1, r"clipnorm is 0.1, and was None when .*: clipnorm looks at whole variables"),
    ("use_ema", True, "use_ema is True, and was False"),
    ("gradient_accumulation_steps", 2, "gradient_accumulation_steps is 2, and was None"),
]


def test_settings_that_servers_do_not_hear_of_are_refused(job: Job) -> None:
    """Before the optimizer is built, in the next step, and in the next `fit`, compiled already."""

    def main(number: int) -> None:
        model = new_model()
        optimizer = ps.DistributedOptimizer(SGD())
        model.compile(optimizer=optimizer, loss=LOSS)
        fit = partial(model.fit, *data(number), batch_size=8, shuffle=False, verbose=0)
        step = partial(optimizer.apply, model.get_weights(), model.trainable_variables)
        for calls in ([partial(optimizer.build, model.trainable_variables)], [fit, step]):
            for name, value, words in SETTINGS:
                before = getattr(optimizer, name)
                setattr(optimizer, name, value)
                for call in calls:
                    with pytest.raises(ValueError, match=words):
                        call()
                setattr(optimizer, name, before)
            optimizer.learning_rate = 0.01
            fit()
        assert optimizer.finished_steps == 6

    job(SGD, main, 1, workers=1)


def test_variables_that_are_excluded_from_weight_decay_too_late_are_refused() -> None:
    optimizer = ps.DistributedOptimizer(keras.optimizers.AdamW())
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(ValueError, match=r"pattern is re.compile.'bias'.*by name"):
        optimizer.build(new_model().trainable_variables)


def test_variables_with_constraints_are_refused() -> None:
    """Servers would go on with weights that no constraint has seen."""
    layer = keras.layers.Dense(3, kernel_constraint="max_norm", name="held")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(optimizer=ps.DistributedOptimizer(SGD()), loss="mse")
    with pytest.raises(ValueError, match="held/kernel has a constraint, which looks at all of it"):
        model.fit(np.zeros((2, 4)), np.zeros((2, 3)), verbose=0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA of JAX calls Python")
def test_a_step_that_xla_of_tensorflow_compiles_is_refused(job: Job) -> None:
    import tensorflow as tf

    def main(_: int) -> None:
        model = new_model()
        optimizer = ps.DistributedOptimizer(SGD())
        optimizer.build(model.trainable_variables)
        gradients = [tf.zeros_like(each) for each in model.get_weights()]
        with pytest.raises(ValueError, match=r"make the tf.function without jit_compile, or call"):
            tf.function(optimizer.apply, jit_compile=True)(gradients)
        tf.function(optimizer.apply)(gradients)
        assert optimizer.finished_steps == 1

    job(SGD, main, 1, workers=1)


@has_multi_optimizer
def test_an_optimizer_for_many_around_it_is_refused() -> None:
    model = new_model()
    model.compile(optimizer=several(ps.DistributedOptimizer(SGD())), loss=LOSS)
    with pytest.raises(ValueError, match=r"MultiOptimizer gives .*, and servers step by one"):
        model.fit(*data(0), verbose=0)


def test_a_loss_scaler_around_it_is_refused() -> None:
    model = new_model()
    scaler = keras.optimizers.LossScaleOptimizer(ps.DistributedOptimizer(SGD()))
    model.compile(optimizer=scaler, loss=LOSS)
    with pytest.raises(ValueError, match="skips steps that the servers wait for"):
        model.fit(*data(0), verbose=0)


def test_a_model_is_saved_with_the_name_of_the_optimizer() -> None:
    optimizer = ps.DistributedOptimizer(SGD())
    saved = keras.saving.serialize_keras_object(optimizer)
    assert (saved["module"], saved["class_name"]) == ("keras.optimizers", "SGD")
    with pytest.raises(ValueError, match="made by servers already"):
        ps.DistributedOptimizer(optimizer)


def test_state_of_blocks_goes_to_other_servers() -> None:
    """Those of two servers, as when servers come and go, and when a checkpoint is loaded."""
    new = partial(keras.optimizers.Adam, 0.1)
    gradients = [np.random.default_rng(n).normal(size=9).astype("float32") for n in range(6)]
    spans = ([(0, 0, 5)], [(0, 5, 6), (1, 0, 3)])  # Key, start and stop of what each one has.
    old = [Block("float32", 0, tuple(Part(*part, 0) for part in each)) for each in spans]
    next_one = Block("float32", 0, (Part(0, 0, 6, 0), Part(1, 0, 3, 0)))
    undisturbed, first, second = (KerasUpdater(new()) for _ in range(3))
    for updater, size in ((undisturbed, 9), (first, 5), (second, 4)):
        updater.begin([np.ones(size, np.float32)])
    for each in gradients[:3]:
        for updater, part in ((undisturbed, each), (first, each[:5]), (second, each[5:])):
            updater.step([part], [{"learning_rate": 0.1}])
    described = [
        TableDescription("t", describe_table([], [block], Mode(SYNC), average=True))
        for block in (*old, next_one)
    ]
    saved = [
        SavedTable(about, Saved(updater.values(), updater.state(), 3, {}, []))
        for about, updater in zip(described, (first, second), strict=False)
    ]
    sent = [SavedTable.unpack(*each.pack()) for each in saved]
    values, state = join(described[2], [sent[0], sent[1].cut_for(described[2])])
    assert state["0.velocity"].shape == (9,) and state["0.iteration"] == 3
    first.begin(values)  # Of a server that has stepped with other blocks before.
    first.load(state)
    for each in gradients[3:]:
        for updater in (undisturbed, first):
            updater.step([each], [{"learning_rate": 0.1}])
    np.testing.assert_allclose(first.values()[0], undisturbed.values()[0], rtol=1e-6)


@pytest.mark.skipif(BACKEND == "jax", reason="its arrays have 32 bits by default")
def test_rates_of_float64_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.src.backend.config, "_FLOATX", "float64")
    updater, gradient = KerasUpdater(SGD()), np.random.default_rng(0).normal(size=9)
    updater.begin([np.ones(9)])
    updater.step([gradient], [{"learning_rate": 0.1}])
    alone = keras.Variable(np.ones(9), dtype="float64")
    SGD().apply([keras.ops.convert_to_tensor(gradient)], [alone])
    np.testing.assert_array_equal(updater.values()[0], alone.numpy())


class Unnamed(keras.optimizers.SGD):
    """Has a number of its own, which Keras names by a count over all optimizers of the process."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.pace = self.others = None
            self.pace = keras.Variable(1.0)
            self.others = [keras.Variable(2.0)]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.pace.assign(self.pace * 0.5)
        self.others[0].assign(self.others[0] * 0.9)
        super().update_step(gradient, variable, learning_rate * self.pace * self.others[0])


OF_STATE = [
    keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.Adamax, keras.optimizers.Ftrl,
    keras.optimizers.Lion, partial(keras.optimizers.RMSprop, momentum=0.5), Unnamed,
]  # fmt: skip


@pytest.mark.parametrize("kind", OF_STATE)
def test_a_server_goes_on_after_a_snapshot(kind: Any) -> None:
    new = partial(kind, 0.1)
    undisturbed, before, after = (KerasUpdater(new()) for _ in range(3))
    random = np.random.default_rng(0)
    gradients = [[random.normal(size=5).astype("float32")] for _ in range(6)]
    for updater in (undisturbed, before):
        updater.begin([np.ones(5, np.float32)])
        for each in gradients[:3]:
            updater.step(each, [{"learning_rate": 0.1}])
    after.begin(before.values())
    after.load({key: array.copy() for key, array in before.state().items()})
    for updater in (undisturbed, after):
        for each in gradients[3:]:
            updater.step(each, [{"learning_rate": 0.01}])
    np.testing.assert_array_equal(after.values(), undisturbed.values())
