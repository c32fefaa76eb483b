"""`SyncBatchNormalization`: batch normalization over the batches of all ranks, as if they were one.

Reads Keras, which `import hvdlite.tf` leaves alone until this is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.state import current
from hvdlite.tf.moments import moments


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
