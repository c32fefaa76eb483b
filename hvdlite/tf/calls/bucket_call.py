"""Calls that reduce several gradients: one call in each step, eagerly or in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_bucket import ReducedCopies
from hvdlite.common.gradients.background_exchange import BackgroundExchange
from hvdlite.common.gradients.compressed_bucket import Part
from hvdlite.common.runtime.current import finder
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.compression import COMPLEX
from hvdlite.common.tensors.numpy_adapter import ALIGNMENT_BYTES, Array, NumpyAdapter, aligned_empty
from hvdlite.tf.calls.collective_call import ADAPTER, Started


@dataclass
class _GradientCall:
    """A call whose outputs are its inputs, reduced."""

    inputs: Sequence[tf.Tensor]
    names: Sequence[str]
    collective = "allreduce"
    in_order = False

    @property
    def outputs(self) -> list[tf.TensorSpec]:
        """The dtypes and shapes of the gradients."""
        return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.inputs]


@dataclass
class BucketCall(_GradientCall):
    """The allreduce of gradients, each under its own name, or all as one group."""

    options: CallOptions
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    # Whether nothing else is reduced together with it.
    alone = False
    in_place = True

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self.options.process_set

    @property
    def tensors(self) -> Sequence[tf.Tensor]:
        """Those that may stay on a device: all."""
        return self.inputs

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The dtypes of the gradients, as numpy has them."""
        return [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in self.inputs]

    def start(
        self,
        arrays: Sequence[Array],
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> Started:
        reduction = ReducedCopies(
            self.runtime(), adapter, self.names, arrays, self.options, aligned_copies,
            nbytes=sum(array.nbytes for array in arrays),
            alone=self.alone and adapter is ADAPTER,  # Short calls are those of the host.
        )  # fmt: skip
        return Started(lambda: reduction.handles, reduction.wait)


def aligned_copies(arrays: Sequence[Array]) -> list[Array]:
    """Return copies of the arrays, in one piece of memory, where TensorFlow can use each as it is.

    The memory lives as long as one of them.
    """
    places = []
    end = 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = aligned_empty((end,), np.dtype(np.uint8))
    copies = []
    for array, place in zip(arrays, places, strict=True):
        copy = memory[place : place + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        copies.append(copy)
    return copies


# Calls that exchange gradients by a compressor with error feedback.


@dataclass
class CompressedCall(_GradientCall):
    """The exchange of a bucket of gradients."""

    exchange: BackgroundExchange
    first: tuple[str, tuple[int, ...], str]
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    tensors: Sequence[tf.Tensor] = ()  # None that could stay on a device: they are compressed.
    in_place = False

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self.exchange.state.process_set

    def start(
        self,
        arrays: Sequence[Array],
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> Started:
        copies: list[Array] = []
        for array in arrays:
            if np.iscomplexobj(array):
                raise ValueError(COMPLEX)
            # In memory that a tensor can have.
            copies.append(aligned_empty((math.prod(array.shape),), np.dtype(np.float32)))
            copies[-1][...] = array.reshape(-1)
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
