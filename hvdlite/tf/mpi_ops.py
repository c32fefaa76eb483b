"""The collectives on TensorFlow's tensors, and the basics of the job.

Common to all: tensors are anything that ``tf.convert_to_tensor`` takes, of any shape and of any
dtype that numpy or ml_dtypes has too. `name` identifies the tensor across ranks. In a graph it is
made unique; without one there it is made of the tensor's name. Eager calls without a name
are numbered, so that those of one process set must come in the same order on all its ranks.

Raises `tf.errors.InvalidArgumentError` (a `ValueError` as well) for what is wrong on this rank,
`tf.errors.FailedPreconditionError` for what ranks disagree on, and `tf.errors.UnknownError` when
a rank is lost; the latter two are `HorovodInternalError`, too, when executing eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.differentiable import Verbs
from hvdlite.common.api.halo import Arrays
from hvdlite.common.api.options import CallOptions, reduction, scattering
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.segment_plan import (
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
from hvdlite.common.runtime import public_names
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.common.tensors.compression import Compressor, NoneCompressor
from hvdlite.tf.calls.collective_call import SignalCall
from hvdlite.tf.calls.runner import TensorFlowRunner, run_calls
from hvdlite.tf.errors import public
from hvdlite.tf.sparse import allreduce_mixed, dense
from hvdlite.tf.topology_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvdlite.tf.variables import broadcast_values

_VERBS = {ignore: Verbs(TensorFlowRunner(ignore)) for ignore in (False, True)}


@public
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce the tensor over all ranks.

    Every rank gives a tensor of the same shape and dtype. `op` is Average (default), Sum, Min, Max,
    Product or Adasum. Integers are averaged as their sum times 1/size, truncated toward zero;
    16-bit floats are summed in float32. `prescale_factor` multiplies before and `postscale_factor`
    after the reduction. `compression` makes what is sent smaller. `device_dense`
    and `device_sparse` have no effect.

    A `tf.IndexedSlices` gives one with the rows of all ranks; op is Average or Sum then, and the
    Average of integers is float32, or float64 for those of 32 and 64 bits.

    Differentiable: the gradient is reduced in the same way.
    """
    options = reduction(average, op, prescale_factor, postscale_factor, process_set)
    return allreduce_mixed(_VERBS[ignore_name_scope], [tensor], name, compression, options)[0]


@public
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """As `allreduce` for several tensors, of which all or none are reduced: a list."""
    options = reduction(average, op, prescale_factor, postscale_factor, process_set, True)
    return allreduce_mixed(_VERBS[ignore_name_scope], tensors, name, compression, options)


@public
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce the tensor over all ranks, and return this rank's part of the rows.

    Every rank gives a tensor of the same shape and dtype. Parts are as even as can be: the first
    ``rows % size`` ranks get one row more. `op` and the factors as in `allreduce`, without Adasum.

    Differentiable: the gradient is gathered, times both factors, and times size for Sum.
    """
    options = scattering(op, prescale_factor, postscale_factor, process_set)
    verbs = _VERBS[ignore_name_scope]
    tensors = [dense(tensor)]
    return verbs.reducescatter(tensors, name, compression, options)[0]


@public
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """As `reducescatter` for several tensors, of which all or none are reduced: a list."""
    options = scattering(op, prescale_factor, postscale_factor, process_set, True)
    converted = [dense(each) for each in tensors]
    return _VERBS[False].reducescatter(converted, name, compression, options)


@public
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    Only the first dimension may differ between ranks. Differentiable: the gradient is averaged
    over the ranks, and each keeps its own rows.
    """
    tensors = [dense(tensor)]
    return _VERBS[ignore_name_scope].gather(tensors, name, CallOptions(process_set))[0]


@public
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """As `allgather` for several tensors, of which all or none are gathered: a list."""
    converted = [dense(each) for each in tensors]
    options = CallOptions(process_set, grouped=True)
    return _VERBS[ignore_name_scope].gather(converted, name, options)


@public
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensor of the global rank `root_rank`; all have the same shape and dtype.

    Differentiable: the gradient is averaged on the root, and zero elsewhere.
    """
    options = CallOptions(process_set, root_rank=root_rank)
    return _VERBS[ignore_name_scope].copy(dense(tensor), name, options)


@public
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Assign to each variable its value on the global rank `root_rank`; a list of these values.

    Every rank gives variables of the same shapes and dtypes, in the same order.
    """
    options = CallOptions(process_set, root_rank=root_rank)
    values = broadcast_values(variables, name, options)
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    if tf.executing_eagerly():
        return values
    with tf.control_dependencies(assigned):
        return [tf.identity(value) for value in values]


@public
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the next ``splits[i]`` rows to rank i, for all i, and return the rows that have come.

    Without `splits` (int32, or a list) every rank gets the same number of rows; with them the
    result is ``(output, received_splits)``. Rows come in the order of ranks.

    Differentiable: the gradient goes back the way that the rows came; it is zero for rows that
    were not sent.
    """
    given = None if splits is None else tf.convert_to_tensor(splits, dtype_hint=tf.int32)
    output, received = _VERBS[ignore_name_scope].exchange(
        dense(tensor), name, CallOptions(process_set, splits=given)
    )
    return output if given is None else (output, tf.cast(received, given.dtype))


@public
def join() -> tf.Tensor:
    """Say that this rank has no more data, and wait until all ranks say so.

    Until then the others' collectives go on without this rank: it counts for nothing in a reduction
    (an Average still divides by the number of ranks) and gives no rows. The global rank that joined
    last, as an int32 scalar.
    """
    return run_calls([SignalCall("join", global_process_set)])[0][0]


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this; in a graph, when it is run."""
    run_calls([SignalCall("barrier", process_set)])


class _TensorFlowArrays(Arrays[Any]):
    def convert(self, array: Any) -> tf.Tensor:
        return tf.convert_to_tensor(array)

    def shape(self, array: tf.Tensor) -> Sequence[int | None]:
        sizes: list[int | None] = array.shape.as_list()
        return sizes

    def move(self, array: tf.Tensor, dim: int, to: int) -> tf.Tensor:
        order = list(range(array.shape.rank))
        order.insert(to, order.pop(dim))
        return tf.transpose(array, order)

    def concatenate(self, arrays: Sequence[tf.Tensor], dim: int) -> tf.Tensor:
        return tf.concat(arrays, dim)

    def border(self, array: tf.Tensor, dim: int, width: int, value: float) -> tf.Tensor:
        shape = tf.tensor_scatter_nd_update(tf.shape(array), [[dim]], [width])
        return tf.fill(shape, tf.cast(value, array.dtype))

    def exchange(
        self, rows: tf.Tensor, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[tf.Tensor, Any]:
        output, received = alltoall(rows, splits, name, process_set=process_set)
        return tf.ensure_shape(output, [None, *rows.shape[1:]]), received

    def expect(self, received: tf.Tensor, wanted: list[int], position: int) -> None:
        if tf.executing_eagerly():
            super().expect(received.numpy().tolist(), wanted, position)
            return
        text = "halo: ranks disagree on the widths. Give the same before and after on all ranks"
        tf.debugging.assert_equal(received, wanted, text)


halo = public(_TensorFlowArrays().halo)


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "halo",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "set_comm_fusion",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "size_op",
]
__all__ += public_names.__all__
