"""The collectives as TensorFlow's automatic differentiation sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import CollectiveResult, Runner
from hvdlite.tf.calls.collective_call import TensorCall
from hvdlite.tf.calls.running import default_name, name_in_graph, run_calls

Function = Callable[[list[tf.Tensor]], list[tf.Tensor]]


class TensorFlowRunner(Runner[tf.Tensor]):
    """Runs collectives on tensors of TensorFlow, now or in a graph, with their gradients."""

    def __init__(self, ignore_name_scope: bool = False) -> None:
        self._ignore_name_scope = ignore_name_scope

    def run(
        self, collective: str, tensors: Sequence[tf.Tensor], name: str | None, options: CallOptions
    ) -> CollectiveResult:
        if not tensors:
            return CollectiveResult([], [])
        if not tf.executing_eagerly():
            name = name_in_graph(
                name or default_name(collective, tensors[0]), self._ignore_name_scope
            )
        elif name is not None and self._ignore_name_scope:
            name = name.rpartition("/")[2]
        (outputs,) = run_calls([TensorCall(collective, tensors, name, options)])
        return CollectiveResult(outputs[: len(tensors)], outputs[len(tensors) :])

    def record(
        self, tensors: Sequence[tf.Tensor], forward: Function, adjoint: Function
    ) -> list[tf.Tensor]:
        """Return ``forward(tensors)``, with the gradient that `adjoint` makes."""
        if tf.executing_eagerly() and not could_possibly_record():
            return forward(list(tensors))  # No tape would see it: most steps need no more.

        @tf.custom_gradient
        def recorded(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
            def gradient(*upstream: Any) -> list[tf.Tensor]:
                return adjoint([tf.convert_to_tensor(gradient) for gradient in upstream])

            return forward(list(inputs)), gradient

        return list(recorded(*tensors)) if tensors else []

    def own_rows(self, tensor: tf.Tensor, rows: tf.Tensor, position: int) -> tf.Tensor:
        start = tf.reduce_sum(rows[:position])
        return tensor[start : start + rows[position]]

    def zeros_like(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(tensor)

    def row_count(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.shape(tensor)[0] if tensor.shape.rank != 0 else tf.constant(0)

    def padded(self, tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        shape = tf.shape(tensor)
        missing = tf.concat([[rows - shape[0]], shape[1:]], 0)
        return tf.concat([tensor, tf.zeros(missing, tensor.dtype)], 0)
