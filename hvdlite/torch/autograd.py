"""The collectives as torch's autograd sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvdlite.common.forms import Forms

Function = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class _Collective(torch.autograd.Function):
    """One blocking collective in the graph; on backward its adjoint runs, on every rank alike."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch leaves the arguments to the subclass
        ctx: Any, forward: Function, adjoint: Function, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.adjoint = adjoint
        outputs = tuple(forward(list(tensors)))
        ctx.mark_non_differentiable(*(each for each in outputs if not _has_gradient(each)))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.adjoint(list(gradients))


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class TorchForms(Forms[torch.Tensor]):
    """The forms of all collectives; blocking ones that give new tensors are differentiable."""

    def differentiable(
        self, tensors: Sequence[torch.Tensor], forward: Function, adjoint: Function
    ) -> list[torch.Tensor]:
        """``forward(tensors)``, recorded where gradients are wanted."""
        wanted = torch.is_grad_enabled() and any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
        )
        if not wanted:
            return forward(list(tensors))
        outputs: tuple[torch.Tensor, ...] = _Collective.apply(forward, adjoint, *tensors)  # type: ignore[no-untyped-call]
        return list(outputs)

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of zeros of the same shape, dtype and device."""
        return torch.zeros_like(tensor)
