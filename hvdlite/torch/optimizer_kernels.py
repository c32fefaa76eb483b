"""The formulas of torch's optimizers, applied to flat tensors with the options of a param group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from hvdlite.torch.subclass import Wrapped

Group = dict[str, Any]
# Elements of a tensor at most, where every operation of a formula goes over a whole tensor. Memory
# for results that are much larger comes anew from the system each time; with many small pieces the
# calls take longer than the work. Measured on ResNet-50 and a small transformer.
PIECE = 1 << 19
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@dataclass
class Run:
    """Parameters that lie side by side in flat buffers, as one tensor."""

    data: torch.Tensor
    gradient: torch.Tensor
    fresh: bool  # there is no state yet, and the formula wants to make it from the gradient
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def pieces(self) -> Iterator[Run]:
        """The same cut into tensors of `PIECE` elements; each counts steps, the first for all."""
        for start in range(0, max(1, self.data.numel()), PIECE):  # none is a piece too
            piece = slice(start, start + PIECE)
            state = {name: value[piece] for name, value in self.state.items() if name != "step"}
            if "step" in self.state:
                state["step"] = self.state["step"].clone() if start else self.state["step"]
            yield Run(self.data[piece], self.gradient[piece], self.fresh, state)


class Formula:
    """One of torch's optimizers."""

    def __init__(self, kind: type[torch.optim.Optimizer], function: Callable[..., Any]) -> None:
        self.kind = kind
        self.function = function
        self._accepted = {*inspect.signature(function).parameters} - {"params"}

    # Whether a parameter without state is another case for the formula than one with zeros.
    knows_fresh = False

    def names(self, group: Group) -> tuple[str, ...]:
        """What the optimizer's state has for each parameter; "step" is a scalar."""
        raise NotImplementedError

    def apply(self, group: Group, runs: Sequence[Run], scaler: dict[str, Any]) -> None:
        """Make a step. All runs are of one dtype, and all fresh or none.

        `scaler` has what ``torch.amp.GradScaler`` gives to a fused optimizer.
        """
        raise NotImplementedError

    def _prepare(self, group: Group, runs: Sequence[Run]) -> tuple[Group, Sequence[Run]]:
        """The options of this moment as the function names them, and what to apply it to."""
        first = runs[0].data
        on_host = first.device.type == "cpu"
        options = {name: value for name, value in group.items() if name in self._accepted}
        undecided = group.get("foreach") is None and group.get("fused") is None
        # On the CPU the fused kernel reads and writes everything once, and not once for each
        # operation. It rounds once too, where 16 bits are rounded after each operation otherwise:
        # those numbers would not be the same. Elsewhere a default has its reasons, and the count
        # of steps its place.
        if undecided and on_host and first.dtype not in _SIXTEEN_BITS:
            options["fused"] = True
        if on_host and not options.get("fused"):
            runs = [piece for run in runs for piece in run.pieces()]
        return options, runs


class _SGD(Formula):
    knows_fresh = True  # the first momentum is the gradient, without dampening

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def apply(self, group: Group, runs: Sequence[Run], scaler: dict[str, Any]) -> None:
        options, runs = self._prepare(group, runs)
        momenta = [None if run.fresh else run.state.get("momentum_buffer") for run in runs]
        self.function(
            [run.data for run in runs],
            [run.gradient for run in runs],
            momenta,
            has_sparse_grad=False,
            **options,
            **scaler,
        )
        for run, momentum in zip(runs, momenta, strict=True):
            if run.fresh and momentum is not None:
                run.state["momentum_buffer"].copy_(momentum)


class _Adam(Formula):
    def names(self, group: Group) -> tuple[str, ...]:
        names = ("step", "exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def apply(self, group: Group, runs: Sequence[Run], scaler: dict[str, Any]) -> None:
        options, runs = self._prepare(group, runs)
        beta1, beta2 = group["betas"]
        self.function(
            [run.data for run in runs],
            [run.gradient for run in runs],
            [run.state["exp_avg"] for run in runs],
            [run.state["exp_avg_sq"] for run in runs],
            [run.state["max_exp_avg_sq"] for run in runs] if group["amsgrad"] else [],
            [run.state["step"] for run in runs],
            beta1=beta1,
            beta2=beta2,
            **options,
            **scaler,
        )


_FORMULAS = (  # a derived class before its base
    _Adam(torch.optim.AdamW, adamw),
    _Adam(torch.optim.Adam, adam),
    _SGD(torch.optim.SGD, sgd),
)


def formula_of(optimizer: torch.optim.Optimizer) -> Formula | None:
    """The formula of a plain SGD, Adam or AdamW, wrapped by `DistributedOptimizer` or not.

    None for others, a class that changes the step of one of them included.
    """
    own = next(cls for cls in type(optimizer).__mro__ if not issubclass(cls, Wrapped))
    for formula in _FORMULAS:
        if issubclass(own, formula.kind):
            same = all(
                inspect.unwrap(getattr(own, name)) is inspect.unwrap(getattr(formula.kind, name))
                for name in ("step", "_init_group")
            )
            return formula if same else None
    return None
