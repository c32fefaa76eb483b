"""`SyncBatchNormalization`: batch normalization over the batches of all ranks, as if they were one.

Reads Keras, which `import hvdlite.tf` leaves alone until this is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.differentiable import Verbs
from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.tensors.compression import NoneCompressor
from hvdlite.tf.calls.runner import TensorFlowRunner
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
        position = _RUNNER.ask(lambda: process_set.rank() or 0)
        return [_RUNNER.own_rows(total, rows[0], position)]

    return _RUNNER.record([local], forward, adjoint)[0]


class Synchronized:
    """The base class that is put before Keras' BatchNormalization, and gives it its moments."""

    def __init__(
        self,
        fused: bool | None = False,
        process_set: ProcessSet | Sequence[int] = global_process_set,
        **kwargs: Any,
    ) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization does not support fused=True: leave it out")
        super().__init__(**kwargs)
        self._fit_keras()
        self.supports_jit = False  # XLA cannot contain a collective
        self.process_set = _registered(process_set)

    def _fit_keras(self) -> None:
        """Have the layer work with this Keras, or raise `NotImplementedError`."""

    def get_config(self) -> dict[str, Any]:
        """As that of every layer. A process set is saved as its ranks."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]  # of the layer
        if self.process_set is not global_process_set:
            config["process_set"] = self.process_set.ranks
        return config


class SynchronizedOfKeras3(Synchronized):
    """For Keras 3 with TensorFlow."""

    _reduction_axes: list[int]

    def _fit_keras(self) -> None:
        backend = tf.keras.backend.backend()
        if backend != "tensorflow":
            raise NotImplementedError(
                "SyncBatchNormalization needs Keras to run on TensorFlow, and its backend is "
                f"{backend}: set KERAS_BACKEND=tensorflow"
            )

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
        if self.process_set.size() == 1 and not worlds.elastic():  # More ranks may come.
            return super()._moments(inputs, mask)  # type: ignore[misc]
        return moments(inputs, self._reduction_axes, mask, self.process_set)


class SynchronizedOfKeras2(Synchronized):
    """For Keras 2."""

    fused: bool | None

    def _fit_keras(self) -> None:
        self.fused = False  # the fused kernel would not ask for the moments

    def _moments(
        self,
        inputs: tf.Tensor,
        reduction_axes: list[int],
        keep_dims: bool,
        mask: tf.Tensor | None = None,
    ) -> Any:
        if self.process_set.size() == 1 and not worlds.elastic():  # More ranks may come.
            return super()._moments(inputs, reduction_axes, keep_dims, mask)  # type: ignore[misc]
        results = moments(inputs, reduction_axes, mask, self.process_set)
        for axis in reduction_axes if keep_dims else ():
            results = tuple(tf.expand_dims(moment, axis) for moment in results)
        return results


def _registered(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Return the set, or the registered set of these ranks. Raises `ValueError` without one."""
    if isinstance(process_set, ProcessSet):
        return process_set
    for known in current().known_sets.values():
        if known.ranks == sorted(process_set):
            return known
    raise ValueError(
        f"SyncBatchNormalization: no process set with the ranks {list(process_set)} is registered: "
        "call add_process_set() first"
    )


_keras_is_2 = tf.keras.layers.BatchNormalization.__module__.startswith("tf_keras.")
_OfKeras: Any = SynchronizedOfKeras2 if _keras_is_2 else SynchronizedOfKeras3


@tf.keras.utils.register_keras_serializable("hvdlite")
class SyncBatchNormalization(_OfKeras, tf.keras.layers.BatchNormalization):
    """Keras' BatchNormalization whose moments are those of all ranks while it trains.

    Ranks may have batches of different sizes, and empty ones. `fused` must be False; `process_set`
    are the ranks whose batches are one. All other arguments are those of BatchNormalization, and so
    is everything else: in evaluation and on one rank it is the same layer.

    Gradients of its weights are those of this rank's part of the batch; they are reduced like all
    others. Raises `ValueError` for `fused`, and for ranks that are no process set.
    """


__all__ = ["SyncBatchNormalization"]
