"""Elastic training with Keras: states, counting callbacks, and `fit` that loses and gains ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.common.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.common.settings.config import Config
from hvdlite.keras.framework import LEGACY, keras
from tests.elastic_job import ElasticJob, Worker
from tests.keras.training import apply_gradients, batches, tensor
from tests.ranks import run_ranks

BATCHES = 10
X = np.random.default_rng(0).normal(size=(4 * BATCHES, 3)).astype("float32")
Y = X @ np.ones((3, 2), "float32")
Seen = list[tuple[int, int]]


def network(make: Any = keras.optimizers.SGD) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(make(0.01)), "mse")
    return model


def begun(batch: int = 0) -> Any:
    """The state of a model for one process, as it was made: its step is traced once for all."""
    model, values = traced()
    for variable, value in values:
        variable.assign(value)
    return hvd.elastic.KerasState(model, epoch=0, batch=batch)


@cache
def traced() -> tuple[Any, list[tuple[Any, np.ndarray]]]:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model, [(each, np.array(each.numpy())) for each in state_of(model)]


def state_of(model: Any) -> list[Any]:
    variables = model.optimizer.variables
    own = variables() if callable(variables) else variables
    return [*model.weights, model.optimizer.learning_rate, *own]


def values(state: Any) -> list[Any]:
    return [np.asarray(variable.numpy()) for variable in state._variables()]


def test_the_vectors_of_a_state() -> None:
    def main(rank: int) -> None:
        model = network(keras.optimizers.Adam)
        state = hvd.elastic.KerasState(model, step=7 + rank, round=3 + rank)
        assert state.optimizer is model.optimizer
        assert len(values(state)) >= 2 + 2 * 2  # weights, and two moments of each

        def fill(value: float, step: int, round_: int) -> None:
            for variable in state._variables():
                variable.assign(np.full(variable.shape, value, np.asarray(variable.numpy()).dtype))
            state.step, state.round = step, round_

        def check(value: float, step: int, round_: int) -> None:
            assert all((array == value).all() for array in values(state))
            assert (state.step, state.round) == (step, round_)

        fill(rank, 7 + rank, 3 + rank)
        state.save()
        state.sync()
        check(0, 7, 3)
        fill(9, 8, 4)
        state.restore()
        check(0, 7, 3)
        fill(9, 8, 4)
        state.commit()
        fill(1, 0, 0)
        state.restore()
        check(9, 8, 4)

    run_ranks(2, main)


def test_ranks_whose_keras_has_counted_differently_are_synchronized() -> None:
    """One of them has built more models before."""

    def main(rank: int) -> list[Any]:
        for _ in range(rank):
            network(keras.optimizers.Adam)
        state = hvd.elastic.KerasState(network(keras.optimizers.Adam))
        state.sync()
        return values(state)

    found = run_ranks(2, main, config=Config(check_weights=1))
    for of_rank in found[1:]:
        for here, there in zip(of_rank, found[0], strict=True):
            np.testing.assert_array_equal(here, there)


@pytest.mark.skipif(LEGACY, reason="Keras 2 asks a schedule for its rate")
def test_a_schedule_is_not_asked() -> None:
    """With JAX, a step that fails takes the number of the step with it."""

    class Refusing(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        def __call__(self, step: Any) -> Any:
            raise AssertionError("no step is made")

        def get_config(self) -> dict[str, Any]:
            return {}

    def main(rank: int) -> None:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(Refusing())), "mse")
        state = hvd.elastic.KerasState(model)
        state.save()
        state.restore()

    run_ranks(1, main)


def test_a_model_must_be_built() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="is not built"):
        hvd.elastic.KerasState(model)


class Failing(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises at a batch of an epoch, and notes the epoch and the batch after each batch."""

    def __init__(self, state: Any, at: tuple[int, int] | None) -> None:
        super().__init__()
        self.state, self.at = state, at
        self.seen: Seen = []
        self.epoch = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.epoch = self.state.epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = int(self.state.batch)
        if self.state.epoch > self.epoch:  # The epoch has ended with this batch.
            assert (self.state.epoch, done) == (self.epoch + 1, 0)
            done = BATCHES - 1
        self.seen.append((self.epoch, done))
        if self.seen[-1] == self.at:
            raise HorovodInternalError("a rank is lost")


