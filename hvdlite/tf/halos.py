"""`halo` on TensorFlow's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.api.halo import Arrays
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.tf import mpi_ops
from hvdlite.tf.errors import public


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
        output, received = mpi_ops.alltoall(rows, splits, name, process_set=process_set)
        return tf.ensure_shape(output, [None, *rows.shape[1:]]), received

    def expect(self, received: tf.Tensor, wanted: list[int], position: int) -> None:
        if tf.executing_eagerly():
            super().expect(received.numpy().tolist(), wanted, position)
            return
        text = "halo: ranks disagree on the widths. Give the same before and after on all ranks"
        tf.debugging.assert_equal(received, wanted, text)


halo = public(_TensorFlowArrays().halo)

__all__ = ["halo"]
