"""Mean and variance over the batches of all ranks, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.differentiable import Verbs
from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.plain.compression import NoneCompressor
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.tf.differentiable import TensorFlowRunner
from hvdlite.tf.errors import public

_RUNNER = TensorFlowRunner(ignore_name_scope=True)  # Keras numbers scopes, not alike on all ranks
_VERBS = Verbs(_RUNNER)
_NAME = "sync_batch_norm"


@public
def moments(
    inputs: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and biased variance over `axes` of the inputs of all ranks, as one batch.

    Only where `mask` is true, which has the dimensions of the inputs without the last. Ranks may
    have batches of different sizes, and empty ones. Both results have the dtype of the inputs and
    their dimensions without `axes`, and are zero where there is nothing at all.
    """
    mean, variance, count = _local_moments(inputs, axes, mask)
    shape = tf.shape(mean)
    local = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in (mean, variance, count)]
    means, variances, counts = tf.unstack(_gather(tf.stack([local]), process_set), 3, axis=1)
    total = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(means * counts, 0), total)
    squares = tf.reduce_sum((variances + tf.square(means - mean)) * counts, 0)
    variance = tf.math.divide_no_nan(squares, total)
    whole_mean, whole_variance = (
        tf.cast(tf.reshape(moment, shape), inputs.dtype) for moment in (mean, variance)
    )
    return whole_mean, whole_variance


def _local_moments(
    inputs: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None
) -> list[tf.Tensor]:
    """Return mean, biased variance and number of values of each channel on this rank.

    Ranks combine these as Chan et al. do ("Updating formulae and a pairwise algorithm for computing
    sample variances", 1979), since sums of squares lose precision.
    """
    wide = tf.cast(inputs, tf.float32) if inputs.dtype.size == 2 else inputs
    valid = None
    if mask is None:
        count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(wide), axes)), wide.dtype)
    else:
        valid = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(wide))
        count = tf.reduce_sum(tf.cast(valid, wide.dtype), axes, keepdims=True)

    def average(values: tf.Tensor) -> tf.Tensor:
        counted = values if valid is None else tf.where(valid, values, 0)
        return tf.math.divide_no_nan(tf.reduce_sum(counted, axes, keepdims=True), count)

    mean = average(wide)
    variance = average(tf.square(wide - mean))
    counts = tf.broadcast_to(count, tf.shape(mean))
    return [tf.squeeze(value, axes) for value in (mean, variance, counts)]


def _gather(local: tf.Tensor, process_set: ProcessSet) -> tf.Tensor:
    """Gather the rows of all ranks. The gradient is that of the losses of all ranks together."""
    plain = CallOptions(process_set)
    rows: list[Any] = []

    def forward(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        result = _RUNNER.run("allgather", inputs, f"{_NAME}.statistics", plain)
        rows[:] = result.rows
        return result.tensors

    def adjoint(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        summed = CallOptions(process_set, ReduceOp.SUM)
        name = f"{_NAME}.gradient"
        (total,) = _VERBS.allreduce(gradients, name, NoneCompressor, summed)
        return [_RUNNER.own_rows(total, rows[0], process_set.rank() or 0)]

    return _RUNNER.record([local], forward, adjoint)[0]