@pytest.fixture
def initialized() -> Iterator[None]:
    """A job of this process alone."""
    hvd.init()
    yield
    hvd.shutdown()


def all_callbacks(state: Any, order: Sequence[int], every: int = 1) -> list[Any]:
    elastic = hvd.elastic
    made = [
        elastic.CommitStateCallback(state, every),
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
    ]
    return [made[index] for index in order]


@pytest.mark.usefixtures("initialized")
@pytest.mark.parametrize(("order", "with_initial_epoch"), [((0, 1, 2), False), ((1, 2, 0), True)])
def test_an_epoch_goes_on_where_it_was_committed(
    order: Sequence[int], with_initial_epoch: bool
) -> None:
    """Every batch of every epoch counts once; the last one is committed with the epoch's end."""
    state = begun()
    seen: list[Seen] = []
    failures = iter([(1, 3), (1, 7), (2, BATCHES - 1), None])

    @hvd.elastic.run
    def train(state: Any) -> None:
        failing = Failing(state, next(failures))
        seen.append(failing.seen)
        epochs = {"epochs": 4 - state.epoch}
        if with_initial_epoch:
            epochs = {"epochs": 4, "initial_epoch": state.epoch}
        callbacks = [*all_callbacks(state, order), failing]
        state.model.fit(**batches(X, Y, 4), verbose=0, callbacks=callbacks, **epochs)
        assert (state.epoch, state.batch) == (4, 0)

    train(state)
    assert int(state.model.optimizer.iterations.numpy()) == 4 * BATCHES
    first, second, third, last = seen
    assert first == [(0, b) for b in range(BATCHES)] + [(1, b) for b in range(4)]
    assert second == [(1, b) for b in range(4, 8)]
    assert third == [(1, 8), (1, 9)] + [(2, b) for b in range(BATCHES)]
    assert last == [(2, BATCHES - 1)] + [(3, b) for b in range(BATCHES)]


@pytest.mark.usefixtures("initialized")
def test_a_learning_rate_that_follows_batches_goes_on_where_it_was() -> None:
    state = begun()
    asked: list[float] = []
    failures = iter([(1, 3), (1, 7), None])

    def note(epoch: float) -> float:
        asked.append(epoch)
        return 1.0

    @hvd.elastic.run
    def train(state: Any) -> None:
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.01, note, staircase=False)
        callbacks = [schedule, *all_callbacks(state, (0, 1, 2)), Failing(state, next(failures))]
        epochs = {"epochs": 3, "initial_epoch": state.epoch}
        state.model.fit(**batches(X, Y, 4), verbose=0, callbacks=callbacks, **epochs)

    train(state)
    # A batch that has failed, 1.3 and 1.7, was committed before.
    assert asked == [epoch + batch / BATCHES for epoch in range(3) for batch in range(BATCHES)]


