"""A check that gradients about to be applied have been reduced over all ranks.

They may have been clipped or scaled meanwhile. In a graph the check asks whether they were computed
from reduced gradients; eagerly, whether the gradients of their variables were reduced since the
last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.tf.variables import key_of


class ReducedCheck:
    """The reduced gradients of one optimizer."""

    def __init__(self, label: str) -> None:
        self._collection = f"{label}/{id(self)}"  # In the graph, it lives as long as the tensors.
        self._fresh: dict[int, Any] = {}

    def note(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Remember the reduced gradients of the variables."""
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            if tf.executing_eagerly():
                self._fresh[key_of(variable)] = variable
            else:
                graph = tf.compat.v1.get_default_graph()
                graph.add_to_collection(self._collection, _tensor(gradient).name)

    def foreign(self, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return the variables of the pairs whose gradients are of this rank alone."""
        return [
            variable
            for gradient, variable in pairs
            if gradient is not None and not self._is_reduced(gradient, variable)
        ]

    def forget(self, variables: Iterable[Any]) -> None:
        """Forget the gradients of these variables, with which a step was made."""
        for variable in variables:
            self._fresh.pop(key_of(variable), None)

    def _is_reduced(self, gradient: Any, variable: Any) -> bool:
        if tf.executing_eagerly():
            return key_of(variable) in self._fresh
        tensor = _tensor(gradient)
        if not tf.is_symbolic_tensor(tensor):  # The user has put a constant there.
            return False
        seen: set[tuple[int, str]] = set()
        pending = [tensor]
        while pending:
            tensor = pending.pop()
            key = (id(tensor.graph), tensor.name)
            if key in seen:
                continue
            seen.add(key)
            if tensor.name in tensor.graph.get_collection(self._collection):
                return True
            pending += _inputs(tensor)
        return False


def _tensor(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _inputs(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the inputs of a tensor, also those in the graph around its own."""
    outside = [
        outer
        for outer, inner in getattr(tensor.graph, "captures", ())
        if inner.name == tensor.name and tf.is_symbolic_tensor(outer)
    ]
    return outside or list(tensor.op.inputs)
