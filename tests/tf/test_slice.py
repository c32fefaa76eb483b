"""Slices of datasets: each rank has its part of every batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf.data
from hvdlite.data import slice_batch
from tests.ranks import run_ranks


class Pair(NamedTuple):
    images: Any
    labels: Any


IMAGES = np.arange(4 * 6 * 8 * 2.0).reshape(4, 6, 8, 2)
LABELS = np.arange(4)


def dataset(**batch: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(2, **batch)


@pytest.mark.parametrize("remainder", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": ((1, 1, 2, 1), (1,))},
        {"strategy": ((1, 1, 2, 1), (2,))},
        {"strategy": "full_batch"},
        {"patches": (2, 1), "patch_dims": (1, 2)},
    ],
    ids=str,
)
def test_parts_are_those_of_slice_batch(options: dict[str, Any], remainder: bool) -> None:
    def main(rank: int) -> None:
        cut = hvdlite.tf.data.slice(dataset(drop_remainder=remainder), **options)
        for number, (images, labels) in enumerate(cut):
            rows = slice(2 * number, 2 * number + 2)
            wanted = slice_batch((IMAGES[rows], LABELS[rows]), **options)
            np.testing.assert_array_equal(images, wanted[0])
            np.testing.assert_array_equal(labels, wanted[1])
        assert number == 1
        eager = slice_batch((tf.constant(IMAGES), tf.constant(LABELS)), **options)
        np.testing.assert_array_equal(eager[0], slice_batch((IMAGES, LABELS), **options)[0])

    run_ranks(2, main)


def test_structures_and_elements_of_one_tensor() -> None:
    def main(rank: int) -> None:
        named = hvdlite.tf.data.slice(dataset().map(lambda x, y: {"x": x, "y": y}))
        assert [sorted(each) for each in named] == [["x", "y"]] * 2
        single = hvdlite.tf.data.slice(dataset().map(lambda x, y: y))
        assert [each.numpy().tolist() for each in single] == [[rank], [2 + rank]]
        for make in (lambda x, y: (y,), lambda x, y: (Pair(x, y),), Pair):
            whole = dataset().map(make)
            cut = hvdlite.tf.data.slice(whole)
            tf.nest.assert_same_structure(cut.element_spec, whole.element_spec)
            images_and_labels = tf.nest.flatten(next(iter(cut)))
            assert images_and_labels[-1].numpy().tolist() == [rank]

    run_ranks(2, main)


def test_what_does_not_fit() -> None:
    def main(rank: int) -> None:
        cut = hvdlite.tf.data.slice
        with pytest.raises(ValueError, match=r"input 0 of shape \(\?, 6, 8, 2\) .* 4 equal parts"):
            cut(dataset(), ((1, 4, 1, 1), (1,)))
        with pytest.raises(ValueError, match="data_paralel"):
            cut(dataset(), "data_paralel")
        with pytest.raises(TypeError, match="not list"):
            cut([1])
        sparse = dataset().map(lambda x, y: tf.sparse.from_dense(y))
        with pytest.raises(TypeError, match=r"SparseTensorSpec.* cannot be cut"):
            cut(sparse)
        uneven = tf.data.Dataset.range(5).batch(4)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"input 0 .* 4 equal parts"):
            list(cut(uneven))

    run_ranks(4, main)
