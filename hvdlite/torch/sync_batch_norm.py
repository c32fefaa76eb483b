"""`SyncBatchNorm`: batch normalization over the batches of all ranks, as if they were one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.torch import mpi_ops
from hvdlite.torch.autograd import untraced

Tensor = torch.Tensor
# The accelerators that do not compute with float64.
_WITHOUT_FLOAT64 = frozenset(("mlu", "mps", "npu"))


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm`` of any dimensions whose statistics are those of all ranks.

    Input has the shape ``(N, C, ...)`` with C = `num_features`; N may differ between ranks, and be
    0 on some of them. The arguments are those of ``torch.nn.BatchNorm2d``, and `process_set`, the
    ranks that share statistics. In evaluation, and on one rank, it is plain batch normalization.

    The gradients of weight and bias are those of this rank's part of the batch; the optimizer
    reduces them like all others. Raises `ValueError` for input of less than 2 dimensions, and where
    all ranks together have only one value per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, of the same shape and dtype."""
        self._check_input_dim(input)
        if not self.training or self.process_set.size() == 1:
            return super().forward(input)
        output, mean, unbiased_variance = _normalize(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        self._track(mean, unbiased_variance)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1 / float(self.num_batches_tracked)
        if factor is not None:
            # A variance may be more than a 16-bit value can be, and its share of it less.
            for running, new in (self.running_mean, mean), (self.running_var, unbiased_variance):
                wide = _wide(running)
                running.copy_(wide.lerp(new.to(wide.dtype), factor))


class _SyncBatchNorm(torch.autograd.Function):
    """The differentiable function; forward and backward each exchange one row."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance, count = _whole_batch(input, process_set)
        dtype = _wide(input).dtype if weight is None else _wide(weight).dtype
        scale, shift = (None if each is None else each.to(dtype) for each in (weight, bias))
        output = torch.nn.functional.batch_norm(
            input, mean.to(dtype), variance.to(dtype), scale, shift, eps=eps
        )
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.process_set, ctx.count = process_set, count
        unbiased_variance = variance * count / (count - 1)
        ctx.mark_non_differentiable(mean, unbiased_variance)
        return output, mean, unbiased_variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_std = ctx.saved_tensors
        dims, shape = _channels(input)
        dy = _wide(gradient)
        centred = _wide(input) - _like(mean, dy, shape)
        exact = _widest(dy.device)
        sums = torch.stack([dy.sum(dims, dtype=exact), (dy * centred).sum(dims, dtype=exact)])
        gradients: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            total = mpi_ops.allreduce(
                sums, name="sync_batch_norm.sum_dy", op=ReduceOp.SUM, process_set=ctx.process_set
            )
            mean_dy, mean_dy_xmu = total / ctx.count
            slope = _like(mean_dy_xmu * inverse_std.square(), dy, shape)
            scale = _like(inverse_std if weight is None else inverse_std * weight, dy, shape)
            rest = dy - _like(mean_dy, dy, shape) - centred * slope
            gradients[0] = (rest * scale).to(input.dtype)
        if ctx.needs_input_grad[1]:
            gradients[1] = (sums[1] * inverse_std).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            gradients[2] = sums[0].to(weight.dtype)
        return (*gradients, None, None)


_normalize: Callable[..., tuple[Tensor, Tensor, Tensor]] = untraced(_SyncBatchNorm.apply)


def _whole_batch(input: Tensor, process_set: ProcessSet) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values of each channel, over all ranks.

    Ranks exchange means and variances, which are combined by the pairwise formula of Chan, Golub
    and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979).
    Sums of squares would lose precision.
    """
    dims, _ = _channels(input)
    channels = input.shape[1]
    count = input.numel() // max(channels, 1)
    # Means, variances and the number of values; a rank without values contributes zeros.
    exact = _widest(input.device)
    row = torch.zeros(1, 2 * channels + 1, dtype=exact, device=input.device)
    if count:
        variance, mean = torch.var_mean(_wide(input), dims, correction=0)
        row[0] = torch.cat([mean.to(exact), variance.to(exact), row.new_tensor([count])])
    rows = mpi_ops.allgather(row, "sync_batch_norm.statistics", process_set)
    means, variances, counts = torch.split(rows, [channels, channels, 1], dim=1)
    total = counts.sum()
    if total < 2:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{tuple(input.shape)}, and {int(total)} per channel from all ranks together"
        )
    mean = (means * counts).sum(0) / total
    squares = ((variances + (means - mean).square()) * counts).sum(0)
    return mean, squares / total, total


def _channels(input: Tensor) -> tuple[list[int], list[int]]:
    """Return the dimensions over which a channel extends, and the shape of a value per channel."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    return dims, [-1 if dim == 1 else 1 for dim in range(input.dim())]


def _widest(device: torch.device) -> torch.dtype:
    """Return the dtype in which statistics of a device are exchanged."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def _wide(tensor: Tensor) -> Tensor:
    """Return 16-bit values as float32, other tensors as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _like(values: Tensor, tensor: Tensor, shape: list[int]) -> Tensor:
    return values.to(tensor.dtype).view(shape)


__all__ = ["SyncBatchNorm"]
