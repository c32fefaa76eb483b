"""Graphs of TensorFlow and programs of JAX, in which a step of Keras may be: pushes leave them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import numpy as np

from hvdlite.keras.framework import backend_of, keras, wait_for_programs
from hvdlite.ps.layouts.blocks import Array

Function = Callable[..., Sequence[Array]]


def is_in_program() -> bool:
    """Return whether a program is being traced, which is to compute something each time it runs."""
    backend = backend_of(keras)
    if backend == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    if backend == "jax":
        from hvdlite.jax.programs import is_tracing

        return is_tracing()
    return False


def outside_of_programs() -> AbstractContextManager[Any]:
    """Return a context in which TensorFlow computes at once, also while it makes a graph."""
    if backend_of(keras) != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    scope: Callable[[], AbstractContextManager[Any]] = tf.init_scope
    return scope()


def call_in_program(function: Function, number: Any, tensors: Sequence[Any]) -> Sequence[Any]:
    """Let the program call ``function(number, *tensors)``, and return tensors like these.

    The function has arrays of numpy. Programs of JAX call it in the order in which they run. Raises
    `ValueError` for one that XLA of TensorFlow compiles.
    """
    if backend_of(keras) == "tensorflow":
        import tensorflow as tf
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

        if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError(
                "XLA of TensorFlow cannot compile a step that servers make: make the tf.function "
                "without jit_compile, or call optimizer.apply outside of it"
            )
        operands = [tf.convert_to_tensor(number), *tensors]
        found: Sequence[Any] = tf.numpy_function(
            function, operands, [tensor.dtype for tensor in tensors]
        )
        return found
    import jax.numpy as jnp

    from hvdlite.jax.calls import Kind
    from hvdlite.jax.python_calls import call_python

    kinds = [Kind(tuple(tensor.shape), np.dtype(tensor.dtype)) for tensor in tensors]
    called: Sequence[Any] = call_python(function, kinds, jnp.asarray(number), *tensors)
    return called


def after_programs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call as one that waits for the steps of JAX that this thread has begun."""

    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        wait_for_programs()
        return call(*args, **kwargs)

    return called
