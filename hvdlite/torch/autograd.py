"""The collectives as functions of torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.autograd.function import once_differentiable

from hvdlite.common.api.runner import EngineRunner

Function = Callable[[list[torch.Tensor]], list[torch.Tensor]]
F = TypeVar("F", bound=Callable[..., Any])
_is_compiling = torch.compiler.is_dynamo_compiling  # Asked in each call of a collective.


def untraced(function: F) -> F:
    """Return `function` so that ``torch.compile`` calls it instead of tracing into it.

    Communication is no part of a compiled graph. ``torch.compiler.disable`` alone would load the
    compiler into every program.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            disable: Any = torch.compiler.disable
            return disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    # The compiler shall not compile it, or what it calls, by itself either. Else it would do so
    # again for each name of a tensor, until it gives up with a warning. PyTorch before 2.7 cannot
    # be told so.
    found: Any = eval_frame
    hidden: Any = call
    if hasattr(found, "set_code_exec_strategy"):
        skip = found._FrameAction.SKIP
        strategy = found._FrameExecStrategy(skip, skip)
        found.set_code_exec_strategy(hidden.__code__, strategy)
        hidden._torchdynamo_disable = True
    return hidden  # type: ignore[no-any-return]


class _Collective(torch.autograd.Function):
    """One blocking collective in the graph; its adjoint runs on every rank in backward."""

    @staticmethod
    def forward(
        ctx: Any, forward: Function, adjoint: Function, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.adjoint = adjoint
        outputs = tuple(forward(list(tensors)))
        ctx.mark_non_differentiable(
            *(each for each in outputs if not (each.is_floating_point() or each.is_complex()))
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.adjoint(list(gradients))


class TorchRunner(EngineRunner[torch.Tensor]):
    """Runs collectives on torch tensors; blocking ones that return new tensors have a gradient."""

    def record(
        self, tensors: Sequence[torch.Tensor], forward: Function, adjoint: Function
    ) -> list[torch.Tensor]:
        """Return ``forward(tensors)``, recorded where gradients are wanted."""
        needs_gradient = torch.is_grad_enabled() and any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
        )
        if not needs_gradient:
            return forward(list(tensors))
        outputs: tuple[torch.Tensor, ...] = _Collective.apply(forward, adjoint, *tensors)  # type: ignore[no-untyped-call]
        return list(outputs)

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    def own_rows(self, tensor: torch.Tensor, rows: Any, position: int) -> torch.Tensor:
        start = sum(rows[:position])
        return tensor[start : start + rows[position]]

    def padded(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        missing = rows - tensor.shape[0]
        if missing <= 0:
            return tensor
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
