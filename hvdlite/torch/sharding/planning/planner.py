"""Strategies for all operators of a module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.layouts.layout import whole
from hvdlite.common.layouts.operators import (
    Operator,
    Strategy,
    check_strategy,
    cuts_of,
    elementwise,
    nearest_strategy,
)
from hvdlite.common.layouts.propagation import (
    DYNAMIC,
    PROPAGATION,
    RECURSIVE,
    check_search,
    find_choices,
    leaf_layouts,
    propagate,
)
from hvdlite.common.layouts.search import Ends, Speed
from hvdlite.common.runtime.current import find
from hvdlite.torch.sharding.planning.plans import Found, Plan, Planned
from hvdlite.torch.sharding.planning.record import Record
from hvdlite.torch.sharding.planning.tracing import Traced, trace
from hvdlite.torch.sharding.rules.rule import tensors_of

_STRATEGY = "_hvdlite_strategy"


def set_strategy(module: torch.nn.Module, strategy: Strategy) -> torch.nn.Module:
    """Give the operator of a module a strategy, which `plan` and `shard` keep; return the module.

    The strategy of a Linear is that of a product X [.., in] x W [in, out]: ((a, b), (b, c)).
    Raises `TypeError` and `ValueError` for what is no strategy.
    """
    check_strategy(strategy, type(module).__name__)
    setattr(module, _STRATEGY, strategy)
    return module


def plan(
    module: torch.nn.Module,
    example: Any,
    strategies: Mapping[str, Strategy] | None = None,
    mesh: Any = None,
    fully_use_devices: bool = True,
    search: str = PROPAGATION,
    memory_limit: int | None = None,
    optimizer_states: int | None = None,
) -> Plan:
    """Return how each operator and parameter of a module would be cut, and the bytes it costs.

    `example` is an input, or a tuple of inputs, of the whole batch; meta tensors do. `strategies`
    adds to those of `set_strategy`, by the names of submodules or of the operators that the plan
    shows, or "input0", "output0" and so on. `mesh` None: all ranks of the job.

    `search` "propagation" keeps to the neighbours of what has a strategy; "dynamic_programming"
    finds those by which a step of training, forward and backward, takes the least time for bytes
    and operations, of which bytes between hosts take more; "recursive_programming" does so for one
    prime factor of the ranks after the other, for large models. With these a rank holds at most
    `memory_limit` bytes of parameters; with `optimizer_states`, how many numbers an optimizer keeps
    of each (Adam: 2), gradients and its state are among them. Raises `TypeError` and `ValueError`
    for strategies that do not fit, which name one that does.
    """
    check_search(search)
    for name, limit in (("memory_limit", memory_limit), ("optimizer_states", optimizer_states)):
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            raise TypeError(f"{name} is an int, not {limit!r}")
    refuse_keras(module)
    runtime = find()
    ranks = mesh.size() if mesh is not None else 1 if runtime is None else runtime.topology.size
    inputs = example if isinstance(example, tuple) else (example,)
    traced = trace(module, inputs)
    recorder = traced.record
    given = {
        name: getattr(submodule, _STRATEGY)
        for name, submodule in module.named_modules()
        if hasattr(submodule, _STRATEGY)
    }
    configured = _by_operators({**given, **(strategies or {})}, module, recorder)
    operators = _with_ends(traced, configured)
    _check_strategies(module, operators, configured, ranks)
    if search in (DYNAMIC, RECURSIVE):
        named = {name: each.element_size() for name, each in module.named_parameters()}
        copies = {
            name: 2 + optimizer_states
            for name, each in module.named_parameters()
            if each.requires_grad and optimizer_states is not None
        }
        speed = Speed(_hosts(mesh, ranks))
        ends = Ends(named, traced.inputs, traced.outputs, memory_limit, copies, speed)
        choices = find_choices(
            operators, configured, ranks, ends, fully_use_devices, search == RECURSIVE
        )
    elif memory_limit is not None or optimizer_states is not None:
        name = "optimizer_states" if memory_limit is None else "memory_limit"
        raise ValueError(f"{name} needs search={DYNAMIC!r} or {RECURSIVE!r}")
    else:
        choices = propagate(operators, configured, ranks, fully_use_devices, traced.inputs)
    leaves = leaf_layouts(operators, choices)
    layouts = {
        name: leaves.get(first) or whole(tensor.ndim, ranks)
        for name, (first, tensor) in named_tensors(module).items()
    }
    results = {
        each.name: math.prod(each.output.shape) * each.bytes_per_element for each in operators
    }
    planned = {
        name: Planned(
            choice.strategy,
            choice.edge_bytes + choice.own_bytes,
            results[name] // math.prod(choice.output.cuts),
        )
        for name, choice in choices.items()
    }
    planned |= {
        name: Planned((cuts,), 0, tensor.numel() * tensor.element_size() // math.prod(cuts))
        for name, tensor in module.named_parameters()
        for cuts in [layouts[name].cuts]
    }
    entering = [
        choices[name].output if name in choices else leaves.get(name) or whole(each.ndim, ranks)
        for name, each in zip(traced.inputs, tensors_of(inputs, {}), strict=True)
    ]
    leaving = {
        index: choices[f"output{index}"].output
        for index in range(len(traced.outputs))
        if f"output{index}" in choices
    }
    found = Found(traced, operators, choices, ranks)
    return Plan(planned, layouts, entering, leaving, found)


def _hosts(mesh: Any, ranks: int) -> tuple[int, ...]:
    """Return the host of each rank of a mesh; none where that is not known."""
    runtime = find()
    of_mesh = getattr(mesh, "mesh", None)
    members = range(ranks) if of_mesh is None else [int(each) for each in of_mesh.flatten()]
    host_of = {} if runtime is None else runtime.topology.host_of
    return tuple(host_of[each] for each in members) if set(members) <= set(host_of) else ()


def _check_strategies(
    module: torch.nn.Module,
    operators: Sequence[Operator],
    configured: Mapping[str, Strategy],
    ranks: int,
) -> None:
    """Raise `ValueError` for a strategy that cannot be met, with one that can."""
    by_name = {each.name: each for each in operators}
    modules = dict(module.named_modules())
    for name, strategy in configured.items():
        operator = by_name.get(name)
        if operator is None:
            continue  # `propagate` says so.
        try:
            cuts_of(operator, strategy, ranks)
        except ValueError as error:
            fitting = nearest_strategy(operator, strategy, ranks)
            of = f" (of {type(modules[name]).__name__} {name!r})" if name in modules else ""
            raise ValueError(f"{error}{of}; {fitting} would fit") from None


def refuse_keras(target: Any) -> None:
    """Raise `ValueError` for a model or a layer of Keras, and for a module that has one in it."""
    modules = target.named_modules() if isinstance(target, torch.nn.Module) else [("", target)]
    for name, module in modules:
        packages = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
        if packages & {"keras", "tf_keras"}:
            raise ValueError(
                f"{name or type(module).__name__} is of Keras, which is not sharded: its "
                "keras.distribution is missing with the torch backend, and shards nothing with "
                "TensorFlow's. Write the part with torch.nn, or divide the optimizer's state "
                "(DistributedOptimizer(shard_state=True)) or the data (hvd.data) instead"
            )


def _by_operators(
    configured: Mapping[str, Strategy], module: torch.nn.Module, recorder: Record
) -> dict[str, Strategy]:
    """Return strategies by the names of operators: that of the module itself is its first one's."""
    found = dict(configured)
    if "" in found:
        if recorder.first is None:
            raise ValueError(
                f"set_strategy: the {type(module).__name__} has no operator of its own: give the "
                "strategy to one of its submodules"
            )
        found.setdefault(recorder.first, found.pop(""))
    return found


def _with_ends(traced: Traced, configured: Mapping[str, Strategy]) -> list[Operator]:
    """Return the operators with one for each input and output that is configured."""
    record = traced.record
    before = [
        elementwise(name, [(f"{name} as it comes", record.shapes[name])], name)
        for name in traced.inputs
        if name in configured
    ]
    after = [
        elementwise(
            f"output{index}", [(name, record.shapes[name])], f"output{index} as it goes",
            bytes_per_element=record.dtypes[name].itemsize,
        )
        for index, name in enumerate(traced.outputs)
        if f"output{index}" in configured
    ]  # fmt: skip
    return [*before, *record.operators, *after]


def named_tensors(module: torch.nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    """Return parameters and buffers by all names that they have, each with its first name."""
    first: dict[int, str] = {}
    return {
        name: (first.setdefault(id(tensor), name), tensor)
        for name, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    }
