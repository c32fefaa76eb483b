"""The collectives as TensorFlow's automatic differentiation sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.differentiable import Outcome, Verbs
from hvdlite.common.api.options import Options
from hvdlite.tf.collective_call import TensorCall
from hvdlite.tf.graph import default_name, name_in_graph, run_calls

Function = Callable[[list[tf.Tensor]], list[tf.Tensor]]


class TensorFlowVerbs(Verbs[tf.Tensor]):
    """The collectives, eager and in graphs, with their gradients."""

    def __init__(self, ignore_name_scope: bool = False) -> None:
        self._ignore_name_scope = ignore_name_scope

    def run(
        self, collective: str, tensors: Sequence[tf.Tensor], name: str | None, options: Options
    ) -> Outcome:
        """One collective on one tensor or on a group, without a gradient."""
        if not tensors:
            return Outcome([], [])
        if not tf.executing_eagerly():
            name = name_in_graph(
                name or default_name(collective, tensors[0]), self._ignore_name_scope
            )
        elif name is not None and self._ignore_name_scope:
            name = name.rpartition("/")[2]
        (outputs,) = run_calls([TensorCall(collective, tensors, name, options)])
        return Outcome(outputs[: len(tensors)], outputs[len(tensors) :])

    def differentiable(
        self, tensors: Sequence[tf.Tensor], forward: Function, adjoint: Function
    ) -> list[tf.Tensor]:
        """``forward(tensors)``, with the gradient that `adjoint` makes."""

        @tf.custom_gradient
        def record(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
            def gradient(*upstream: Any) -> list[tf.Tensor]:
                return adjoint([tf.convert_to_tensor(gradient) for gradient in upstream])

            return forward(list(inputs)), gradient

        return list(record(*tensors)) if tensors else []

    def own_rows(self, tensor: tf.Tensor, rows: tf.Tensor, position: int) -> tf.Tensor:
        """Return the part of `tensor` that came from the member at `position`."""
        start = tf.reduce_sum(rows[:position])
        return tensor[start : start + rows[position]]

    def zeros_like(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor of zeros of the same shape and dtype."""
        return tf.zeros_like(tensor)
