"""Variables of TensorFlow: which object is one; how values are broadcast, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.options import CallOptions
from hvdlite.common.gradients.variables import Sources
from hvdlite.common.gradients.weights_check import WeightsCheck
from hvdlite.common.runtime.current import finder, use
from hvdlite.common.tensors.comparison import of_array
from hvdlite.tf.calls.collective_call import TensorCall
from hvdlite.tf.calls.runner import name_in_graph, run_calls

SOURCES = Sources(tf.Variable)

plain = SOURCES.plain
is_variable = SOURCES.is_variable
key_of = SOURCES.key_of


def broadcast_values(
    variables: Sequence[Any], name: str | None, options: CallOptions
) -> list[tf.Tensor]:
    """Return the values of the variables on the root, which are sent at the same time."""
    base = name or "broadcast_variables"
    calls = []
    for index, variable in enumerate(variables):
        unique = f"{base}.{index}"
        if not tf.executing_eagerly():
            unique = name_in_graph(unique)
        calls.append(TensorCall("broadcast", [tf.convert_to_tensor(variable)], unique, options))
    return [value for (value,) in run_calls(calls)]


# The check that variables are the same on all ranks (HVDLITE_CHECK_WEIGHTS), in graphs or not.


def compare_variables(check: WeightsCheck, names: Sequence[str], variables: Sequence[Any]) -> Any:
    """Count a step, and compare the variables where it is time to, by these names.

    In a graph operations are made that do so, of which the last one is returned; in a `tf.function`
    they come after all assignments before. Raises `RuntimeError`, and where a graph is run
    `tf.errors.UnknownError` with its text.
    """
    if tf.executing_eagerly():
        check.step(
            lambda: [
                of_array(name, variable.numpy())
                for name, variable in zip(names, variables, strict=True)
            ]
        )
        return None
    runtime = finder()
    # One that is no resource converts to what was read when the graph's run began.
    reads = [
        variable.read_value() if variable.dtype != variable.dtype.base_dtype else variable
        for variable in map(plain, variables)
    ]

    def is_due() -> bool:
        with use(runtime()):
            return check.is_due()

    def compare(*values: Any) -> None:
        with use(runtime()):
            pairs = zip(names, values, strict=True)
            check.compare(of_array(name, value.numpy()) for name, value in pairs)

    def compared() -> tf.Tensor:
        values = [tf.convert_to_tensor(read) for read in reads]
        with tf.control_dependencies([tf.py_function(compare, values, [])]):
            return tf.constant(0)

    due = tf.py_function(is_due, [], tf.bool)
    due.set_shape([])
    return tf.cond(due, compared, lambda: tf.constant(0))
