"""Slices of the batches of a dataset: the part of each input that this rank takes."""

from __future__ import annotations

import builtins
from typing import Any

import tensorflow as tf

from hvdlite.data.slicing import IMAGE_DIMS, Slicer
from hvdlite.data.strategies import DATA_PARALLEL, Cuts, Part


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
        structure = element if len(element) > 1 else element[0]
        inputs = tf.nest.flatten(structure)
        cut = [
            _part(number, *each) for number, each in enumerate(zip(inputs, planned, strict=True))
        ]
        return tf.nest.pack_sequence_as(structure, cut)

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


__all__ = ["slice"]
