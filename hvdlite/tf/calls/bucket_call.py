"""Calls that reduce several gradients: one call in each step, eagerly or in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_bucket import ReducedCopies
from hvdlite.common.plain.numpy_adapter import ALIGNMENT_BYTES, Array, NumpyAdapter, aligned_empty
from hvdlite.common.runtime.current import finder
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.tf.calls.collective_call import ADAPTER, Started


@dataclass
class BucketCall:
    """The allreduce of gradients, each under its own name, or all as one group."""

    tensors: Sequence[tf.Tensor]
    names: Sequence[str]
    options: CallOptions
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    # Whether nothing else is reduced together with it.
    alone = False
    collective = "allreduce"
    in_place = True
    in_order = False

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self.options.process_set

    @property
    def inputs(self) -> Sequence[tf.Tensor]:
        """The gradients."""
        return self.tensors

    @property
    def outputs(self) -> list[tf.TensorSpec]:
        """The dtypes and shapes of the gradients."""
        return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.tensors]

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
