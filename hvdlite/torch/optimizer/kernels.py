"""The kernels of torch's optimizers, applied to flat tensors with the options of a param group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from hvdlite.torch.functions import span_of
from hvdlite.torch.optimizer.flat_gradients import FlatGradients
from hvdlite.torch.subclass import wrapped_class

Group = dict[str, Any]
# The most elements of a tensor where every operation of a kernel goes over whole tensors. For much
# larger results the system provides new memory each time; with many small pieces the calls take
# longer than the work. Measured on ResNet-50 and a small transformer.
PIECE = 1 << 19


@dataclass
class ParameterRun:
    """Parameters that are neighbours in flat buffers, as one tensor."""

    data: torch.Tensor
    gradient: torch.Tensor
    fresh: bool  # There is no state yet, and the kernel makes it from the gradient.
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def pieces(self) -> Iterator[ParameterRun]:
        """Yield the run in pieces of `PIECE` elements, at least one.

        Every piece counts steps, and the count of the first piece is that of the run.
        """
        for start in range(0, max(1, self.data.numel()), PIECE):
            piece = slice(start, start + PIECE)
            state = {name: value[piece] for name, value in self.state.items() if name != "step"}
            if "step" in self.state:
                state["step"] = self.state["step"].clone() if start else self.state["step"]
            yield ParameterRun(self.data[piece], self.gradient[piece], self.fresh, state)


class OptimizerKernel:
    """The step of one of torch's optimizers, as a function of flat tensors."""

    # Whether a parameter without state is another case for the kernel than one with zeros.
    makes_state = False

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], function: Callable[..., Any]
    ) -> None:
        self.optimizer_class = optimizer_class
        self.function = function
        self._accepted = {*inspect.signature(function).parameters} - {"params"}

    def names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state of each parameter; "step" is a scalar."""
        raise NotImplementedError

    def apply(self, group: Group, runs: Sequence[ParameterRun], scaler: dict[str, Any]) -> None:
        """Make a step. All runs are of one dtype, and all fresh or none.

        `scaler` has what ``torch.amp.GradScaler`` sets on a fused optimizer.
        """
        raise NotImplementedError

    def _prepare(
        self, group: Group, runs: Sequence[ParameterRun]
    ) -> tuple[Group, Sequence[ParameterRun]]:
        """Return the options as the function names them, and the runs to apply it to."""
        first = runs[0].data
        on_host = first.device.type == "cpu"
        options = {name: value for name, value in group.items() if name in self._accepted}
        undecided = group.get("foreach") is None and group.get("fused") is None
        # On the CPU the fused kernel reads and writes every element once for the whole step, the
        # others once for each operation. It also rounds once, which would give other results for
        # 16 bits, where the others round after each operation. On other devices torch's default
        # decides, and with it the device of the count of steps.
        if undecided and on_host and first.dtype not in (torch.float16, torch.bfloat16):
            options["fused"] = True
        if on_host and not options.get("fused"):
            runs = [piece for run in runs for piece in run.pieces()]
        return options, runs


class _SGD(OptimizerKernel):
    makes_state = True  # The first momentum is the gradient, without dampening.

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def apply(self, group: Group, runs: Sequence[ParameterRun], scaler: dict[str, Any]) -> None:
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


class _Adam(OptimizerKernel):
    def names(self, group: Group) -> tuple[str, ...]:
        names = ("step", "exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def apply(self, group: Group, runs: Sequence[ParameterRun], scaler: dict[str, Any]) -> None:
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


_KERNELS = (  # A derived class comes before its base.
    _Adam(torch.optim.AdamW, adamw),
    _Adam(torch.optim.Adam, adam),
    _SGD(torch.optim.SGD, sgd),
)


def kernel_of(optimizer: torch.optim.Optimizer) -> OptimizerKernel | None:
    """Return the kernel of a plain SGD, Adam or AdamW, wrapped by `DistributedOptimizer` or not.

    None for others, those included whose class changes the step of one of them.
    """
    wrapped = wrapped_class(optimizer)
    for kernel in _KERNELS:
        if issubclass(wrapped, kernel.optimizer_class):
            unchanged = all(
                inspect.unwrap(getattr(wrapped, name))
                is inspect.unwrap(getattr(kernel.optimizer_class, name))
                for name in ("step", "_init_group")
            )
            return kernel if unchanged else None
    return None


def reason_against_fusing(
    kernel: OptimizerKernel | None,
    optimizer: torch.optim.Optimizer,
    segments: Sequence[FlatGradients],
) -> str:
    """Return why the step cannot be fused; empty when it can."""
    if kernel is None:
        return (
            f"{type(optimizer).__name__} is not one of torch's SGD, Adam and AdamW, or changes "
            "their step"
        )
    for number, group in enumerate(optimizer.param_groups):
        for option in ("differentiable", "capturable"):
            if group.get(option):
                return f"group {number} of the optimizer has {option}=True"
    parameters = [parameter for flat in segments for parameter in flat.parameters]
    if len(set(parameters)) < len(parameters):
        return "a parameter is in two segments"
    group_of = {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    for parameter in parameters:
        reason = ""
        if parameter not in group_of:
            reason = "is in a segment, but not in the optimizer"
        elif not parameter.is_floating_point():
            reason = f"is {parameter.dtype}: flat buffers are for real numbers"
        elif type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            reason = f"is a {type(parameter.data).__name__} of layout {parameter.layout}"
        if reason:
            return f"a parameter of shape {tuple(parameter.shape)} {reason}"
    neighbours = (pair for flat in segments for pair in pairwise(flat.parameters))
    if not any(group_of[first] == group_of[second] for first, second in neighbours):
        return "no segment has two neighbouring gradients of one group of the optimizer"
    return _reason_against_memory(parameters)


def _reason_against_memory(parameters: Sequence[torch.Tensor]) -> str:
    """Object to parameters that share memory: each would get memory of its own."""
    spans = []
    for parameter in parameters:
        if parameter.numel():
            first, last = span_of(parameter)
            begin = parameter.data_ptr()
            end = begin + last - first
            spans.append((str(parameter.device), begin, end, tuple(parameter.shape)))
    for (device, _, end, shape), (next_device, begin, _, next_shape) in pairwise(sorted(spans)):
        if device == next_device and begin < end:
            return f"parameters of shapes {shape} and {next_shape} share memory"
    return ""
