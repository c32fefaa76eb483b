"""Datasets of `tf.data` for the ranks of a job: divided, cut, or made by other processes.

dataset = hvdlite.tf.data.shard(dataset, "drop").shuffle(10_000).batch(32)
dataset = hvdlite.tf.data.slice(dataset.batch(8), ((1, 4, 1, 1), (1,)))  # a part of each image

`hvdlite.tf.data.compute_service` is imported by those who use it.
"""

from __future__ import annotations

import builtins
from typing import Any, Literal

import tensorflow as tf

from hvdlite.common.runtime import basics
from hvdlite.data.slicing import IMAGE_DIMS, Slicer
from hvdlite.data.strategies import DATA_PARALLEL, Cuts, Part

Remainder = Literal["drop", "pad"]


def shard(
    dataset: tf.data.Dataset,
    remainder: Remainder,
    *,
    rank: int | None = None,
    size: int | None = None,
) -> tf.data.Dataset:
    """Every `size`-th element of `dataset`, beginning with element `rank`; as many for each rank.

    `remainder` says what happens to the elements at the end that do not suffice for all ranks:

    * ``"drop"``: no rank gets them. An infinite dataset has none.
    * ``"pad"``: the ranks get one each, and those that are left without get one of them again. A
      mean over all ranks counts such an element more than once.

    Where ranks may take a different number of steps, ``dataset.shard(size, rank)`` loses and
    repeats nothing; `join` follows the last step.

    `rank` and `size` are given both or not at all: those of the job, or those of a process set.
    All ranks must give the same elements in the same order: `shuffle` behind, or with the same seed
    on all ranks. An element is what the dataset yields, of any structure and shape: `batch` behind,
    and all ranks have batches of the same sizes. Of a dataset of batches, ranks get whole batches,
    and one of them may have the last and smaller one.

    The dataset is read once, in order, with at most `size` elements in memory. Its number of
    elements may be unknown (`from_generator`, `filter`); where it is known, that of the result is
    known, too, and Keras shows the number of steps.

    Raises `ValueError` where an infinite dataset is to be padded, where dropping would leave no
    element at all (if the number is known), for wrong arguments, and before `init` unless `rank`
    and `size` are given.
    """
    rank, size = _place(rank, size)
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"only a tf.data.Dataset can be sharded, not {type(dataset).__name__}")
    known = tf.get_static_value(dataset.cardinality())  # None: unknown, as it is in a graph.
    count = int(tf.data.UNKNOWN_CARDINALITY if known is None else known)
    _check(count, remainder, size)
    if size == 1:
        return dataset
    if count == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(size, rank)
    if count == tf.data.UNKNOWN_CARDINALITY:
        return _one_of_each_group(dataset, remainder, rank, size)
    groups, left = divmod(count, size)
    if remainder == "drop":
        return dataset.shard(size, rank).take(groups)
    if left == 0:
        return dataset.shard(size, rank)
    padded = _one_of_each_group(dataset, remainder, rank, size)
    return padded.apply(tf.data.experimental.assert_cardinality(groups + 1))


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None and size is None:
        return basics.rank(), basics.size()
    if rank is None or size is None:
        raise ValueError(f"rank={rank} and size={size}: give both, or neither")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is not one of size={size} ranks, which count from 0")
    return rank, size


def _check(count: int, remainder: str, size: int) -> None:
    if remainder not in ("drop", "pad"):
        raise ValueError(f"remainder={remainder!r} must be 'drop' or 'pad'")
    if remainder == "pad" and count == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "an infinite dataset has no end that could be padded: "
            "shard it before repeat(), or say remainder='drop'"
        )
    if remainder == "drop" and 0 < count < size:
        raise ValueError(
            f"remainder='drop' would drop the whole dataset: it has {count} elements for {size} "
            "ranks. Say remainder='pad', or shard it before batch()"
        )


def _one_of_each_group(
    dataset: tf.data.Dataset, remainder: str, rank: int, size: int
) -> tf.data.Dataset:
    """Of every `size` elements that of this rank; of fewer at the end what `remainder` says."""

    def own(_: tf.Tensor, parts: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(parts).repeat().skip(rank).take(1)

    spec = dataset.element_spec
    none = tf.type_spec_from_value(None)
    is_none = [part == none for part in tf.nest.flatten(spec)]
    if any(is_none):
        dataset = dataset.map(_without_none)
    # Numbered, so that elements of every structure come as the second one of two.
    groups = dataset.enumerate().window(size, drop_remainder=remainder == "drop")
    result = groups.flat_map(own)

    def with_none(*flat: Any) -> Any:
        parts = iter(flat)
        return tf.nest.pack_sequence_as(spec, [None if gone else next(parts) for gone in is_none])

    return result.map(with_none) if any(is_none) else result


def _without_none(*element: Any) -> tuple[Any, ...]:
    """Flat, and without the parts that are None in all elements: `window` miscounts them."""
    return tuple(part for part in tf.nest.flatten(element) if part is not None)


def slice(
    dataset: tf.data.Dataset,
    strategy: str | Cuts = DATA_PARALLEL,
    mesh: Any = None,
    *,
    patches: tuple[int, int] | None = None,
    patch_dims: tuple[int, int] = IMAGE_DIMS,
) -> tf.data.Dataset:
    """Return the dataset with this rank's part of each batch.

    The arguments are those of `hvdlite.data.slice_batch`.

    `dataset` yields tensors in any structure, alike on all ranks: `shuffle` with the same seed. The
    rank is that of this call: in an elastic job, call it again after a reset.

    Raises what `slice_batch` raises, at the call, by the shapes that the dataset declares, and
    `TypeError` for elements that are no dense tensors. A size that is declared nowhere is checked
    with each batch: `tf.errors.InvalidArgumentError` then.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"only a tf.data.Dataset can be cut, not {type(dataset).__name__}")
    slicer = Slicer.of(strategy, mesh, patches, patch_dims)
    specs = tf.nest.flatten(dataset.element_spec)
    for spec in specs:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise TypeError(
                f"{spec} cannot be cut: a batch is made of dense tensors whose number of "
                "dimensions is known. Convert it, or declare its shape by tf.ensure_shape"
            )
    planned = slicer.plan([tuple(spec.shape.as_list()) for spec in specs])
    if not any(planned):
        return dataset

    def own(*element: Any) -> Any:
        inputs = tf.nest.flatten(element)
        cut = [
            _part(number, *each) for number, each in enumerate(zip(inputs, planned, strict=True))
        ]
        # An element that is a tuple comes as several arguments, or as one.
        return tf.nest.pack_sequence_as(dataset.element_spec, cut)

    return dataset.map(own)


def _part(number: int, tensor: tf.Tensor, cut: tuple[Part, ...]) -> tf.Tensor:
    for part in cut:
        size = tensor.shape[part.dim]
        checks = []
        if size is None:
            size = tf.shape(tensor)[part.dim]
            text = (
                f"input {number} cannot be cut into {part.parts} equal parts along dimension "
                f"{part.dim}, whose size is not divisible. Drop the last batch where it is smaller"
            )
            checks = [tf.debugging.assert_equal(size % part.parts, 0, text)]
        with tf.control_dependencies(checks):
            begin, end = part.bounds(size)
            index = (*[builtins.slice(None)] * part.dim, builtins.slice(begin, end))
            tensor = tensor[index]
    return tensor


__all__ = ["Remainder", "shard", "slice"]
