"""Variables of TensorFlow: which object is one, and how their values are broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.options import CallOptions
from hvdlite.common.gradients.variables import Sources
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
