"""The conditions under which an optimizer's step can be fused over segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from hvdlite.torch.flat_gradients import FlatGradients
from hvdlite.torch.optimizer_kernels import OptimizerKernel


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
        reason = _reason_against_parameter(parameter, parameter in group_of)
        if reason:
            return f"a parameter of shape {tuple(parameter.shape)} {reason}"
    neighbours = (pair for flat in segments for pair in pairwise(flat.parameters))
    if not any(group_of[first] == group_of[second] for first, second in neighbours):
        return "no segment has two neighbouring gradients of one group of the optimizer"
    return _reason_against_memory(parameters)


def _reason_against_parameter(parameter: torch.Tensor, in_optimizer: bool) -> str:
    if not in_optimizer:
        return "is in a segment, but not in the optimizer"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}: flat buffers are for real numbers"
    if type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
        return f"is a {type(parameter.data).__name__} of layout {parameter.layout}"
    return ""


def _reason_against_memory(parameters: Sequence[torch.Tensor]) -> str:
    """Object to parameters that share memory: each would get memory of its own."""
    spans = []
    for parameter in parameters:
        if parameter.numel():
            sizes = zip(parameter.shape, parameter.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in sizes)
            begin = parameter.data_ptr()
            end = begin + elements * parameter.element_size()
            spans.append((str(parameter.device), begin, end, tuple(parameter.shape)))
    for (device, _, end, shape), (next_device, begin, _, next_shape) in pairwise(sorted(spans)):
        if device == next_device and begin < end:
            return f"parameters of shapes {shape} and {next_shape} share memory"
    return ""
