"""Calls that exchange gradients by a compressor with error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from hvdlite.common.gradients.background_exchange import BackgroundExchange
from hvdlite.common.gradients.compressed_bucket import Part
from hvdlite.common.plain.compression import COMPLEX
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter, aligned_empty
from hvdlite.common.runtime.current import finder
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.tf.calls.collective_call import ADAPTER, Started


@dataclass
class CompressedCall:
    """The exchange of a bucket of gradients."""

    inputs: Sequence[tf.Tensor]
    names: Sequence[str]
    exchange: BackgroundExchange
    first: tuple[str, tuple[int, ...], str]
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    collective = "allreduce"
    tensors: Sequence[tf.Tensor] = ()  # None that could stay on a device: they are compressed.
    in_place = False
    in_order = False

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self.exchange.state.process_set

    @property
    def outputs(self) -> list[tf.TensorSpec]:
        """The dtypes and shapes of the gradients."""
        return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.inputs]

    def start(
        self,
        arrays: Sequence[Array],
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> Started:
        copies = [_flat_copy(array) for array in arrays]
        parts = [
            Part(name, copy, array.shape)
            for name, copy, array in zip(self.names, copies, arrays, strict=True)
        ]
        handle = self.exchange.submit(parts, self.runtime(), self.first)

        def results() -> list[Array]:
            handle.wait()
            return [
                copy.reshape(array.shape).astype(array.dtype, copy=False)
                for copy, array in zip(copies, arrays, strict=True)
            ]

        return Started(lambda: [handle], results)


def _flat_copy(array: Array) -> Array:
    """Return the elements as float32, in memory that a tensor can have.

    Raises `ValueError` for complex numbers.
    """
    if np.iscomplexobj(array):
        raise ValueError(COMPLEX)
    copy: Array = aligned_empty((math.prod(array.shape),), np.dtype(np.float32))
    copy[...] = array.reshape(-1)
    return copy
