"""Gradients of one optimizer that are complete: pending at first, then in flight between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hvdlite.common.api.options import CallOptions
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.tensors.compression import AnyCompressor, Compressor, NoneCompressor
from hvdlite.torch import mpi_ops
from hvdlite.torch.compression import BF16Compressor, CastCompressor, FP16Compressor
from hvdlite.torch.optimizer.flat_gradients import FlatGradients

T = TypeVar("T")

# These compressors only cast: `copy_` undoes them, and their memory can be used again in the next
# step. A user's subclass may do anything, so the test is for the classes themselves.
CASTS: tuple[type[CastCompressor], ...] = (FP16Compressor, BF16Compressor)
_NONE: type[Compressor] = NoneCompressor


class PendingGradient:
    """The gradient of one parameter that is complete, from the hook until its reduction has ended.

    The object serves all steps. `gradient` and `packed` are valid from `complete` to `release`.
    """

    __slots__ = ("context", "gradient", "name", "packed", "parameter", "version")

    # The gradient as it was when it was complete, and its version, so that `check` finds changes.
    gradient: torch.Tensor
    version: int
    # Both are set when the gradient is sent. `packed` is the tensor that is reduced: `gradient`
    # itself where it is neither compressed nor made dense. `decompress` needs `context`.
    packed: torch.Tensor
    context: Any

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name = name
        self.parameter = parameter

    def complete(self, gradient: torch.Tensor) -> None:
        """Record that backward has computed the gradient."""
        self.gradient = gradient
        self.version = gradient._version

    def release(self) -> None:
        """Drop the tensors, so that their memory is free for the next backward."""
        self.gradient = self.packed = self.context = None  # type: ignore[assignment]

    def move_to(self, flat: FlatGradients) -> None:
        """Move the gradient into the buffer of its segment."""
        set_to_none = self.parameter.grad is None
        if set_to_none:  # The other ranks wait for it, though `check` will raise an error here.
            self.parameter.grad = self.gradient
        if self.gradient.is_sparse:  # Segments of sparse gradients exist with sparse_as_dense only.
            self.parameter.grad = self.gradient.to_dense()
        self.gradient = flat.adopt(self.parameter)
        self.version = self.gradient._version
        if set_to_none:
            self.parameter.grad = None

    def check(self) -> None:
        """Raise `RuntimeError` if the gradient has been changed since it was complete.

        See [Note: views and version counters] in torch/optimizer/flat_gradients.py.
        """
        current = self.parameter.grad
        if current is self.gradient and current._version == self.version:
            return
        change = "changed"
        cause = ", by clipping, unscaling or another DistributedOptimizer of it perhaps"
        if current is None:
            change, cause = "set to None", ""
        raise RuntimeError(
            f"the gradient of {self.name} was {change} after it was sent to the other ranks"
            f"{cause}. Call optimizer.synchronize() first, then change gradients, and call step() "
            "inside 'with optimizer.skip_synchronize():'"
        )


def check_and_wait(pending: Sequence[PendingGradient], wait: Callable[[], T]) -> T:
    """Return ``wait()``, and raise `RuntimeError` if one of the gradients has been changed.

    The wait happens in any case: the engine writes to these tensors until the reduction has ended.
    """
    try:
        for gradient in pending:
            gradient.check()
    finally:
        result = wait()
    return result


class BucketInFlight:
    """Dense gradients that are reduced together, each in a tensor of its own."""

    def __init__(
        self,
        pending: Sequence[PendingGradient],
        compression: AnyCompressor,
        options: CallOptions,
        *,
        alone: bool = False,
    ) -> None:
        """Start to reduce the packed tensors in place; `alone`: the wait for them comes next."""
        self._pending = pending
        self._compression = compression
        names = [gradient.name for gradient in pending]
        packed = [gradient.packed for gradient in pending]
        self._bucket = mpi_ops.runner.start_bucket(names, packed, options, alone=alone)

    def wait(self) -> None:
        """Wait for the results, and write them to the gradients."""
        try:
            check_and_wait(self._pending, self._bucket.wait)
            for pending in self._pending:
                result, gradient = pending.packed, pending.gradient
                if result is gradient and pending.context is None and self._compression is _NONE:
                    continue
                if gradient.is_sparse or self._compression not in CASTS:
                    result = self._compression.decompress(result, pending.context)
                if gradient.is_sparse:
                    gradient = result.to_sparse(gradient.sparse_dim())
                elif result is not gradient:
                    gradient.copy_(result)
                pending.parameter.grad = gradient
        finally:
            for pending in self._pending:
                pending.release()

    def leave(self) -> None:
        """Let the other ranks have these gradients: nobody will wait for them here."""
        self._bucket.send()


class SegmentInFlight:
    """A segment whose gradients are views of one buffer, which is reduced as one tensor."""

    def __init__(
        self,
        pending: Sequence[PendingGradient],
        flat: FlatGradients,
        packed: torch.Tensor,
        options: CallOptions,
        *,
        alone: bool = False,
    ) -> None:
        """Start to reduce `packed` in place: the buffer itself, or its compressed copy.

        `alone`: the wait for it comes next.
        """
        self._pending = pending
        self._buffer = flat.buffer
        self._packed = packed
        self._bucket = mpi_ops.runner.start_bucket(
            [pending[0].name], [packed], options, alone=alone
        )

    def wait(self) -> None:
        """Wait for the result. The gradients show it, unless it has to be decompressed."""
        check_and_wait(self._pending, self._bucket.wait)
        if self._packed is not self._buffer:
            self._buffer.copy_(self._packed)
        for gradient in self._pending:
            gradient.parameter.grad = gradient.gradient
            gradient.release()

    def leave(self) -> None:
        """Let the other ranks have this segment: nobody will wait for it here."""
        self._bucket.send()


class SparseGradientInFlight:
    """One sparse gradient, whose entries are gathered from all ranks."""

    def __init__(self, pending: PendingGradient, reduction: ReductionConfig) -> None:
        """Start to gather indices and values."""
        self._pending = pending
        self._wait = mpi_ops.sparse_allreduce_async(
            pending.gradient, pending.name, reduction.scaling.op, reduction.process_set
        )

    def wait(self) -> None:
        """Wait for the sum, and replace the gradient by it."""
        self._pending.parameter.grad = check_and_wait([self._pending], self._wait)
        self._pending.release()

    def leave(self) -> None:
        """Do nothing: the gradient was sent."""


InFlight = BucketInFlight | SegmentInFlight | SparseGradientInFlight
