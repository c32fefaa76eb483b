"""Which optimizers can step over shards: those that treat each element on its own.

A shard is a piece of many parameters in a row. An optimizer that looks at shapes, at norms of
parameters, or at several elements at once would make another step there, without any error.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

Group = dict[str, Any]
# Optimizers of torch and of known libraries, by the name of their class -> what they look at.
_KNOWN = {
    "lbfgs": "all parameters together",
    "sparseadam": "sparse gradients",
    "adafactor": "rows and columns of a parameter",
    "muon": "matrices",
    "lamb": "norms of parameters",
    "fusedlamb": "norms of parameters",
    "lars": "norms of parameters",
    "larc": "norms of parameters",
    "novograd": "norms of gradients",
    "shampoo": "matrices",
    "distributedshampoo": "matrices",
    "soap": "matrices",
    "kfac": "layers",
    "adalomo": "rows and columns of a parameter",
    "came": "rows and columns of a parameter",
    "galore": "matrices",
    "galoreadamw": "matrices",
    "adammini": "blocks of a parameter",
    "adam_mini": "blocks of a parameter",
}
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_DOUBLE = ("param_groups", "state", *_HOOKS)
_STEPS = 3
_SHAPES = ((3, 4), (5,), (2, 2, 2))
_EXPLANATION = (
    "shard_state=True steps over a flat shard, which is a piece of many parameters, so that it "
    "needs an optimizer that treats each element on its own, as SGD, Adam and AdamW do. Leave "
    "shard_state out"
)


def check_elementwise(
    optimizer: torch.optim.Optimizer, wrapped: type, remedy: str = _EXPLANATION
) -> frozenset[str]:
    """Raise `ValueError` for an optimizer that is known, or found, to look beyond one element.

    A few steps with small tensors of its own are made by the class `wrapped`, for each group.
    Returns the names of the state that is one for all elements of a parameter, such as counts.
    """
    for cls in wrapped.__mro__:
        if cls.__name__.lower() in _KNOWN:
            raise ValueError(
                f"{wrapped.__name__} looks at {_KNOWN[cls.__name__.lower()]}: {remedy}"
            )
    common: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        reason = _objection(optimizer, wrapped, group, common)
        if reason:
            raise ValueError(f"{wrapped.__name__}, group {number}: {reason}: {remedy}")
    return frozenset(common)


def _objection(
    optimizer: torch.optim.Optimizer, wrapped: type, group: Group, common: set[str]
) -> str:
    """Return what a step over one flat tensor does differently; empty where it does not.

    Adds to `common` the names of its state that is one for all elements.
    """
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
    gradients = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
        for _ in range(_STEPS)
    ]
    flat_gradients = [[_flat(step)] for step in gradients]
    try:
        apart, _ = _train(optimizer, wrapped, group, values, gradients)
        together, state = _train(optimizer, wrapped, group, [_flat(values)], flat_gradients)
    except Exception as error:
        return f"a step over flat tensors raises {type(error).__name__}: {error}"
    if not torch.allclose(_flat(apart), together[0].detach(), rtol=1e-9, atol=1e-12):
        return "a step over flat tensors gives other values than one over the parameters"
    for parameter, entries in state.items():
        if isinstance(parameter, torch.Tensor):
            common |= {
                name
                for name, value in entries.items()
                if value is not None and getattr(value, "shape", None) != parameter.shape
            }
    return ""


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _train(
    optimizer: torch.optim.Optimizer,
    wrapped: type,
    group: Group,
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> tuple[list[torch.Tensor], dict[Any, Any]]:
    """Return the parameters after steps with these gradients, and the optimizer's state."""
    parameters: list[torch.Tensor] = [torch.nn.Parameter(value.clone()) for value in values]
    groups = [{**group, "params": parameters}]
    if not group.get("lr", 1):
        groups[0]["lr"] = 0.1  # as at the start of a warm-up, where no step shows anything
    state: Any = defaultdict(dict)
    trial: Any = object.__new__(wrapped)  # What the steps count is not for the user's optimizer.
    trial.__dict__.update({name: _copy(value) for name, value in vars(optimizer).items()})
    trial.__dict__["param_groups"] = groups
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        take_over(trial, step_over(trial, wrapped, groups, state))
    return [parameter.detach() for parameter in parameters], state


def _copy(value: Any) -> Any:
    """Return a copy of an attribute in which an optimizer may count; of all else the thing."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if type(value) in (dict, list, set) else value


@torch.no_grad()
def step_over(
    optimizer: torch.optim.Optimizer, wrapped: type, groups: list[Group], state: Any
) -> Any:
    """Make the step of the class `wrapped` for other parameters and state, without its hooks.

    Returns the double of the optimizer that has made it: `take_over` keeps what it has counted.
    """
    double: Any = object.__new__(wrapped)
    double.__dict__.update(vars(optimizer))
    double.__dict__["param_groups"] = groups
    double.__dict__["state"] = state
    # A step that calls the one of its base class would find them there.
    double.__dict__.update({name: OrderedDict() for name in _HOOKS})
    inspect.unwrap(wrapped.step)(double)  # type: ignore[attr-defined]
    return double


def take_over(optimizer: torch.optim.Optimizer, double: Any) -> None:
    """Give an optimizer the attributes and options that a step of its double has left behind.

    Some optimizers count their steps there, in the place of the state of a parameter.
    """
    own = vars(optimizer)
    for name, value in vars(double).items():
        if name not in _OF_DOUBLE and own.get(name, own) is not value:
            own[name] = value
    for group, stepped in zip(optimizer.param_groups, double.param_groups, strict=True):
        group.update({name: value for name, value in stepped.items() if name != "params"})


def beside(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what an optimizer's state has that belongs to no parameter: a count, mostly."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
