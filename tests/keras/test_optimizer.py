"""`DistributedOptimizer` of Keras, its ranks as threads; in all environments that Keras has."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
import hvdlite.numpy as hvd_numpy
from hvdlite.common.api import prepared_bucket
from hvdlite.common.gradients.buckets import ReductionConfig, Scaling
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import (
    EAGERLY,
    INPUTS,
    TARGETS,
    Make,
    adam,
    assert_close,
    assert_same,
    batches,
    batches_of,
    fit_alone,
    fit_together,
    gradients_of,
    make_model,
    numpy_of,
    sgd,
    tensor,
    train,
    train_together,
    variable,
    wrapped,
)
from tests.ranks import run_ranks
from tests.short_calls import begin, interrupted_after, until

BACKEND = keras.backend.backend()
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="a matter of TensorFlow")
OPTIMIZERS: list[Any] = [sgd, adam]
if LEGACY:
    OPTIMIZERS += [
        lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.legacy.Adam(0.01),
    ]


def apply(optimizer: Any, *pairs: tuple[Any, Any]) -> None:
    """Apply gradients, given as numbers, to variables."""
    optimizer.apply_gradients([(tensor(gradient), target) for gradient, target in pairs])


def passes_of(optimizer: Any) -> int:
    (passes,) = numpy_of([optimizer.iterations])
    return int(passes)


@pytest.mark.skipif(BACKEND != "torch", reason="a matter of PyTorch")
def test_ctrl_c_at_any_point_of_a_small_step() -> None:
    """The other rank has its gradients, and this one goes on with the same names."""
    from hvdlite.keras import on_torch

    def main(rank: int) -> None:
        modules, engine = [prepared_bucket, prepared_bucket, on_torch], current().engine
        begin()
        for points in range(1000):
            reducer = on_torch.Reducer("R", ReductionConfig(
                hvd.Compression.none, Scaling(), False, hvd.global_process_set
            ))  # fmt: skip
            own = [np.full(3, 10.0 * rank + points), np.full((2, 2), 4.0 * rank)]
            run = partial(reducer.reduce, [*map(tensor, own)], [variable(each) for each in own])
            go_on = np.zeros(1)
            if rank:
                first, second = numpy_of(run())
                np.testing.assert_array_equal(first, np.full(3, 5.0 + points))
                np.testing.assert_array_equal(second, np.full((2, 2), 2.0))
            else:
                go_on += interrupted_after(engine, "add_pending", points, modules, run)
                until(lambda: not engine._pending._entries)
            if not hvd_numpy.allreduce(go_on, name="go on", op=hvd.Sum)[0]:
                break
        assert 5 < points < 200

    run_ranks(2, main)


# -- training gives what one process with the whole batch gives


@pytest.mark.parametrize(("make", "size"), list(zip(OPTIMIZERS, [2, 3, 3, 2], strict=False)))
def test_fit(make: Make, size: int) -> None:
    assert_close(fit_together(size, wrapped(make), built=False), fit_alone(make))


@pytest.mark.parametrize(
    "compiled",
    [
        {"run_eagerly": True},
        pytest.param(
            {"steps_per_execution": 3},
            marks=pytest.mark.skipif(BACKEND == "torch", reason="PyTorch has one step at a time"),
        ),
        pytest.param(
            {"jit_compile": False},
            marks=pytest.mark.skipif(BACKEND != "jax", reason="elsewhere it is so in all tests"),
        ),
    ],
)
def test_fit_as_compiled(compiled: dict[str, Any]) -> None:
    assert_close(fit_together(2, wrapped(sgd), **compiled), fit_alone(sgd))


@pytest.mark.parametrize(("make", "size"), list(zip(OPTIMIZERS, [3, 2, 2, 3], strict=False)))
def test_own_loop(make: Make, size: int) -> None:
    assert_close(train_together(size, wrapped(make)), train(make_model(), make()))


@tensorflow_only
def test_own_loop_in_a_function() -> None:
    import tensorflow as tf

    def train(rank: int) -> list[np.ndarray]:
        model, optimizer = make_model(), wrapped(sgd)()
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(inputs: Any, targets: Any) -> None:
            gradients = gradients_of(model, inputs, targets)
            pairs = zip(gradients, model.trainable_variables)  # noqa: B905 (AutoGraph knows none)
            optimizer.apply_gradients(pairs)

        step(INPUTS[rank::2], TARGETS[rank::2])
        step(INPUTS[rank::2], TARGETS[rank::2])
        return numpy_of(model.get_weights())

    everywhere = run_ranks(2, train)
    assert_same(everywhere)
    alone, optimizer = make_model(), sgd()
    for _ in range(2):
        gradients = gradients_of(alone, INPUTS, TARGETS)
        optimizer.apply_gradients(zip(gradients, alone.trainable_variables, strict=True))
    assert_close(everywhere[0], numpy_of(alone.get_weights()))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="newer than this Keras")
def test_several_optimizers_in_one() -> None:
    def make() -> Any:
        chosen = keras.optimizers.OptimizerMap(sgd(), {".*kernel": adam()})
        return keras.optimizers.MultiOptimizer(chosen)

    assert_close(train_together(2, wrapped(make)), train(make_model(), make()))


class Adversaries(keras.Model):  # type: ignore[misc]
    """Two models with an optimizer each, trained in one step."""

    def __init__(self) -> None:
        super().__init__()
        wrap = hvd.DistributedOptimizer
        self.first, self.second = make_model(), make_model()
        self.optimizers = [wrap(sgd()), wrap(adam())]
        for model, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            optimizer.build(model.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        for model, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            gradients = gradients_of(model, inputs, targets)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": tensor(0)}


@tensorflow_only
def test_several_optimizers_in_a_train_step() -> None:
    def train_both(rank: int) -> list[np.ndarray]:
        model = Adversaries()
        model.compile()
        model.fit(**batches_of(rank, 2), epochs=2, verbose=0)
        return numpy_of([*model.first.get_weights(), *model.second.get_weights()])

    everywhere = run_ranks(2, train_both)
    assert_same(everywhere)
    assert_close(everywhere[0], [*fit_alone(sgd), *fit_alone(adam)])


def test_an_embedding() -> None:
    def embedding() -> Any:
        model = keras.Sequential(
            [keras.layers.Input((1,)), keras.layers.Embedding(9, 2), keras.layers.Flatten()]
        )
        model.set_weights([np.arange(18, dtype=np.float32).reshape(9, 2) / 10])
        return model

    def train(rank: int, size: int, optimizer: Any, eagerly: bool) -> list[np.ndarray]:
        model = embedding()
        loss = keras.losses.MeanSquaredError()
        model.compile(optimizer=optimizer, loss=loss, run_eagerly=eagerly)
        words = np.array([[0], [1], [1], [2], [5], [1], [0], [7]])[rank::size]
        model.fit(words, np.ones((8 // size, 2)), batch_size=8 // size, epochs=2, verbose=0)
        return numpy_of(model.get_weights())

    # Keras 3 adds up squares of rows that come several times, and not if they come as one.
    eagerly = EAGERLY["run_eagerly"]
    for make, eager, options in (
        (adam, eagerly, {}), (sgd, False, {}), (sgd, eagerly, {"sparse_as_dense": True})
    ):  # fmt: skip
        optimizer = wrapped(make, **options)
        everywhere = run_ranks(
            2, lambda rank, make=optimizer, eager=eager: train(rank, 2, make(), eager)
        )
        assert_same(everywhere)
        assert_close(everywhere[0], train(0, 1, make(), eagerly))


# -- arguments


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1.5),
        ({"op": hvd.Average}, 1.5),
        ({"op": hvd.Sum}, 3.0),
        ({"gradient_predivide_factor": 4.0}, 1.5),
        ({"compression": "fp16"}, 1.5),
        ({"compression": "bf16"}, 1.5),
        ({"name": "mine"}, 1.5),
    ],
)
def test_options(options: dict[str, Any], expected: float) -> None:
    if "compression" in options:
        options = {"compression": getattr(hvd.Compression, options["compression"])}

    def step(rank: int) -> np.ndarray:
        weights = variable([0, 0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        apply(optimizer, ([rank + 1, 2 * rank + 2], weights))
        return weights.numpy()

    for result in run_ranks(2, step):
        np.testing.assert_array_equal(result, [-expected, -2 * expected])


def test_groups() -> None:
    for groups in (1, 2, 5, "lists"):

        def step(rank: int, groups: Any = groups) -> list[np.ndarray]:
            several = [variable([0], f"weights_{index}") for index in range(3)]
            lists = [[several[2], several[0]]] if groups == "lists" else groups
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=lists)
            apply(optimizer, *(([rank + index], each) for index, each in enumerate(several)))
            return [each.numpy() for each in several]

        for result in run_ranks(2, step):
            np.testing.assert_array_equal(result, [[-0.5], [-1.5], [-2.5]])


def test_num_groups_is_deprecated() -> None:
    def step(rank: int) -> np.ndarray:
        weights = variable([0])
        with pytest.warns(DeprecationWarning, match="num_groups"):
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), num_groups=1)
        apply(optimizer, ([rank], weights))
        return weights.numpy()

    assert run_ranks(1, step)[0] == 0


def test_a_process_set() -> None:
    def step(rank: int) -> np.ndarray:
        pair = hvd.add_process_set([0, 2])
        weights = variable([0])
        apply(
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair), ([rank], weights)
        )
        return weights.numpy()

    assert [float(each[0]) for each in run_ranks(3, step)] == [-1, -1, -1]


@pytest.mark.parametrize(("average", "factor"), [(True, 1), (False, 2)])
def test_backward_passes_per_step(average: bool, factor: int) -> None:
    def train(rank: int) -> list[list[float]]:
        weights = variable([0, 10])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        course = []
        for number in range(4):
            apply(optimizer, ([rank + number, 1], weights))
            course.append([*weights.numpy(), passes_of(optimizer)])
        return course

    for course in run_ranks(2, train):
        assert course == [
            [0, 10, 1],
            [-1 * factor, 10 - factor, 2],
            [-1 * factor, 10 - factor, 3],
            [-4 * factor, 10 - 2 * factor, 4],
        ]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("course", [[None, 1.0], [1.0, None]])
@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=tensorflow_only)])
def test_passes_in_which_a_variable_has_no_gradient(
    course: list[float | None], traced: bool
) -> None:
    """They count as zeros; a variable without a gradient in all passes of a step is left alone."""

    def train(rank: int) -> list[float]:
        some, always = variable([0]), variable([0])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0, momentum=0.5), backward_passes_per_step=2
        )
        if hasattr(optimizer, "build"):
            optimizer.build([some, always])

        def step(has_one: bool) -> None:
            gradient = tensor([rank]) if has_one else None
            optimizer.apply_gradients([(gradient, some), (tensor([1]), always)])

        if traced:
            import tensorflow as tf

            step = tf.function(step)
        found = []
        for number in range(6):
            step(course[number % 2] is not None)
            found.append(float(some.numpy()[0]))
        if BACKEND == "tensorflow" and not traced:  # Elsewhere a gradient that is not there is 0.
            for _ in range(2):
                step(False)
            assert float(some.numpy()[0]) == found[-1]
        return found

    assert run_ranks(2, train) == [[0, -0.5, -0.5, -1.25, -1.25, -2.125]] * 2


def test_passes_over_some_of_the_variables() -> None:
    """No sum of a step before is left in those that the first pass is not about."""

    def train(rank: int) -> list[float]:
        first, second = variable([0], "first"), variable([0], "second")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        if hasattr(optimizer, "build"):
            optimizer.build([first, second])
        apply(optimizer, ([8], first), ([8], second))
        apply(optimizer, ([8], first), ([8], second))
        apply(optimizer, ([1], first))
        apply(optimizer, ([1], first), ([1], second))
        return [float(each[0]) for each in numpy_of([first, second])]

    assert run_ranks(2, train) == [[-18, -17]] * 2


@pytest.mark.parametrize(("eager", "make"), [(False, adam), (True, sgd)])
def test_backward_passes_per_step_of_fit(eager: bool, make: Make) -> None:
    """Two passes of half a batch, averaged, are one pass of a batch."""

    def train(rank: int) -> list[np.ndarray]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            make(), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), run_eagerly=eager)
        model.fit(**batches(INPUTS[rank::2], TARGETS[rank::2], 9), verbose=0)
        assert passes_of(optimizer) == 2
        return numpy_of(model.get_weights())

    everywhere = run_ranks(2, train)
    assert_same(everywhere)
    alone, optimizer = make_model(), make()
    optimizer.build(alone.trainable_variables)
    optimizer.iterations.assign(1)  # the passes count in Adam's correction of its bias
    gradients = gradients_of(alone, INPUTS, TARGETS)
    optimizer.apply_gradients(zip(gradients, alone.trainable_variables, strict=True))
    assert_close(everywhere[0], numpy_of(alone.get_weights()))


@pytest.mark.parametrize(("scale", "expected"), [(True, [-0.5, -1.0]), (False, [-1.0, -2.0])])
def test_local_variables(scale: bool, expected: list[float]) -> None:
    def step(rank: int) -> tuple[float, float]:
        shared, own = variable([0], "shared"), variable([0], "own")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(own)
        apply(optimizer, ([rank + 1], shared), ([rank + 1], own))
        return float(shared.numpy()[0]), float(own.numpy()[0])

    assert run_ranks(2, step) == [(-1.5, each) for each in expected]


def test_local_layers() -> None:
    def of_rank(rank: int) -> list[np.ndarray]:
        model = make_model()
        optimizer = hvd.PartialDistributedOptimizer(sgd(), local_layers=model.layers[-1])
        return train(model, optimizer, rank, 2)

    first, second = run_ranks(2, of_rank)
    assert_same([first[:2], second[:2]])
    assert all((mine != other).any() for mine, other in zip(first[2:], second[2:], strict=True))


has_overwritten_variables = pytest.mark.skipif(
    not hasattr(getattr(keras, "Variable", None), "overwrite_with_gradient"),
    reason="newer than this Keras",
)


@has_overwritten_variables
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(("local", "expected"), [(False, [6, 6]), (True, [5, 6])])
def test_variables_that_are_overwritten_get_the_largest_gradient_of_all_passes(
    average: bool, local: bool, expected: list[float]
) -> None:
    """That of this rank, neither scaled, where they are local."""

    def step(rank: int) -> float:
        scale, weights = variable([1], "scale"), variable([0])
        scale.overwrite_with_gradient = True
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            backward_passes_per_step=3,
            average_aggregated_gradients=average,
        )
        optimizer.build([scale, weights])
        if local:
            optimizer.register_local_var(scale)
        for gradient in (3, 5, 4):
            apply(optimizer, ([gradient + rank], scale), ([1], weights))
        assert float(weights.numpy()[0]) == (-1 if average else -3)
        return float(scale.numpy()[0])

    assert run_ranks(2, step) == expected


@has_overwritten_variables
@pytest.mark.parametrize("segmentation", ["threshold", "size"])
def test_variables_that_are_overwritten_get_the_largest_gradient(segmentation: str) -> None:
    """Scales of 8-bit floats: half of what the largest magnitude needs would overflow."""

    def step(rank: int) -> list[float]:
        scale, weights = variable([1], "scale"), variable([0])
        scale.overwrite_with_gradient = True
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        apply(optimizer, ([rank + 1], scale), ([rank + 1], weights))
        return [float(each[0]) for each in numpy_of([scale, weights])]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # segments are for the others, without a word
        assert run_ranks(2, step, config=Config(segmentation=segmentation)) == [[2, -1.5]] * 2


# -- the object that is returned


def test_it_is_the_optimizer_with_its_state() -> None:
    def step(rank: int) -> None:
        weights, inner = variable([0]), keras.optimizers.SGD(1.0, momentum=0.5)
        apply(inner, ([2], weights))
        optimizer = hvd.DistributedOptimizer(inner)
        assert optimizer is inner and isinstance(optimizer, keras.optimizers.SGD)
        assert type(optimizer).__name__ == "SGD"
        apply(optimizer, ([rank], weights))  # with the velocity of the first step
        np.testing.assert_array_equal(weights.numpy(), [-2 - 1 - 0.5])
        assert passes_of(optimizer) == 2
        assert len(optimizer.variables()) == len(optimizer.variables) >= 2

    run_ranks(2, step)


def test_allreduce() -> None:
    def reduce(rank: int) -> np.ndarray:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        weights = variable([5])
        (reduced,) = optimizer._allreduce([tensor([rank])], [weights])
        assert weights.numpy() == 5
        return numpy_of([reduced])[0]

    np.testing.assert_array_equal(run_ranks(2, reduce), [[0.5], [0.5]])


def test_a_failed_reduction_does_not_change_weights() -> None:
    def step(rank: int) -> None:
        weights = variable([0] * (rank + 1))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        with pytest.raises(hvd.HorovodInternalError, match="weights"):
            apply(optimizer, ([1] * (rank + 1), weights))
        np.testing.assert_array_equal(weights.numpy(), [0] * (rank + 1))

    run_ranks(2, step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Adasum}, "Average or Sum"),
        ({"op": hvd.Max}, "Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "predivide"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"groups": "two"}, "groups"),
        ({"groups": [[1]]}, "groups"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], message: str) -> None:
    def wrap(rank: int) -> None:
        optimizer = sgd()
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(optimizer, **options)
        assert type(optimizer) is type(sgd())

    run_ranks(1, wrap)


def test_other_misuse() -> None:
    def wrap(rank: int) -> None:
        with pytest.raises(ValueError, match="wrap it once"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))
        with pytest.raises(ValueError, match="not 'adam'"):
            hvd.DistributedOptimizer("adam")
        with pytest.raises(ValueError, match="Keras layers"):
            hvd.PartialDistributedOptimizer(sgd(), local_layers=["dense"])
        clipped = keras.optimizers.SGD(0.1, global_clipnorm=1.0)
        with pytest.raises(ValueError, match="global_clipnorm"):
            hvd.PartialDistributedOptimizer(clipped, local_layers=keras.layers.Dense(1))
        if not LEGACY:
            accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            with pytest.raises(ValueError, match="gradient_accumulation_steps"):
                hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2)

    run_ranks(1, wrap)


def test_before_init() -> None:
    words = r"has not been initialized; use hvd.init\(\)"
    with pytest.raises(ValueError, match=words):
        hvd.DistributedOptimizer(sgd())
    with pytest.raises(ValueError, match=words):
        hvd.rank()
    with pytest.raises(hvd.HorovodInternalError, match=words):
        hvd.allreduce(1.0)


@tensorflow_only
def test_xla_is_left_out_and_said_once() -> None:
    from hvdlite.keras import keras_patches as interventions

    interventions._warn_of_xla.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = fit_together(2, wrapped(sgd), jit_compile=True)
    assert_close(weights, fit_alone(sgd))
    assert len([each for each in caught if "XLA" in str(each.message)]) == 1
