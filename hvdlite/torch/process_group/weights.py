"""The check that replicas have the same weights, by optimizers that know nothing of ranks.

A hook of all optimizers finds the models whose parameters they have (HVDLITE_CHECK_WEIGHTS):

- of `DistributedDataParallel`, all ranks of its process group have what it reduces;
- a `DTensor`, as of FSDP2 and of sharded operators, is compared along each axis of its mesh on
  which it is a replica: along others, ranks have different parts;
- `FullyShardedDataParallel` has replicas with HYBRID_SHARD and NO_SHARD.

What no two ranks have alike is not compared, which is said once. Ranks tell parameters from each
other by their order in the optimizer: names may depend on wrappers that only some ranks have.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hvdlite.common.base.warn import warn_user
from hvdlite.common.gradients.weights_check import WeightsCheck, check_by_setting
from hvdlite.common.tensors.comparison import Compared
from hvdlite.torch.subclass import OptimizerMixin
from hvdlite.torch.weights import Alike, weights_of, whole

# Optimizers of torch that divide the state of another one among the ranks.
_DIVIDING = "ZeroRedundancyOptimizer"
_FSDP1 = "FullyShardedDataParallel"
_FSDP1_PREFIX = "_fsdp_wrapped_module."  # It puts this into names.


class _Replicas:
    """What one optimizer has that some ranks have alike."""

    def __init__(
        self, names: dict[torch.Tensor, str], check: WeightsCheck, alike: Alike = whole
    ) -> None:
        self._check, self._alike = check, alike
        self._places = [(ref(parameter), name) for parameter, name in names.items()]

    def stepped(self, optimizer: Optimizer) -> None:
        """Compare where it is time to."""
        self._check.step(lambda: self._tensors(optimizer))

    def _tensors(self, optimizer: Optimizer) -> Iterator[Compared]:
        divided = any(base.__name__ == _DIVIDING for base in type(optimizer).__mro__)
        numbers: dict[torch.Tensor, str] = {}
        shown: dict[torch.Tensor, str] = {}
        for number, (place, name) in enumerate(self._places):
            parameter = place()
            if parameter is not None:
                numbers[parameter], shown[parameter] = f"{number}", name
        return weights_of(optimizer, numbers, state=not divided, alike=self._alike, shown=shown)


class _Model(_Replicas):
    """What one optimizer has of one `DistributedDataParallel`."""

    def __init__(self, model: Any, names: dict[torch.Tensor, str], check: WeightsCheck) -> None:
        super().__init__(names, check)
        self._model = ref(model)

    def stepped(self, optimizer: Optimizer) -> None:
        """Compare where it is time to, unless ranks may have uneven numbers of steps: Join."""
        model: Any = self._model()
        if model is not None and not model._join_config.enable:
            super().stepped(optimizer)


@cache
def watch_optimizers() -> None:
    """Look at all steps of all optimizers from now on; the first call counts."""
    followed: WeakKeyDictionary[Optimizer, list[_Replicas]] = WeakKeyDictionary()

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in followed:
            followed[optimizer] = _replicas_of(optimizer)
        for replicas in followed[optimizer]:
            replicas.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)


def _replicas_of(optimizer: Optimizer) -> list[_Replicas]:
    """Return what the optimizer has of replicas, in an order that ranks have in common.

    None for an optimizer inside another one, whose step is not over when its own is.
    """
    parameters = [each for group in vars(optimizer)["param_groups"] for each in group["params"]]
    on_meshes = [parameter for parameter in parameters if hasattr(parameter, "to_local")]
    wrapped = isinstance(optimizer, OptimizerMixin)  # It has a check of its own of all others.
    if wrapped and not on_meshes:
        return []
    objects = gc.get_objects()
    optimizers = [each for each in objects if issubclass(type(each), Optimizer)]
    if any(value is optimizer for each in optimizers for value in vars(each).values()):
        return []
    models = [] if wrapped else _fsdp1_models(parameters, objects)
    found = [*_along_axes(on_meshes, objects)]
    if not wrapped:
        found += [*_models_of(parameters, objects), *_of_fsdp1(models)]
    compared = bool(found) or (wrapped and len(on_meshes) < len(parameters))
    if not compared and (
        _are_divided(on_meshes)
        or any(
            model.process_group.size() > 1 and model.sharding_strategy.name != "NO_SHARD"
            for model, _ in models
        )
    ):
        warn_user(
            f"HVDLITE_CHECK_WEIGHTS compares nothing of {type(optimizer).__name__}: its parameters "
            "are divided among all ranks, and no two ranks have the same part"
        )
    return found


def _along_axes(parameters: Sequence[Any], objects: Sequence[Any]) -> Iterator[_Replicas]:
    """Yield what is compared of DTensors: a part along each axis of a mesh on which it is whole."""
    names = _names_of(parameters, objects)
    axes: dict[tuple[Any, int], dict[torch.Tensor, str]] = {}
    for parameter in parameters:
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate() and parameter.device_mesh.size(axis) > 1:
                key = parameter.device_mesh, axis
                axes.setdefault(key, {})[parameter] = names[parameter]
    places = {parameter: place for place, parameter in enumerate(names)}
    for (mesh, axis), known in axes.items():
        first = min(places[parameter] for parameter in known)
        check = _check(f"mesh.{axis}.{first}.{len(known)}", mesh.get_group(axis))
        if check is not None:
            yield _Replicas(known, check, functools.partial(_along, mesh, axis))


def _are_divided(parameters: Sequence[Any]) -> bool:
    """Return whether several ranks have different parts of a DTensor."""
    return any(
        not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
        for parameter in parameters
        for axis, placement in enumerate(parameter.placements)
    )


def _along(mesh: Any, axis: int, tensor: Any) -> torch.Tensor | None:
    """Return what ranks along an axis have alike of a tensor."""
    if not hasattr(tensor, "to_local"):  # Such as the number of steps of a parameter.
        return whole(tensor)
    if tensor.device_mesh != mesh or not tensor.placements[axis].is_replicate():
        return None
    return whole(tensor.detach().to_local())


def _fsdp1_models(
    parameters: Sequence[Any], objects: Sequence[Any]
) -> list[tuple[Any, list[torch.Tensor]]]:
    """Return the outermost models whose parameters an optimizer has, each with these of them.

    Both are in the order of `parameters`.
    """
    models = [each for each in objects if type(each).__name__ == _FSDP1]
    inner = {id(each) for model in models for each in model.modules() if each is not model}
    found = []
    for model in models:
        own = {id(parameter) for parameter in model.parameters()}
        # Each rank may have its own of those that the user lets FSDP ignore.
        own -= {
            id(parameter)
            for module in model.modules()
            for parameter in getattr(module, "_ignored_params", ())
        }
        known = [parameter for parameter in parameters if id(parameter) in own]
        if known and id(model) not in inner:
            found.append((model, known))
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return sorted(found, key=lambda each: places[id(each[1][0])])


def _of_fsdp1(models: Sequence[tuple[Any, list[torch.Tensor]]]) -> Iterator[_Replicas]:
    """Yield what is compared of models of `FullyShardedDataParallel`."""
    for number, (model, parameters) in enumerate(models):
        replicated = model.sharding_strategy.name == "NO_SHARD"
        group = model.process_group if replicated else getattr(model, "_inter_node_pg", None)
        check = _check(f"fsdp.{number}.{len(parameters)}", group)
        if check is not None:
            yield _Replicas(_names_of(parameters, [model]), check)


def _names_of(parameters: Sequence[Any], objects: Sequence[Any]) -> dict[torch.Tensor, str]:
    """Return names in the models that have the parameters, with numbers where there is none alone.

    The names are for people: they depend on which modules a rank has.
    """
    modules = [each for each in objects if issubclass(type(each), torch.nn.Module)]
    inner = {id(each) for module in modules for each in vars(module).get("_modules", {}).values()}
    found: dict[int, str] = {}
    for module in modules:
        if id(module) in inner or "_parameters" not in vars(module):
            continue
        for name, parameter in module.named_parameters():
            own = name.replace(_FSDP1_PREFIX, "")
            found[id(parameter)] = min(own, found.get(id(parameter), own))
    times = Counter(found.get(id(each), "") for each in parameters)
    names = {}
    for number, parameter in enumerate(parameters):
        name = found.get(id(parameter), "")
        names[parameter] = name if name and times[name] == 1 else f"{number}.{name}".rstrip(".")
    return names


def _check(label: str, group: Any) -> WeightsCheck | None:
    caller = getattr(group, "_caller", None)  # Another backend has none.
    return None if caller is None else check_by_setting(label, caller.process_set)


def _models_of(parameters: Sequence[Any], objects: Sequence[Any]) -> list[_Replicas]:
    """Return the models whose parameters an optimizer has, in the order of these."""
    places = {id(each): place for place, each in enumerate(parameters)}
    found: dict[int, _Replicas] = {}
    for model in objects:
        if not issubclass(type(model), DistributedDataParallel):
            continue
        hooks = getattr(model, "_comm_hooks", ())  # Local SGD: ranks differ between two averages.
        if any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook, _ in hooks):
            continue
        names = {
            parameter: name
            for name, parameter in model.module.named_parameters()
            if id(parameter) in places and name not in model.parameters_to_ignore
        }
        if not names:
            continue
        check = _check(f"ddp.{min(names.values())}.{len(names)}", model.process_group)
        if check is not None:
            found[min(places[id(parameter)] for parameter in names)] = _Model(model, names, check)
    return [model for _, model in sorted(found.items())]
