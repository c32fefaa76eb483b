"""The collectives on values: each is run at once, and gives a tensor of Keras' backend.

A value is what can be made a tensor: a number, a list, a numpy array, a tensor, a variable. `name`
identifies it across ranks; calls without one are numbered, so that those of one process set must
come in the same order on all its ranks.

Errors are those of the adapter. With TensorFlow `tf.errors.InvalidArgumentError` (a `ValueError` as
well) says what is wrong on this rank, `tf.errors.FailedPreconditionError` what ranks disagree on,
`tf.errors.UnknownError` that one was lost; with PyTorch and JAX these are `ValueError` and
`HorovodInternalError`, which the latter two of TensorFlow are as well. In a program of JAX they may
be called, too, which fails with `jax.errors.JaxRuntimeError`.
"""

from __future__ import annotations

from typing import Any

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.tensors.compression import Compressor, NoneCompressor
from hvdlite.keras.framework import LEGACY, adapter, keras


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = NoneCompressor,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce the value over all ranks, which give values of the same shape and dtype.

    `op` is Average (default), Sum, Min, Max, Product or Adasum; `average` is its deprecated form.
    `prescale_factor` multiplies before and `postscale_factor` after the reduction.
    """
    return adapter().allreduce(
        tensor_of(value),
        average=average,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows of all ranks in rank order; ranks may give different numbers of rows."""
    return adapter().allgather(tensor_of(value), name=name, process_set=process_set)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the value of the global rank `root_rank`; all have the same shape and dtype."""
    return adapter().broadcast(tensor_of(value), root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce the value over all ranks, and return this rank's part of the rows.

    `op` is Average, Sum, Min, Max or Product. The first ``rows % size`` ranks get one row more.
    """
    return adapter().reducescatter(tensor_of(value), op=op, name=name, process_set=process_set)


def shutdown() -> None:
    """Depart from the job, after the programs of JAX that this thread has started.

    Everything else as `shutdown` of the adapter for the backend.
    """
    adapter().shutdown()


def broadcast_global_variables(root_rank: int) -> None:
    """Give all global variables of TensorFlow's graph their value on `root_rank`, at once.

    For graphs with sessions, in the session of Keras 2 or in the default one. Raises
    `RuntimeError` where there are no global variables: with eager execution, on JAX and PyTorch.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if not tf.executing_eagerly():
            operation = adapter().broadcast_global_variables(root_rank)
            session = tf.compat.v1.get_default_session() or tf.compat.v1.keras.backend.get_session()
            session.run(operation)
            return
    raise RuntimeError(
        "broadcast_global_variables() is for graphs of TensorFlow with sessions, and there is "
        "none: give hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) to fit()"
    )


def tensor_of(value: Any) -> Any:
    """Convert the value to a tensor of Keras' backend, outside of automatic differentiation."""
    if LEGACY:
        import tensorflow as tf

        return tf.convert_to_tensor(value)
    return keras.ops.stop_gradient(keras.ops.convert_to_tensor(value))
