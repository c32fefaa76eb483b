"""Collectives that are run now, or put into the graph that is being built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvdlite.common.api.call_checks import registered
from hvdlite.common.runtime.current import find
from hvdlite.tf.calls import python_graph_ops
from hvdlite.tf.calls.collective_call import Call, run_now
from hvdlite.tf.calls.graph_order import graphs_around
from hvdlite.tf.errors import InvalidArgumentError, WithoutOwnFrames
from hvdlite.tf.native import graph_ops
from hvdlite.tf.native.loader import library


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


def default_name(collective: str, tensor: tf.Tensor) -> str:
    """Return Horovod's name for a collective on this tensor of a graph."""
    name = re.sub(r"^[0-9]+:", "captured:", tensor.name)  # a number that ranks need not share
    normalized = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    return f"Horovod{collective.capitalize()}_{normalized}"
