"""A module or a function that runs on parts of tensors, inside a data-parallel model.

Outside, each rank has its own share of the batch, of equal size. Inside, tensors are cut as the
plan says; parameters are DTensors, whose local tensors the part works on. Gradients are those of
the average over ranks of their losses: as they are, for the parameters inside; and as
`DistributedOptimizer` averages them, for what lies before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from hvdlite.common.base.warn import warn_user
from hvdlite.common.layouts.layout import Layout
from hvdlite.common.layouts.operators import Strategy, check_strategy
from hvdlite.common.layouts.propagation import check_search
from hvdlite.torch.sharding.dtensor import DTensor, Replicate, Shard, wrapped
from hvdlite.torch.sharding.planning.planner import named_tensors, refuse_keras
from hvdlite.torch.sharding.planning.tracing import ORIGINAL
from hvdlite.torch.sharding.runner import Runner

F = TypeVar("F", bound=Callable[..., Any])
# The cuts of each input or output, or None for those that are left to propagation.
Ends = tuple[tuple[int, ...] | None, ...]


def shard(
    fn_or_module: F,
    in_strategy: Ends | None = None,
    out_strategy: Ends | None = None,
    parameter_plan: Mapping[str, Sequence[int] | Layout] | None = None,
    mesh: Any = None,
    search: str = "propagation",
    fully_use_devices: bool = True,
    device: Any = None,
    level: Any = None,
    example: Any = None,
    memory_limit: int | None = None,
    strategies: Mapping[str, Strategy] | None = None,
    optimizer_states: int | None = None,
) -> F:
    """Cut a part of a model among ranks: by a strategy for its inputs, the rest by propagation.

    A module is changed and returned: its parameters become DTensors, under their names and with
    the values of rank 0. Make the optimizer after it. Of a module on the meta device each rank gets
    memory for its parts alone; load their values from a checkpoint afterwards. For a function, a
    function is returned, whose arguments are shares of a batch, and equal on all ranks where they
    are parameters. All ranks call `shard`, and what it returns, with shares of equal size.

    - `in_strategy`: for each tensor among the inputs a tuple of cuts of the whole batch, or None
      for those that it leaves to `set_strategy` and to propagation.
    - `out_strategy`: the same for the outputs: each rank gets its part. None: its share of the
      batch.
    - `strategies`: those of operators, by the names that the plan shows; they go before those of
      `set_strategy`.
    - `parameter_plan`: cuts, or a `Layout`, by the names of parameters.
    - `mesh`: what `mesh()` returns; None: the mesh with the fewest axes on which all layouts of
      parameters fit.
    - `fully_use_devices`: only strategies that use all ranks, where there are such.
    - `example`: an input, or a tuple of inputs, of this rank: a module with parameters needs it, as
      they are cut before an optimizer takes them. Meta tensors do.

    The part is recorded once for each shape of its inputs, and for each value of arguments that are
    no tensors, which are the same on all ranks. It then runs as a graph on local tensors, with the
    collectives that the plan says. `search`, `memory_limit` and `optimizer_states` are those of
    `plan`. `device` and `level` have no effect. Raises `TypeError` and `ValueError` for strategies
    that do not fit, a function in its first call.
    """
    check_search(search)
    if device is not None or level is not None:
        warn_user("shard(device, level) have no effect: hvdlite has one device and level")
    configured: dict[str, Strategy] = dict(strategies or {})
    for name, strategy in configured.items():
        check_strategy(strategy, name)
    for end, given in (("input", in_strategy), ("output", out_strategy)):
        if given is not None:
            check_strategy(tuple(each for each in given if each is not None), f"{end} strategy")
            configured |= {f"{end}{i}": (cuts,) for i, cuts in enumerate(given) if cuts is not None}
    _check_target(fn_or_module)
    if mesh is not None and not callable(getattr(mesh, "size", None)):
        raise TypeError(f"mesh is a DeviceMesh, such as sharding.mesh() returns, not {mesh!r}")
    options = {
        "fully_use_devices": fully_use_devices, "search": search, "memory_limit": memory_limit,
        "optimizer_states": optimizer_states,
    }  # fmt: skip
    runner = Runner(fn_or_module, configured, parameter_plan or {}, mesh, options)
    if isinstance(fn_or_module, torch.nn.Module):
        if example is None and any(True for _ in fn_or_module.parameters()):
            raise ValueError(
                "shard() of a module with parameters needs example=, an input of this rank: they "
                "are cut before an optimizer takes them"
            )
        runner.call = fn_or_module.forward
        if example is not None:
            runner.prepare(example if isinstance(example, tuple) else (example,))
        # Last, so that a module whose plan was refused may be sharded with another one.
        setattr(fn_or_module, ORIGINAL, runner.call)
        fn_or_module.forward = runner.run
        register: Any = fn_or_module._register_load_state_dict_pre_hook
        register(cut_what_is_loaded, with_module=True)
        for name, module in fn_or_module.named_modules():
            if name and any(isinstance(each, DTensor) for each in module._parameters.values()):
                module.register_forward_pre_hook(functools.partial(_refuse_alone, name))
        return fn_or_module

    @functools.wraps(fn_or_module)
    def run(*args: Any, **kwargs: Any) -> Any:
        return runner.run(*args, **kwargs)

    return run  # type: ignore[return-value]


def _check_target(target: Any) -> None:
    """Raise `ValueError` for a module that has a sharded one, or one of Keras, in it or is one."""
    refuse_keras(target)
    if isinstance(target, torch.nn.Module):
        for name, module in target.named_modules():
            if ORIGINAL in module.__dict__:
                raise ValueError(
                    f"{name or type(target).__name__} is sharded already: shard the whole, or "
                    "parts beside each other"
                )


def _refuse_alone(name: str, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse tensors that are not cut, which DTensor would do in words of its own.

    While the whole is recorded, other tensors stand for parameters.
    """
    cut = any(isinstance(each, DTensor) for each in module._parameters.values())
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)]
    if cut and not all(isinstance(each, DTensor) for each in tensors):
        raise ValueError(
            f"{name} is a part of a module that shard() has cut, and was called alone: call the "
            "whole, or shard each of the parts that you call one by one"
        )


def cut_what_is_loaded(module: Any, state_dict: Any, prefix: str, *others: Any) -> None:
    """Put this rank's parts in the place of whole tensors; a hook before a state dict is loaded.

    `Module.load_state_dict` copies plain tensors into plain ones only. What FSDP2 has cut further
    is left to torch's own functions.
    """
    for name, (_, held) in named_tensors(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(held, DTensor) and isinstance(value, torch.Tensor):
            part = None if isinstance(value, DTensor) else _part(value, held)
            if part is not None:
                state_dict[prefix + name] = wrapped(part, held._spec)


def _part(value: torch.Tensor, held: Any) -> torch.Tensor | None:
    """Return this rank's part of a tensor; None where it cannot be cut as a DTensor is."""
    if value.shape != held.shape:
        return None
    for axis, placement in enumerate(held.placements):
        if type(placement) is Shard:
            parts = value.chunk(held.device_mesh.size(axis), placement.dim)
            place = held.device_mesh.get_local_rank(axis)
            # The last ranks have no rows of a tensor with fewer than there are ranks.
            value = parts[place] if place < len(parts) else value.narrow(placement.dim, 0, 0)
        elif type(placement) is not Replicate:
            return None
    return value.detach().clone() if value.shape == held._local_tensor.shape else None
