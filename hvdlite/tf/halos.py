"""`halo` on TensorFlow's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api import halo as common
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.tf import mpi_ops
from hvdlite.tf.errors import public


class _TensorFlowArrays(common.Arrays[Any]):
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
        output, received = mpi_ops.alltoall(rows, splits, name, process_set=process_set)
        return tf.ensure_shape(output, [None, *rows.shape[1:]]), received

    def expect(self, received: tf.Tensor, wanted: list[int], position: int) -> None:
        if tf.executing_eagerly():
            super().expect(received.numpy().tolist(), wanted, position)
            return
        text = "halo: ranks disagree on the widths. Give the same before and after on all ranks"
        tf.debugging.assert_equal(received, wanted, text)


_ARRAYS = _TensorFlowArrays()


@public
def halo(
    x: Any,
    dim: int,
    before: int,
    after: int,
    process_set: ProcessSet = global_process_set,
    *,
    fill: float | None = 0.0,
    name: str | None = None,
) -> tf.Tensor:
    """Return the slice `x` of a larger tensor between the edges of its neighbours' slices.

    The larger tensor is cut along `dim`, and its slices lie on the ranks of `process_set` in their
    order. `before` entries come from the rank before this one and `after` entries from the one
    behind it; all ranks give the same numbers. Beyond the whole tensor there is `fill`, the zeros
    of a padded convolution; None adds nothing there. Slices may differ along `dim` only, and their
    number of dimensions is known in a graph.

    Differentiable: the gradients of the edges go back to the ranks that own them, and are added
    there.
    """
    return common.halo(
        _ARRAYS, tf.convert_to_tensor(x), dim, before, after, process_set, fill, name
    )


__all__ = ["halo"]
