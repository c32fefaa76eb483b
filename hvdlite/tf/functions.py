"""Broadcasts of variables and Python objects, and the gathering of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdlite.common.api import objects
from hvdlite.common.api.options import CallOptions
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.tf.errors import public
from hvdlite.tf.variables import broadcast_values, plain


@public
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Assign to each variable its value on the global rank `root_rank`.

    Variables are those of TensorFlow or of Keras; every rank gives some of the same shapes and
    dtypes, in the same order. When executing eagerly this blocks; in a graph it is an operation
    to run. `inplace` has no effect: variables keep their memory where TensorFlow allows it.
    """
    targets = [plain(variable) for variable in variables]
    values = broadcast_values(targets, None, CallOptions(process_set, root_rank=root_rank))
    assigned = [
        variable.assign(value, read_value=False)
        for variable, value in zip(targets, values, strict=True)
    ]
    return None if tf.executing_eagerly() else tf.group(*assigned)


@public
def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that gives all global variables of the graph their value on `root_rank`.

    Raises `RuntimeError` when executing eagerly: there are no global variables then.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "hvd.broadcast_variables(<model/optimizer variables>) instead"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@public
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the global rank `root_rank` on every rank; blocks.

    `obj` is anything that cloudpickle can pickle, and has no effect on other ranks than the
    root, which gets its own object back. `session` has no effect: the object is sent at once, also
    while a graph is built.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@public
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in rank order; blocks. A joined rank has none.

    `obj` is anything that cloudpickle can pickle. `session` has no effect.
    """
    return objects.allgather_object(obj, name, process_set)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all global variables their value on the global rank `root_rank`, once they have one.

    For ``tf.compat.v1.train.MonitoredTrainingSession(hooks=[...])``: variables that the root has
    restored from a checkpoint reach all ranks, and so do those that were initialized at random.
    `device` has no effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Put the operation into the graph, which can still be changed."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it: variables are initialized or restored now."""
        session.run(self.bcast_op)


__all__ = [
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]
