"""A sharded Keras optimizer makes the steps of one that is not, with a part of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import (
    WIDTH,
    adam,
    assert_close,
    assert_same,
    fit,
    make_model,
    numpy_of,
    sgd,
    train,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(LEGACY, reason="shards are for Keras 3")


has_multi_optimizer = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="not in Keras 3.12"
)


def sharded(make: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(make(), shard_state=True, **options)


@pytest.mark.parametrize(
    ("run", "make", "size"), [(fit, adam, 2), (train, sgd, 3), (train, adam, 1)]
)
def test_the_weights_are_those_without_shards_bit_by_bit(run: Any, make: Any, size: int) -> None:
    plain = run_ranks(
        size, lambda rank: run(make_model(), hvd.DistributedOptimizer(make()), rank, size)
    )
    found = run_ranks(size, lambda rank: run(make_model(), sharded(make), rank, size))
    assert_same([*plain, *found])


@has_multi_optimizer
def test_each_optimizer_inside_of_one_for_many_may_have_shards() -> None:
    def run(rank: int, **options: Any) -> Any:
        inside = [hvd.DistributedOptimizer(make(), **options) for make in (adam, adam, sgd)]
        of_shape = {(WIDTH, 5): inside[1], (5,): inside[2]}
        choose = lambda variable: of_shape.get(tuple(variable.shape), inside[0])  # noqa: E731
        return train(make_model(), keras.optimizers.MultiOptimizer(choose), rank, 2, steps=2)

    plain = run_ranks(2, run)
    assert_same([*plain, *run_ranks(2, lambda rank: run(rank, shard_state=True))])


def test_passes_accumulate() -> None:
    def run(rank: int, **options: Any) -> Any:
        optimizer = hvd.DistributedOptimizer(adam(), backward_passes_per_step=2, **options)
        return train(make_model(), optimizer, rank, 2)

    plain = run_ranks(2, run)
    assert_same([*plain, *run_ranks(2, lambda rank: run(rank, shard_state=True))])


def test_each_rank_has_its_part_and_consolidate_gives_all() -> None:
    def main(rank: int) -> Any:
        model, optimizer = make_model(), sharded(adam)
        train(model, optimizer, rank, 2, steps=2)
        parts = [variable for variable in optimizer.variables if len(variable.shape) == 1]
        count = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
        assert [part.shape[0] for part in parts] == [-(-count // 2)] * 2
        plain = optimizer.consolidate()
        assert type(plain) is type(adam())
        again = sharded(adam)
        again.adopt(plain)
        assert_same([numpy_of(optimizer.variables), numpy_of(again.variables)])
        return numpy_of(plain.variables)

    def whole(rank: int) -> Any:
        model, optimizer = make_model(), hvd.DistributedOptimizer(adam())
        train(model, optimizer, rank, 2, steps=2)
        return numpy_of(optimizer.variables)

    assert_same([*run_ranks(2, main), *run_ranks(2, whole)])


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: keras.optimizers.Adam(clipnorm=1.0), {}, "clipnorm looks at whole variables"),
        (lambda: keras.optimizers.Adam(global_clipnorm=1.0), {}, "global_clipnorm looks"),
        (lambda: keras.optimizers.Adam(use_ema=True), {}, "use_ema keeps averages"),
        (keras.optimizers.Adafactor, {}, "Adafactor looks at whole variables"),
        (lambda: keras.optimizers.LossScaleOptimizer(adam()), {}, "a loss scaler decides"),
        pytest.param(
            lambda: keras.optimizers.MultiOptimizer(lambda variable: adam()),
            {},
            "each variable an optimizer of its own, and a shard is stepped over by one",
            marks=has_multi_optimizer,
        ),
        (adam, {"groups": 2}, "groups have no place"),
        (adam, {"segmentation": "mb:1"}, "a segmentation has no place"),
    ],
)
def test_what_is_refused(make: Any, options: dict[str, Any], words: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            sharded(make, **options)

    run_ranks(1, main)


def test_an_optimizer_that_looks_at_norms_is_found() -> None:
    class ByNorm(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            norm = keras.ops.norm(keras.ops.reshape(variable, (-1,)))
            super().update_step(gradient * norm, variable, learning_rate)

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match="a step over a flat variable gives other values"):
            sharded(lambda: ByNorm(0.1))

    run_ranks(1, main)


def test_a_state_that_begins_with_the_weights_is_found() -> None:
    class Lookahead(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
        """Has, beside a usual slot, what it goes back to later."""

        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self.slow = self.add_optimizer_variables(variables, "slow")
                for slow, variable in zip(self.slow, variables, strict=True):
                    slow.assign(0.5 * variable)

    def main(rank: int) -> None:
        makes = [lambda: Lookahead(0.1, momentum=0.9)]
        if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # Not in Keras 3.12.
            makes.append(keras.optimizers.ScheduleFreeAdamW)
        for make in makes:
            with pytest.raises(ValueError, match="begins with the weights, and a shard has none"):
                sharded(make)

    run_ranks(1, main)


def nadam() -> Any:
    return keras.optimizers.Nadam(0.01)


@pytest.mark.parametrize("plain", [adam, nadam])
def test_a_checkpoint_has_all_of_the_state_for_any_number_of_ranks(
    tmp_path: Path, plain: Any
) -> None:
    """The oracle is what an optimizer whose state is whole saves; names are the same as well."""
    pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

    def start(make: Any) -> dict[str, Any]:
        model = make_model()
        for number, variable in enumerate(model.trainable_variables):
            variable._path = f"layer/{number}"  # Keras counts the layers of a process.
        return {"model": model, "optimizer": make()}

    def write(rank: int, folder: str, make: Any) -> None:
        state = start(make)
        train(state["model"], state["optimizer"], rank, 3, steps=2)
        hvd.checkpoint.save(tmp_path / folder, {"optimizer": state["optimizer"]})

    def read(folder: str, make: Any) -> Any:
        state = start(make)
        state["optimizer"].build(state["model"].trainable_variables)
        hvd.checkpoint.load(tmp_path / folder, {"optimizer": state["optimizer"]})
        own = state["optimizer"]
        return numpy_of((own.consolidate() if hasattr(own, "consolidate") else own).variables)

    run_ranks(3, lambda rank: write(rank, "whole", lambda: hvd.DistributedOptimizer(plain())))
    run_ranks(3, lambda rank: write(rank, "divided", lambda: sharded(plain)))
    (expected,) = run_ranks(1, lambda rank: read("whole", plain))
    found = run_ranks(2, lambda rank: read("divided", lambda: sharded(plain)))
    assert_same([expected, *found, *run_ranks(1, lambda rank: read("divided", plain))])


def test_a_checkpoint_of_a_scaler_around_shards_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

    def main(rank: int) -> None:
        optimizer = keras.optimizers.LossScaleOptimizer(sharded(adam))
        optimizer.build(make_model().trainable_variables)
        with pytest.raises(ValueError, match="give its inner_optimizer"):
            hvd.checkpoint.save(tmp_path / "it", {"optimizer": optimizer})
        hvd.checkpoint.save(tmp_path / "it", {"optimizer": optimizer.inner_optimizer})

    run_ranks(2, main)


def test_state_that_is_no_slot_is_consolidated_and_adopted() -> None:
    """Nadam has a product of all steps. The oracle trains on without shards."""

    def whole(rank: int) -> Any:
        model, optimizer = make_model(), hvd.DistributedOptimizer(nadam())
        train(model, optimizer, rank, 2, steps=2)
        return train(model, optimizer, rank, 2, steps=2)

    def main(rank: int) -> Any:
        model, optimizer = make_model(), sharded(nadam)
        train(model, optimizer, rank, 2, steps=2)
        plain = optimizer.consolidate()
        products = [keras.ops.convert_to_numpy(each._u_product) for each in (plain, optimizer)]
        assert products[0] == products[1] != 1
        again = sharded(nadam)
        again.adopt(plain)
        return train(model, again, rank, 2, steps=2)

    assert_same([*run_ranks(2, whole), *run_ranks(2, main)])


@pytest.mark.parametrize(
    ("run", "built", "size"),
    [
        (fit, "before", 2),
        (train, "after", 2),
        (fit, "by the first step", 2),
        (fit, "after", 1),
        (train, "by the first step", 1),
    ],
)
def test_the_optimizer_of_a_model_that_was_loaded_is_adopted(
    tmp_path: Path, run: Any, built: str, size: int
) -> None:
    """The oracle is the process that has saved the model, and trains on."""
    saved = make_model()
    saved.compile(optimizer=adam(), loss="mse")
    train(saved, saved.optimizer)
    saved.save(tmp_path / "saved.keras")
    expected = train(saved, saved.optimizer, steps=6 if run is fit else 4)

    def main(rank: int) -> Any:
        loaded = keras.models.load_model(tmp_path / "saved.keras")
        weights = numpy_of(loaded.get_weights())
        model, optimizer = make_model(), sharded(adam)
        model.set_weights(weights)
        if built == "before":
            optimizer.build(model.trainable_variables)
        optimizer.adopt(loaded.optimizer)
        if built == "after":
            optimizer.build(model.trainable_variables)
        options = {"built": built != "by the first step"} if run is fit else {}
        found = run(model, optimizer, rank, size, **options)
        assert_same([weights, numpy_of(loaded.get_weights())])  # which is not trained
        return found

    everywhere = run_ranks(size, main)
    assert_same(everywhere)
    assert_close(everywhere[0], expected)


def test_state_of_another_model_is_refused() -> None:
    def of(units: int) -> Any:
        layers = [keras.layers.Dense(3, name="same"), keras.layers.Dense(units, name="last")]
        return keras.Sequential([keras.Input((2,)), *layers])

    def main(rank: int) -> None:
        model, optimizer = of(4), sharded(adam)
        plain = adam()
        plain.build(of(5).trainable_variables)
        words = r"state of \S*last/kernel, float32\(3, 5\), in .* \S*last/kernel, float32\(3, 4\)"
        optimizer.build(model.trainable_variables)
        with pytest.raises(ValueError, match=words):
            optimizer.adopt(plain)
        later = sharded(adam)
        later.adopt(plain)
        with pytest.raises(ValueError, match=words):
            later.build(model.trainable_variables)
        with pytest.raises(ValueError, match=r"does not know is \S*same/kernel"):
            optimizer.build(of(4).trainable_variables)

    run_ranks(2, main)


def test_state_of_another_form_is_refused_where_it_would_be_lost() -> None:
    class Counting(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.counts = keras.Variable(np.zeros(3), trainable=False, name="counts")

    def main(rank: int) -> None:
        optimizer = sharded(lambda: Counting(0.1))
        optimizer.build(make_model().trainable_variables)
        with pytest.raises(ValueError, match=r"Counting has 'counts'.*\(3,\).*shard_state"):
            optimizer.consolidate()
        plain = Counting(0.1)
        plain.build(make_model().trainable_variables)
        with pytest.raises(ValueError, match="Counting has 'counts'"):
            sharded(lambda: Counting(0.1)).adopt(plain)

    run_ranks(2, main)


def test_a_broadcast_leaves_each_rank_its_part() -> None:
    """The parts have the same shape, so nothing else would tell."""

    def main(rank: int) -> Any:
        model, optimizer = make_model(), sharded(adam)
        train(model, optimizer, rank, 2)
        model.compile(optimizer=optimizer, loss="mse")
        parts = numpy_of(optimizer.variables)
        model.trainable_variables[0].assign_add(model.trainable_variables[0] * 0 + rank)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_train_batch_begin(0)
        callback.on_train_batch_end(0)
        assert_same([parts, numpy_of(optimizer.variables)])
        return numpy_of(model.trainable_variables)

    assert_same(run_ranks(2, main))


def test_an_elastic_state_refuses_what_would_be_lost_with_a_rank() -> None:
    def main(_rank: int) -> None:
        model = make_model()
        model.compile(optimizer=sharded(adam), loss="mse")
        with pytest.raises(ValueError, match="each rank has a part of the optimizer's state"):
            hvd.elastic.KerasState(model)

    run_ranks(2, main)
