"""Broadcasts of parameters, optimizer state and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvdlite import as_horovod
from hvdlite.common.api.objects import allgather_object, broadcast_object
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.torch import mpi_ops
from hvdlite.torch.optimizer_state import OptimizerState
from hvdlite.torch.subclass import OptimizerMixin


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | list[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy tensors of the global rank `root_rank` to all ranks, in place; blocks.

    `params` is a dict such as ``model.state_dict()`` (in the order of its keys), or a list of
    tensors or of ``(name, tensor)`` tuples; None among the tensors is left out. Every rank
    gives tensors of the same shapes and dtypes. Raises `ValueError` for anything else.
    """
    handles = [
        mpi_ops.broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in _named(params)
        if tensor is not None
    ]
    for handle in handles:
        mpi_ops.synchronize(handle)


def _named(params: Any) -> Iterable[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, list):
        return [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    raise ValueError(f"invalid params of type: {type(params)}; give a dict or a list")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the state and the options of an optimizer from the global rank `root_rank`; blocks.

    The state of the optimizer must belong to its parameters, and all ranks have the same
    parameters. Ranks without state get it without a step: tensors with the strides that they have
    on the root, which share memory where they do so there. `model` has no effect.

    Raises `ValueError` for LBFGS, whose state does not belong to parameters, and on a rank whose
    optimizer has other parameters than the root's.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")

    def send(blocks: list[torch.Tensor]) -> None:
        named = [(f"optimizer_state.{index}", block) for index, block in enumerate(blocks)]
        broadcast_parameters(named, root_rank, process_set)

    share_optimizer_state(optimizer, root_rank, process_set, send)


def share_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    process_set: ProcessSet,
    send: Callable[[list[torch.Tensor]], None],
) -> None:
    """Do the work of `broadcast_optimizer_state`; `send` broadcasts blocks of bytes in place."""
    if isinstance(optimizer, OptimizerMixin) and optimizer.share_state(root_rank, process_set):
        return
    is_root = mpi_ops.rank() == root_rank
    state = OptimizerState.of(optimizer) if is_root else None
    state = broadcast_object(state, root_rank, "optimizer_state", process_set)
    if not is_root:
        state.allocate(optimizer)
    send(state.memory)
    if not is_root:
        state.install(optimizer)
    leave_zero_gradients(optimizer)


def leave_zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give each trainable parameter without a gradient zeros, under the name horovod only.

    Horovod leaves such gradients behind, and some scripts rely on them: they broadcast ``p.grad``.
    """
    if not as_horovod.active():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
