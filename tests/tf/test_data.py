"""Sharded datasets: all ranks take the same number of steps, and nothing is lost unsaid."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.tf.data import Remainder, shard
from tests.ranks import run_ranks

SIZES = [1, 2, 3]
COUNTS = {1: (0, 3), 2: (0, 1, 4, 5), 3: (0, 2, 3, 7, 8)}  # Of elements, by the number of ranks.
REMAINDERS: list[Remainder] = ["drop", "pad"]
Pair = namedtuple("Pair", ["left", "right"])


def oracle(elements: list[Any], remainder: str, rank: int, size: int) -> list[Any]:
    """What a rank gets, said in Python."""
    groups = [elements[start : start + size] for start in range(0, len(elements), size)]
    if remainder == "drop":
        return [group[rank] for group in groups if len(group) == size]
    return [group[rank % len(group)] for group in groups]


def known(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(count)


def generated(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        lambda: iter(range(count)), output_signature=tf.TensorSpec([], tf.int64)
    )


def filtered(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(2 * count).filter(is_even).map(half)


def is_even(number: tf.Tensor) -> tf.Tensor:
    return number % 2 == 0


def half(number: tf.Tensor) -> tf.Tensor:
    return number // 2


def elements(dataset: tf.data.Dataset) -> list[Any]:
    return [each.tolist() for each in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("make", [known, filtered])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_each_rank_gets_its_elements(
    make: Callable[[int], tf.data.Dataset], size: int, remainder: Remainder
) -> None:
    for count in COUNTS[size]:
        if make is known and remainder == "drop" and 0 < count < size:
            continue  # refused
        for rank in range(size):
            own = shard(make(count), remainder, rank=rank, size=size)
            assert elements(own) == oracle(list(range(count)), remainder, rank, size)


@pytest.mark.parametrize("remainder", REMAINDERS)
def test_rank_and_size_of_the_job(remainder: Remainder) -> None:
    def main(rank: int) -> None:
        assert elements(shard(known(8), remainder)) == oracle([*range(8)], remainder, rank, 3)

    run_ranks(3, main)


def test_the_number_of_elements_stays_known() -> None:
    for count, remainder, expected in (
        (9, "drop", 3),
        (11, "drop", 3),
        (9, "pad", 3),
        (10, "pad", 4),
    ):
        for rank in range(3):
            own = shard(known(count), remainder, rank=rank, size=3)
            assert int(own.cardinality()) == expected == len(elements(own))


STRUCTURES: list[Callable[[tf.Tensor], Any]] = [
    lambda x: (x,),
    lambda x: (x, (x + 1, x + 2)),
    lambda x: {"b": x, "a": (x, tf.as_string(x))},
    lambda x: Pair(x, {"number": x}),
    lambda x: (x, None, {"c": None, "b": x}),
    tf.range,
    lambda x: tf.RaggedTensor.from_row_lengths(tf.range(x), [x, 0]),
    lambda x: (tf.sparse.from_dense([x, 0]), x),
]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_elements_of_any_structure_and_shape(structure: Callable[[tf.Tensor], Any]) -> None:
    dataset = generated(5).map(structure)
    own = shard(dataset, "pad", rank=1, size=2)
    assert own.element_spec == dataset.element_spec
    got = [plain(each) for each in own]
    assert got == oracle([plain(each) for each in dataset], "pad", 1, 2)


def plain(element: Any) -> Any:
    """An element as something that can be compared."""
    if isinstance(element, tf.SparseTensor):
        element = tf.sparse.to_dense(element)
    if isinstance(element, tf.RaggedTensor):
        return element.to_list()
    if isinstance(element, tf.Tensor):
        return np.asarray(element).tolist()
    if isinstance(element, dict):
        return {name: plain(part) for name, part in element.items()}
    return element if element is None else [type(element), *map(plain, element)]


@pytest.mark.parametrize("make", [known, generated])
def test_batches_behind_it_have_the_same_sizes_on_all_ranks(
    make: Callable[[int], tf.data.Dataset],
) -> None:
    for remainder in REMAINDERS:
        batches = [shard(make(17), remainder, rank=rank, size=2).batch(3) for rank in range(2)]
        sizes = [[len(batch) for batch in own.as_numpy_iterator()] for own in batches]
        assert sizes == ([[3, 3, 2]] * 2 if remainder == "drop" else [[3, 3, 3]] * 2)


def test_of_batches_whole_ones_are_given() -> None:
    batches = known(10).batch(3)
    own = [elements(shard(batches, "drop", rank=rank, size=2)) for rank in range(2)]
    assert own == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]]


def test_every_iteration_gives_the_same() -> None:
    own = shard(generated(7), "pad", rank=1, size=3)
    assert elements(own) == elements(own) == [1, 4, 6]
    assert elements(own.repeat(2)) == [1, 4, 6] * 2


def test_an_infinite_dataset_is_divided() -> None:
    own = [shard(known(4).repeat(), "drop", rank=rank, size=3).take(5) for rank in range(3)]
    numbers = np.tile(np.arange(4), 4)[:15].reshape(5, 3)
    assert [elements(each) for each in own] == numbers.T.tolist()


def test_in_a_function() -> None:
    @tf.function
    def total() -> tf.Tensor:
        sums = tf.zeros([], tf.int64)
        for number in shard(tf.data.Dataset.range(8), "pad", rank=2, size=3):
            sums += number
        return sums

    assert int(total()) == 2 + 5 + 6


@pytest.mark.parametrize("make", [known, generated])
def test_keras_takes_the_same_number_of_steps_on_all_ranks(
    make: Callable[[int], tf.data.Dataset],
) -> None:
    for rank in (0, 2):
        own = shard(make(25), "drop", rank=rank, size=3).map(features).batch(2)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
        steps = Steps()
        model.fit(own, epochs=2, verbose=0, shuffle=False, callbacks=[steps])
        assert steps.seen == [0, 1, 2, 3] * 2  # 8 of 25 elements for each, in batches of 2, twice


class Steps(tf.keras.callbacks.Callback):
    """The number of each batch within its epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)


def features(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    value = tf.cast(number, tf.float32)[tf.newaxis] / 25
    return value, value


def test_padding_without_an_end_is_refused_on_any_number_of_ranks() -> None:
    for size in SIZES:
        with pytest.raises(ValueError, match=r"infinite dataset has no end.*before repeat\(\)"):
            shard(known(4).repeat(), "pad", rank=0, size=size)


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"drop the whole dataset: it has 2 elements for 3 ranks"):
        shard(known(2), "drop", rank=0, size=3)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="remainder='keep' must be 'drop' or 'pad'"):
        shard(known(4), "keep", rank=0, size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank=1 and size=None: give both, or neither"):
        shard(known(4), "drop", rank=1)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank={rank} is not one of size={size} ranks"):
            shard(known(4), "drop", rank=rank, size=size)
    with pytest.raises(ValueError, match=r"only a tf\.data\.Dataset can be sharded, not list"):
        shard([1, 2], "drop", rank=0, size=2)


def test_the_job_must_be_initialized() -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        shard(known(4), "drop")
    hvd.init()
    try:
        assert elements(hvd.data.shard(known(4), "drop")) == [0, 1, 2, 3]
    finally:
        hvd.shutdown()
