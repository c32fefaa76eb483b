"""Reductions of tensors of which some are `tf.IndexedSlices`: those are gathered, not added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.differentiable import Verbs
from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.tensors.compression import Compressor
from hvdlite.tf.topology_ops import answer


def dense(value: Any, what: str = "this") -> tf.Tensor:
    """Convert the value to a tensor. Raises `ValueError` for ragged and sparse tensors."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"{what} is a {type(value).__name__}, which no collective takes: give its values, or "
            "convert it to a dense tensor"
        )
    return tf.convert_to_tensor(value)


def gathering(slices: tf.IndexedSlices, options: CallOptions) -> CallOptions:
    """Return the options with which values and indices are gathered for a reduction of slices.

    Raises `NotImplementedError` for one that gathering cannot make, and `ValueError` for the
    Average of bool.
    """
    if options.reduce_op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(
            f"tf.IndexedSlices have no {options.reduce_op.name.capitalize()}: use Average "
            "or Sum, or tf.convert_to_tensor(slices)"
        )
    if (options.prescale_factor, options.postscale_factor) != (1, 1):
        raise NotImplementedError(
            "prescale_factor and postscale_factor do not apply to tf.IndexedSlices: multiply its "
            "values"
        )
    if options.reduce_op is ReduceOp.AVERAGE and slices.dtype == tf.bool:
        raise ValueError("the Average of bool has no meaning: convert the slices to a number type")
    # Else rows of a larger table would be added to other words of a smaller one, or behind it.
    shape = slices.shape
    of = f" of shape {shape}" if slices.dense_shape is not None and shape.is_fully_defined() else ""
    alike = f"tf.IndexedSlices{of}, {options.reduce_op.name.capitalize()}"
    return options._replace(grouped=False, settings=alike)


def averaged(values: tf.Tensor, options: CallOptions) -> tf.Tensor:
    """Return the values, divided by the number of ranks where the reduction is Average.

    The number is that of the world in which a graph is run. Integers become floating-point numbers,
    as in Horovod and by TensorFlow's division: float32 up to 16 bits, float64 beyond.
    """
    if options.reduce_op is not ReduceOp.AVERAGE:
        return values
    dtype = values.dtype
    if dtype.is_integer:  # 300 ranks are no int8.
        dtype = tf.float32 if dtype.size <= 2 else tf.float64
    return tf.cast(values, dtype) / tf.cast(answer(options.process_set.size, "HorovodSize"), dtype)


def allreduce_mixed(
    verbs: Verbs[tf.Tensor],
    tensors: Sequence[Any],
    name: str | None,
    compression: type[Compressor],
    options: CallOptions,
) -> list[Any]:
    """Return each tensor reduced over all ranks, the dense ones together where they are a group.

    Nothing is sent where one of them is refused.
    """
    tensors = [each if isinstance(each, tf.IndexedSlices) else dense(each) for each in tensors]
    slices = {
        index: gathering(each, options)
        for index, each in enumerate(tensors)
        if isinstance(each, tf.IndexedSlices)
    }
    apart = [each for index, each in enumerate(tensors) if index not in slices]
    reduced = iter(verbs.allreduce(apart, name, compression, options))
    results: list[Any] = []
    for index, each in enumerate(tensors):
        if index not in slices:
            results.append(next(reduced))
            continue
        parts: list[tf.Tensor] = []
        for part, what in ((each.values, "values"), (each.indices, "indices")):
            part_name = None if name is None else f"{name}.slices.{index}.{what}"
            parts += verbs.gather([part], part_name, slices[index])
        values, indices = parts
        results.append(tf.IndexedSlices(averaged(values, options), indices, each.dense_shape))
    return results
