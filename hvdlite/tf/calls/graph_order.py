"""The order of operations in a graph: which graphs are being built, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdlite.tf.calls.collective_call import Call


@contextmanager
def in_any_order(calls: Sequence[Call] = ()) -> Iterator[None]:
    """Let the operations made within this context run as soon as their inputs are computed.

    A ``tf.function`` otherwise runs operations with side effects one after the other, in the order
    of the program: the first gradient to be reduced would be the one that backward computes last.
    If one of the `calls` is `in_order`, the operations run after all before them, and before the
    rest.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is None:
        yield
        return
    before = graph.get_operations()
    in_order = any(call.in_order for call in calls)
    awaited = _stateful(before) if in_order else getattr(graph, "_hvdlite_in_order", [])
    with tf.control_dependencies(awaited if calls else []):
        yield
    made = _stateful(graph.get_operations()[len(before) :])
    if in_order:
        graph._hvdlite_in_order = made
        return
    for operation in made:
        manager.run_independently(operation)


def _stateful(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    return [operation for operation in operations if operation.op_def.is_stateful]


def graphs_around() -> list[Any]:
    """Return the graph that is being built, then the graphs that it lies in, from inside out."""
    graphs: list[Any] = [tf.compat.v1.get_default_graph()]
    while getattr(outer := getattr(graphs[-1], "outer_graph", None), "building_function", False):
        graphs.append(outer)
    return graphs
