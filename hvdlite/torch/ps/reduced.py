"""The parameters of a model that go by allreduce, beside those that go by servers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvdlite.torch import optimizer as allreduce_optimizer
from hvdlite.torch.mpi_ops import Max, allreduce


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
        self._optimizer: Any = allreduce_optimizer.DistributedOptimizer(
            alone, [(name, tensor) for tensor, name in names.items()], op=op,
            backward_passes_per_step=backward_passes_per_step,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Wait until all gradients are reduced."""
        self._optimizer.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Let `step` find gradients that `synchronize` has reduced."""
        context: AbstractContextManager[None] = self._optimizer.skip_synchronize()
        return context

    def agree(self, found_inf: torch.Tensor) -> bool:
        """Return whether a rank has found an overflow: all of them skip the step then."""
        return bool(allreduce(found_inf.detach().clone(), op=Max, name="ps.found_inf").item())

    def step(self, owner: torch.optim.Optimizer, grad_scale: torch.Tensor | None) -> None:
        """Make a step with the numbers and the state of `owner`.

        Gradients are divided by `grad_scale` before, where a loss scaler has left that to us.
        """
        for group, own in zip(self._optimizer.param_groups, owner.param_groups, strict=True):
            group.update((key, value) for key, value in own.items() if key != "params")
        self._optimizer.state = owner.state
        if grad_scale is None:
            self._optimizer.step()
            return
        self.synchronize()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale.to(parameter.grad.dtype))
        with self.skip_synchronize():
            self._optimizer.step()
