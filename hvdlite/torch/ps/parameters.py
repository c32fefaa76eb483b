"""Which parameters go by the servers, under which names, and what the servers hear of them."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.gradients.buckets import check_names
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.tables.row_store import NORMAL
from hvdlite.torch import optimizer as allreduce_optimizer
from hvdlite.torch.ps.embedding import ROWS, serve_rows

MARK = "_hvdlite_by_servers"  # An attribute of parameters.


def set_param_ps(
    module_or_parameter: torch.nn.Module | torch.nn.Parameter, init_in_server: bool = False,
    seed: int = 0, initializer: str = NORMAL, scale: float = 1.0,
) -> None:  # fmt: skip
    """Let a parameter, or all of a module, go by the servers, and others by allreduce.

    Takes effect in the `DistributedOptimizer` that is made afterwards without `parameters`.

    With `init_in_server`, the rows of each ``nn.Embedding`` of the module lie on the servers alone:
    its weight becomes a tensor without rows (and may be on the device "meta" before), its forward
    pulls the rows of the batch, and steps push their gradients. What a row begins with depends on
    `seed`, the name of the weight and the number of the row; `initializer` is "normal" (`scale` is
    the standard deviation), "uniform" (from -`scale` to `scale`) or "zeros". Raises `ValueError`
    for a module without embeddings, and for embeddings with max_norm or scale_grad_by_freq.
    """
    if init_in_server:
        serve_rows(module_or_parameter, seed, initializer, scale)
    if isinstance(module_or_parameter, torch.nn.Module):
        for parameter in module_or_parameter.parameters():
            setattr(parameter, MARK, True)
    else:
        setattr(module_or_parameter, MARK, True)


def served_names(
    every: Mapping[torch.Tensor, str], parameters: Sequence[str] | None
) -> dict[torch.Tensor, str]:
    """Return the parameters that go by the servers."""
    if parameters is None:
        marked = {tensor: name for tensor, name in every.items() if hasattr(tensor, MARK)}
        return marked or dict(every)
    if isinstance(parameters, str):
        raise ValueError(f"parameters={parameters!r} is a text: give a list of names and patterns")
    names = set(matching(every.values(), parameters))
    return {tensor: name for tensor, name in every.items() if name in names}


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]]
) -> dict[torch.Tensor, str]:
    """Return the names of the parameters of an optimizer. Raises ValueError for wrong ones."""
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
    check_names([name for name, _ in pairs])
    names = {parameter: name for name, parameter in pairs}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if missing := [parameter for parameter in own if parameter not in names]:
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the {len(own)} parameters of the optimizer"
        )
    return {parameter: names[parameter] for parameter in own}


def specs_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> list[TensorSpec]:
    """Return what the table of an optimizer consists of."""
    return [
        TensorSpec(
            names[parameter], str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape),
            number,
        )
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter in names and not hasattr(parameter, ROWS)
    ]  # fmt: skip


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches. Raises ValueError for one that matches nothing."""
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"parameters={pattern!r} matches no name, such as {names[0]!r}")
    return [name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)]


# The parameters of a model that go by allreduce, beside those that go by servers.


class ReducedParameters:
    """Steps of some parameters of an optimizer, with gradients that are reduced among all ranks."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], op: int,
        backward_passes_per_step: int,
    ) -> None:  # fmt: skip
        alone = copy.copy(optimizer)
        alone.param_groups = [
            {**group, "params": [each for each in group["params"] if each in names]}
            for group in optimizer.param_groups
        ]
        self._parameters = list(names)
        self.optimizer: Any = allreduce_optimizer.DistributedOptimizer(
            alone, [(name, tensor) for tensor, name in names.items()], op=op,
            backward_passes_per_step=backward_passes_per_step,
        )  # fmt: skip

    def step(self, owner: torch.optim.Optimizer, grad_scale: torch.Tensor | None) -> None:
        """Make a step with the numbers and the state of `owner`.

        Gradients are divided by `grad_scale` before, where a loss scaler has left that to us.
        """
        for group, own in zip(self.optimizer.param_groups, owner.param_groups, strict=True):
            group.update((key, value) for key, value in own.items() if key != "params")
        self.optimizer.state = owner.state
        if grad_scale is None:
            self.optimizer.step()
            return
        self.optimizer.synchronize()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale.to(parameter.grad.dtype))
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