@pytest.mark.skipif(LEGACY, reason="Keras 2 has no such callback")
@pytest.mark.parametrize("is_last", [False, True])
def test_averages_are_swapped_back_before_an_epoch_is_committed(is_last: bool) -> None:
    """`SwapEMAWeights` does it as the next epoch begins, wherever it is in the list."""

    def weights(at: tuple[int, int] | None) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5), "mse")
        model.optimizer.build(model.trainable_variables)
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
        failures = iter([at, None])

        @hvd.elastic.run
        def train(state: Any) -> None:
            swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
            others = [*all_callbacks(state, (0, 1, 2), 5), Failing(state, next(failures))]
            callbacks = [*others, swap] if is_last else [swap, *others]
            epochs = {"epochs": 3, "initial_epoch": state.epoch}
            model.fit(**batches(X, Y, 4), verbose=0, callbacks=callbacks, **epochs)

        hvd.init()
        try:
            train(state)
        finally:
            hvd.shutdown()
        return [np.array(each.numpy()) for each in state_of(model)]

    # The last commit before it is that of the epoch.
    for one, other in zip(weights((1, 1)), weights(None), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_backup_beside_commits_is_refused(tmp_path: Path) -> None:
    def main(rank: int) -> None:
        state = begun()
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        callbacks = [*all_callbacks(state, (0, 1, 2)), backup]
        with pytest.raises(ValueError, match="BackupAndRestore beside callbacks of an elastic"):
            state.model.fit(**batches(X, Y, 4), verbose=0, callbacks=callbacks)

    run_ranks(1, main)


class Ends(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes at the end of each epoch its number and loss, and changes a variable."""

    def __init__(self, state: Any, seen: Seen, fails_at: int = 0) -> None:
        super().__init__()
        self.state, self.seen, self.fails_at = state, seen, fails_at

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert logs["loss"] > 0
        self.seen.append((self.state.epoch, int(self.model.optimizer.iterations.numpy())))
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.5)
        if len(self.seen) == self.fails_at:
            raise HorovodInternalError("a rank is lost")


def train_three_epochs(state: Any, make: Callable[[], list[Any]], with_initial_epoch: bool) -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        epochs = {"epochs": 3 - state.epoch}
        if with_initial_epoch:
            epochs = {"epochs": 3, "initial_epoch": state.epoch}
        state.model.fit(**batches(X, Y, 4), verbose=0, callbacks=make(), **epochs)

    train(state)


def rate_of(model: Any) -> float:
    return float(model.optimizer.learning_rate.numpy())


@pytest.mark.parametrize(
    ("order", "with_initial_epoch", "commit"),
    [
        (*each,)
        for each in zip(permutations(range(3)), [False, True] * 3, [3, 2, 1] * 2, strict=True)
    ],
)
def test_all_callbacks_see_the_end_of_each_epoch_once(
    order: Sequence[int], with_initial_epoch: bool, commit: int
) -> None:
    """The ranks change at the last commit of an epoch, also of the last one."""

    def main(rank: int) -> None:
        state = begun()
        model, rate = state.model, rate_of(state.model)
        commits: list[tuple[int, int]] = []
        seen: list[Seen] = [[], []]
        original = state.commit

        def commit_and_change() -> None:
            original()
            commits.append((state.epoch, int(state.batch)))
            if len(commits) == commit * BATCHES:
                raise HostsUpdatedInterrupt(skip_sync=False)

        state.commit = commit_and_change  # type: ignore[method-assign]
        before, after = (Ends(state, each) for each in seen)
        train_three_epochs(
            state, lambda: [before, *all_callbacks(state, order), after], with_initial_epoch
        )
        assert (state.epoch, state.batch) == (3, 0)
        assert commits[commit * BATCHES - 1] == (commit, 0)
        assert seen[0] == [(epoch, epoch * BATCHES) for epoch in (1, 2, 3)]
        assert [iterations for _, iterations in seen[1]] == [BATCHES, 2 * BATCHES, 3 * BATCHES]
        # What they changed at the end of the epoch was not undone.
        assert rate_of(model) == rate * 0.5**6

    run_ranks(1, main)


@pytest.mark.usefixtures("initialized")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_rank_lost_at_the_end_of_an_epoch_leaves_no_end_out(order: Sequence[int]) -> None:
    """Its last batch is made again, and what callbacks had changed is undone before."""
    state = begun()
    rate = rate_of(state.model)
    ends = Ends(state, [], fails_at=2)
    train_three_epochs(state, lambda: [*all_callbacks(state, order), ends], False)
    assert ends.seen == [(epoch, epoch * BATCHES) for epoch in (1, 2, 2, 3)]
    assert rate_of(state.model) == rate * 0.5**3


def test_a_script_that_counts_epochs_itself_commits_the_last_batch_with_the_end() -> None:
    def main(rank: int) -> None:
        state = begun()
        model = state.model
        commits: list[tuple[int, int]] = []
        state.commit = lambda: commits.append((state.epoch, int(state.batch)))  # type: ignore[method-assign]
        callbacks = all_callbacks(state, (0, 1))
        model.fit(**batches(X, Y, 4), verbose=0, callbacks=callbacks)
        assert commits == [(0, b) for b in range(BATCHES - 1)] + [(0, 0)]

    run_ranks(1, main)


def generated() -> Iterator[tuple[Any, Any]]:
    for place in range(0, len(X), 4):
        yield X[place : place + 4], Y[place : place + 4]


@pytest.mark.usefixtures("initialized")
def test_an_epoch_of_unknown_length_is_repeated_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(hvd.elastic.UpdateBatchStateCallback, "_has_warned", False)
    state = begun()
    seen: list[Seen] = []
    signature = (tf.TensorSpec((4, 3)), tf.TensorSpec((4, 2)))
    data = tf.data.Dataset.from_generator(generated, output_signature=signature)
    failures = iter([(0, 3), (0, 5), None])

    @hvd.elastic.run
    def train(state: Any) -> None:
        failing = Failing(state, next(failures))
        callbacks = [*all_callbacks(state, (0, 1, 2)), failing]
        seen.append(failing.seen)
        epochs = 2 - state.epoch
        state.model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)

    train(state)
    assert (state.epoch, state.batch) == (2, 0)
    first, second, third = seen
    assert [len(first), len(second)] == [4, 6]
    assert third == [(epoch, b) for epoch in range(2) for b in range(BATCHES)]
    (record,) = [each for each in caplog.records if "how many batches" in each.message]
    assert "the 4 batches that were done" in record.message
    assert "steps_per_epoch" in record.message and "assert_cardinality" in record.message


def test_a_number_that_the_user_has_set_is_that_of_batches_done() -> None:
    def main(rank: int) -> None:
        state = begun(batch=3)
        model = state.model
        failing = Failing(state, None)
        callbacks = [*all_callbacks(state, (0, 1, 2)), failing]
        model.fit(**batches(X, Y, 4), epochs=2, verbose=0, callbacks=callbacks)
        assert failing.seen == [(0, b) for b in range(3, 10)] + [(1, b) for b in range(10)]

    run_ranks(1, main)


@pytest.mark.parametrize(("every", "expected"), [(1, 20), (3, 2 + 6), (100, 2)])
def test_how_often_is_committed(every: int, expected: int) -> None:
    """Every so many batches, counted through `fit`, and at the end of each epoch, never twice."""

    def main(rank: int) -> int:
        state = begun()
        model = state.model
        count: list[Any] = []
        state.commit = lambda: count.append((state.epoch, int(state.batch)))  # type: ignore[method-assign]
        callbacks = all_callbacks(state, (0, 1, 2), every)
        model.fit(**batches(X, Y, 4), epochs=2, verbose=0, callbacks=callbacks)
        assert count[-1] == (2, 0) and (1, 0) in count
        return len(count)

    assert run_ranks(1, main) == [expected]


def test_early_stopping_is_not_undone() -> None:
    def main(rank: int) -> None:
        state = begun(batch=6)
        model = state.model

        class Stop(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.model.stop_training = True

        callbacks = [Stop(), *all_callbacks(state, (0, 1, 2))]
        model.fit(**batches(X, Y, 4), epochs=3, verbose=0, callbacks=callbacks)
        assert state.epoch == 1

    run_ranks(1, main)


def test_a_model_that_was_traced_alone_reduces_when_ranks_have_come() -> None:
    job = ElasticJob(1)

    class Grow(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 4 and len(job.workers) == 1:
                job.add(main)

    def main(worker: Worker) -> Any:
        model = network()
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state: Any) -> None:
            part = slice(hvd.rank(), None, hvd.size())
            callbacks = [*all_callbacks(state, (0, 1, 2)), Grow()]
            rows = batches(X[part], Y[part], 4 // hvd.size())
            model.fit(**rows, epochs=2 - state.epoch, verbose=0, callbacks=callbacks)

        train(state)
        return values(state)

    first, second = job.run(main)
    for left, right in zip(first, second, strict=True):
        assert np.array_equal(left, right)


def test_fit_loses_and_gains_ranks() -> None:
    job = ElasticJob(3)

    class Events(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, worker: Worker, state: Any) -> None:
            super().__init__()
            self.worker, self.state = worker, state

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            place = self.worker.number, self.state.epoch, batch
            if place in {(1, 0, 4), (2, 2, 2)}:
                self.worker.die()
            if self.worker.number == 0 and self.state.epoch == 1 and len(job.workers) == 3:
                job.add(main)

    def main(worker: Worker) -> Any:
        model = network()
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state: Any) -> None:
            callbacks = [*all_callbacks(state, (0, 1, 2)), Events(worker, state)]
            rows = batches(X, Y, 4)
            model.fit(**rows, epochs=4 - state.epoch, verbose=0, callbacks=callbacks)

        train(state)
        return values(state), state.epoch, int(model.optimizer.iterations.numpy())

    results = [result for result in job.run(main) if result is not None]
    assert len(results) == 2
    for found, epoch, iterations in results:
        assert (epoch, iterations) == (4, 4 * BATCHES)
        for left, right in zip(found, results[0][0], strict=True):
            assert np.array_equal(left, right)


def line(passes: int = 1, **options: Any) -> Any:
    """A model of one weight with an optimizer that adds gradients up."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    optimizer: Any = keras.optimizers.SGD(1.0, **options)
    model.compile(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes), "mse")
    return model


def weight_after_pass(model: Any, gradient: float = 1.0) -> float:
    """Make a pass with this gradient, and return the weight."""
    apply_gradients(model.optimizer, [(tensor([[gradient]]), model.trainable_variables[0])])
    return float(model.get_weights()[0][0, 0])


def test_a_restored_rank_begins_the_passes_of_a_step_anew() -> None:
    def main(rank: int) -> list[float]:
        model = line(passes=2)
        state = hvd.elastic.KerasState(model)
        first = weight_after_pass(model)
        state.restore()
        return [first, *(weight_after_pass(model) for _ in range(3))]

    assert run_ranks(2, main) == [[0.0, 0.0, -2.0, -2.0]] * 2


def test_all_ranks_of_a_new_world_begin_the_passes_of_a_step_anew() -> None:
    """A newcomer has none of the passes that the others have made in the old world."""
    job = ElasticJob(2)

    def main(worker: Worker) -> float:
        model = line(passes=4)

        @hvd.elastic.run
        def train(state: Any) -> None:
            while state.step < 14:
                if state.step == 5 and hvd.size() == 2:
                    if hvd.rank() == 0:
                        job.add(main)
                    hvd.allreduce(0.0, name="all have made five passes")
                weight_after_pass(model, state.step)
                state.step += 1
                state.commit()  # The world ends in that of the sixth pass.

        train(hvd.elastic.KerasState(model, step=0))
        return float(model.get_weights()[0][0, 0])

    assert job.run(main) == [float(-sum(range(4)) - sum(range(6, 14)))] * 3


@pytest.mark.skipif(LEGACY, reason="Keras 2 does not accumulate gradients")
def test_gradients_that_keras_adds_up_are_restored_with_their_count() -> None:
    def main(rank: int) -> list[float]:
        model = line(gradient_accumulation_steps=2)
        state = hvd.elastic.KerasState(model)
        weight_after_pass(model)
        state.save()
        before = weight_after_pass(model)
        state.restore()
        return [before, weight_after_pass(model), weight_after_pass(model)]

    assert run_ranks(2, main) == [[-1.0, -1.0, -1.0]] * 2
