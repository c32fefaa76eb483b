"""The reducer of the gradients of an optimizer or a tape of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.gradients import reducer
from hvdlite.common.segmentation import strategies as segmentation
from hvdlite.tf.gradient_exchange import Gradient, reduce_gradients
from hvdlite.tf.variables import SOURCES


class Reducer(reducer.Reducer):
    """Reduces gradients of this rank, eagerly and in graphs."""

    sources = SOURCES
    variable = "tf.Variable"

    def send(
        self,
        gradients: Mapping[str, Gradient],
        sources: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
    ) -> Mapping[str, Gradient]:
        """Reduce the gradients. Raises `tf.errors.OpError` when a reduction fails."""
        reduced = reduce_gradients(
            list(gradients.values()), list(gradients), self.reduction, self.segments, groups
        )
        return dict(zip(gradients, reduced, strict=True))

    def describe(self, name: str, gradient: Gradient, source: Any) -> segmentation.Gradient | None:
        """See `reducer.Reducer.describe`."""
        sparse = isinstance(gradient, tf.IndexedSlices) and not self.reduction.sparse_as_dense
        if gradient is None or sparse:
            return None
        elements = SOURCES.plain(source).shape.num_elements() or 0  # 0: of no known shape
        dtype = gradient.dtype
        path = SOURCES.path_of(source)
        return segmentation.Gradient(name, elements * dtype.size, dtype.name, path)

    def divide(self, gradient: Gradient, divisor: int) -> Gradient:
        """Divide the gradient by a number."""
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / divisor
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / divisor
