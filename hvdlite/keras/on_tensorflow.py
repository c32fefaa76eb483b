"""What a distributed optimizer needs of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.gradients import Terms
from hvdlite.tf.reducer import Reducer

__all__ = ["Accumulator", "Reducer", "untraced"]

untraced: Any = tf.autograph.experimental.do_not_convert


class Accumulator:
    """Adds up the gradients of several passes."""

    def __init__(self, passes: int, average: bool, terms: Terms) -> None:
        self._passes = passes
        self._average = average
        self._terms = terms
        self._count: Any = None
        self._sums: list[Any] = []

    def add(
        self, gradients: Sequence[Any], due: Callable[[list[Any]], Any], skip: Callable[[], Any]
    ) -> Any:
        """In the last pass of a step ``due(sums)``, in all others ``skip()``."""
        dense = [None if each is None else self._dense(each) for each in gradients]
        self._make_variables(dense)
        sums = [
            None if each is None else total.assign_add(each)
            for each, total in zip(dense, self._sums, strict=True)
        ]
        count = self._count.assign_add(1)

        def complete() -> None:
            scale = self._passes if self._average else 1
            totals = [None if each is None else tf.identity(each) / scale for each in sums]
            for total in self._sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            due(totals)

        def incomplete() -> None:
            skip()

        return tf.cond(tf.equal(count % self._passes, 0), complete, incomplete)

    def _dense(self, gradient: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._terms.sparse_as_dense:
            raise ValueError(
                "backward_passes_per_step > 1 adds up dense gradients, and this one is "
                "tf.IndexedSlices: give sparse_as_dense=True"
            )
        return tf.convert_to_tensor(gradient)

    def _make_variables(self, gradients: Sequence[Any]) -> None:
        if self._count is not None:
            return
        with tf.init_scope():
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._sums = [
                None
                if each is None
                else tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False)
                for each in gradients
            ]
