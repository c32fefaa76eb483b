"""Collectives of TensorFlow: run now, or put into the graph that is being built; differentiable."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvdlite.common.api.call_checks import registered
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import CollectiveResult, Runner
from hvdlite.common.runtime.current import find
from hvdlite.tf.calls import python_graph_ops
from hvdlite.tf.calls.collective_call import Call, TensorCall, run_now
from hvdlite.tf.calls.python_graph_ops import graphs_around
from hvdlite.tf.errors import InvalidArgumentError, WithoutOwnFrames
from hvdlite.tf.native import graph_ops
from hvdlite.tf.native.loader import library
from hvdlite.tf.topology_ops import answer


def run_calls(calls: Sequence[Call]) -> list[list[tf.Tensor]]:
    """Return the outputs of each call. All are started before any is waited for.

    Raises `tf.errors.OpError`, now or when the graph is run; at once, also while a graph is built,
    `ValueError` for a process set that does not exist.
    """
    if not calls:
        return []
    if tf.executing_eagerly():
        return run_now(calls)
    runtime = find()
    if runtime is not None:  # graphs can be built before init()
        for call in calls:
            registered(runtime, call.collective, call.process_set)
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise InvalidArgumentError(
            None, None, "XLA cannot compile a collective: make the tf.function without jit_compile"
        )
    # However they are run, the names of all other operations in the graph must be the same: names
    # of collectives are made from them, and another rank may run its own in another way.
    with tf.name_scope("Hvdlite"), WithoutOwnFrames():
        native = library() if all(map(graph_ops.supports, calls)) else None
        if native is None:
            return python_graph_ops.run_in_graph(calls)
        return graph_ops.run_in_graph(native, calls)


def name_in_graph(name: str, ignore_name_scope: bool = False) -> str:
    """Return a name that no other collective has in the graph that is being built.

    Ranks that build the same graph get the same name.
    """
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None) if ignore_name_scope else nullcontext():
        unique: str = graph.unique_name(name)
    if len(graphs_around()) > 1:
        # Graphs inside this one have operations of the same names. The numbers in their own names
        # ("while_body_25_grad_31") count all of a process, and are not the same on every rank.
        return f"{re.sub(r'_[0-9]+(?=_|$)', '', graph.name)}/{unique}"
    return unique


# -- as automatic differentiation sees them

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
            if not name:  # Horovod's, without a number that ranks need not share.
                of_tensor = re.sub(r"^[0-9]+:", "captured:", tensors[0].name)
                normalized = re.sub(r"[^a-zA-Z0-9_]", "_", of_tensor)
                name = f"Horovod{collective.capitalize()}_{normalized}"
            name = name_in_graph(name, self._ignore_name_scope)
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

    def ask(self, question: Callable[[], int]) -> Any:
        return question() if tf.executing_eagerly() else answer(question, "HvdliteAnswer")

    def times(self, tensor: tf.Tensor, scale: float, number: Any) -> tf.Tensor:
        return tensor * (scale * tf.cast(number, tensor.dtype))

    def where(self, here: Any, tensor: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.cast(here, tf.bool), tensor, self.zeros_like(tensor))

    def own_rows(self, tensor: tf.Tensor, rows: tf.Tensor, position: Any) -> tf.Tensor:
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
