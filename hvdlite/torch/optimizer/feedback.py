"""Gradients of one optimizer that are sent by a compressor with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.api.options import CallOptions
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.gradients.compressed_bucket import Bucket, FeedbackState, Part
from hvdlite.common.gradients.compressed_exchange import CompressedBucket
from hvdlite.common.tensors.compression import COMPLEX, FeedbackCompressor
from hvdlite.torch.optimizer.in_flight import PendingGradient, check_and_wait


class FeedbackInFlight:
    """Dense gradients that are compressed and exchanged together."""

    def __init__(
        self,
        pending: Sequence[PendingGradient],
        state: FeedbackState,
        reduction: ReductionConfig,
        options: CallOptions,
    ) -> None:
        """Compress what is packed, and start to exchange it."""
        self._pending = pending
        self._error: Exception | None = None
        parts = [
            Part(each.name, each.packed.view(-1).numpy(), tuple(each.gradient.shape))
            for each in pending
        ]
        self._bucket = CompressedBucket(Bucket.of(parts, state, reduction, options.settings))

    def advance(self) -> None:
        """Go on as far as is possible without waiting; `wait` raises the errors."""
        try:
            self._bucket.advance()
        except Exception as error:
            self._error = error

    def advance_by_one(self) -> None:
        """Wait for what is in flight, and start what comes next; `wait` raises the errors."""
        try:
            self._bucket.advance_by_one()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the results, and write them to the gradients."""
        try:
            check_and_wait(self._pending, self._wait)
            for each in self._pending:
                result, gradient = each.packed, each.gradient
                if gradient.is_sparse:
                    dense = result.view(gradient.shape).to(gradient.device, gradient.dtype)
                    gradient = dense.to_sparse(gradient.sparse_dim())
                elif result is not gradient:
                    gradient.copy_(result.view(gradient.shape))
                each.parameter.grad = gradient
        finally:
            for each in self._pending:
                each.release()

    def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._bucket.wait()

    def leave(self) -> None:
        """Do nothing: what could be sent was sent."""


def packed_for(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient as contiguous float32 on the host: itself, where it is that.

    Raises `ValueError` for complex numbers.
    """
    if gradient.is_complex():
        raise ValueError(COMPLEX)
    host = gradient.detach().to("cpu", torch.float32)
    if host.is_contiguous() and host.data_ptr() == gradient.data_ptr():
        return gradient
    return host.contiguous()


class Feedback:
    """The compression of one optimizer's gradients with error feedback."""

    def __init__(self, compressor: FeedbackCompressor, reduction: ReductionConfig) -> None:
        self.state = FeedbackState(compressor, reduction.process_set)

    def save(self) -> dict[str, Any]:
        """Return the state as `FeedbackState.save` does, in tensors."""
        return _with_arrays(self.state.save(), torch.from_numpy)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what `save` has returned; see `FeedbackState.load`."""
        self.state.load(_with_arrays(saved, lambda each: torch.as_tensor(each).cpu().numpy()))


def _with_arrays(saved: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        key: {name: change(array) for name, array in value.items()}
        if key in ("factors", "residuals")
        else value
        for key, value in saved.items()
    }
