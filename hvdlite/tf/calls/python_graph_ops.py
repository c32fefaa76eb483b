"""Collectives in a graph as Python functions that TensorFlow calls.

    start ... start          enqueue, and end: each as soon as its input is there
        \\   /
         poll                in a loop, each time for a few milliseconds, until all have ended;
          |                  between two polls the thread goes to what else is ready
          |
         take                the outputs

No thread of TensorFlow's is held until other ranks come, so everything that this rank can start is
started: with one thread too, and in whatever order the ranks' graphs are run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.current import find
from hvdlite.common.tensors.numpy_adapter import Array
from hvdlite.tf.accelerators.library import is_placed
from hvdlite.tf.accelerators.tensors import lifted, on_host
from hvdlite.tf.calls.collective_call import Call, Started, by_call

# -- the order of operations in a graph: which graphs are being built, and what waits for what


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


# -- the operations

_RUNNING, _ENDED, _FAILED = np.int32(0), np.int32(1), np.int32(2)
_FIRST_POLL_SECONDS = 0.001
_LONGEST_POLL_SECONDS = 0.016  # for a rank that waits long: 60 polls a second are little work


def run_in_graph(calls: Sequence[Call]) -> list[list[tf.Tensor]]:
    """Make operations in the current graph that start all calls, and wait for all of them."""
    with in_any_order(calls):
        tickets = tf.stack([_start(call) for call in calls])
        runtime = calls[0].runtime
        state = _poll_until_ended(runtime, tickets)
        with tf.control_dependencies([_check(runtime, tickets, state)]):
            results = tf.numpy_function(
                lambda numbers: _take(runtime(), numbers),
                [tickets],
                [output.dtype for call in calls for output in call.outputs],
                name="HvdliteTake",
            )
    return by_call(results, calls)


def _start(call: Call) -> tf.Tensor:
    placed = is_placed(call.tensors, len(call.inputs), find())

    def start(*arrays: Array) -> Any:
        runtime = call.runtime()
        started = lifted(call, arrays) if placed else call.start(arrays)
        handles = runtime.handles
        return np.int64(handles.add(started))

    ticket = tf.numpy_function(start, call.inputs, tf.int64, name="HvdliteStart")
    ticket.set_shape([])
    return ticket


def _poll_until_ended(runtime: Any, tickets: tf.Tensor) -> tf.Tensor:
    def poll(numbers: Array, round: Any) -> Any:
        collectives: list[Started] = [runtime().handles.get(int(number)) for number in numbers]
        seconds = min(_FIRST_POLL_SECONDS * (1 + int(round)), _LONGEST_POLL_SECONDS)
        deadline = time.monotonic() + seconds
        for started in collectives:
            if not started.ended_within(max(deadline - time.monotonic(), 0)):
                return _RUNNING
        return _FAILED if any(started.error for started in collectives) else _ENDED

    give_way = _give_way()

    def body(state: tf.Tensor, round: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([give_way()]):
            round = tf.identity(round)
        state = tf.numpy_function(poll, [tickets, round], tf.int32, name="HvdlitePoll")
        state.set_shape([])
        return state, round + 1

    state, _ = tf.while_loop(
        lambda state, round: tf.equal(state, _RUNNING), body, (_RUNNING, 0), parallel_iterations=1
    )
    return state


def _give_way() -> Callable[[], tf.Tensor]:
    """Make operations after which the executor goes on at the end of its queue.

    A loop alone keeps its thread: what has become ready runs where it has become so. The next
    element of a dataset is made by another thread, which hands the rest of the loop back.
    """
    with tf.init_scope(), _one_at_a_time:
        iterator = _eager_iterator() if tf.executing_eagerly() else _new_iterator()
    resource = iterator._iterator_resource
    for graph in reversed(graphs_around()):
        if graph.building_function:  # The loop of a gradient captures only tensors of graphs.
            resource = graph.capture(resource)
    return lambda: tf.raw_ops.IteratorGetNext(  # get_next() itself warns when called often
        iterator=resource, output_types=[tf.int32], output_shapes=[[]]
    )[0]


def _new_iterator() -> Any:
    # Threads that tune and prefetch have nothing to do here, and a session that closes may wait
    # for them without an end.
    plain = tf.data.Options()
    plain.autotune.enabled = False
    plain.experimental_optimization.apply_default_optimizations = False
    plain.experimental_optimization.inject_prefetch = False
    endless = tf.data.Dataset.from_tensors(0).repeat().with_options(plain)
    return (
        iter(endless)
        if tf.executing_eagerly()
        else tf.compat.v1.data.make_one_shot_iterator(endless)
    )


_eager_iterator = cache(_new_iterator)  # it lives as long as somebody holds it: graphs do not
_one_at_a_time = threading.Lock()  # guards that there is one


def _check(runtime: Any, tickets: tf.Tensor, state: tf.Tensor) -> tf.Operation:
    """Make an operation that fails with the type of error that eager execution raises."""

    def blame(numbers: tf.Tensor) -> tf.Tensor:
        # The message of a Python exception becomes an UnknownError, whatever its class. Reading a
        # variable that does not exist is a FailedPreconditionError, and it names the variable.
        collectives = [runtime().handles.take(int(number)) for number in numbers]
        error = next(started.error for started in collectives if started.error)
        if not (isinstance(error, HorovodInternalError) and error.job_goes_on):
            raise error
        with tf.init_scope():
            return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=f"\n\n{error}\n\n")

    def fail() -> tf.Tensor:
        handle = tf.py_function(blame, [tickets], tf.resource)
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32)

    checked = tf.cond(tf.equal(state, _FAILED), fail, lambda: 0)
    return checked.op


def _take(runtime: Any, numbers: Array) -> list[Array]:
    collectives: list[Started] = [runtime.handles.take(int(number)) for number in numbers]
    return [on_host(array) for started in collectives for array in started.arrays()]
