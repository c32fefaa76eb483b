"""The check that ranks of DistributedDataParallel have the same weights (HVDLITE_CHECK_WEIGHTS).

The optimizer of such a model is one of torch that knows nothing of ranks, so a hook of all
optimizers finds the models whose parameters it has. What no such model has is not compared: shards
of FSDP, stages of a pipeline, and what the model was told to ignore.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hvdlite.common.gradients.weights_check import WeightsCheck, check_by_setting
from hvdlite.common.plain.comparison import Compared
from hvdlite.torch.subclass import OptimizerMixin
from hvdlite.torch.weights import weights_of

# Optimizers of torch that divide the state of another one among the ranks.
_DIVIDING = "ZeroRedundancyOptimizer"


class _Model:
    """What one optimizer has of one model."""

    def __init__(self, model: Any, names: dict[torch.Tensor, str], check: WeightsCheck) -> None:
        self._model, self._check = ref(model), check
        self._places = {name: ref(parameter) for parameter, name in names.items()}

    def stepped(self, optimizer: Optimizer) -> None:
        """Compare where it is time to, unless ranks may have uneven numbers of steps: Join."""
        model: Any = self._model()
        if model is not None and not model._join_config.enable:
            self._check.step(lambda: self._tensors(optimizer))

    def _tensors(self, optimizer: Optimizer) -> Iterator[Compared]:
        divided = any(base.__name__ == _DIVIDING for base in type(optimizer).__mro__)
        places = {name: place() for name, place in self._places.items()}
        names = {parameter: name for name, parameter in places.items() if parameter is not None}
        return weights_of(optimizer, names, state=not divided)


@cache
def watch_optimizers() -> None:
    """Look at all steps of all optimizers from now on; the first call counts."""
    followed: WeakKeyDictionary[Optimizer, list[_Model]] = WeakKeyDictionary()

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, OptimizerMixin):  # It has a check of its own.
            return
        if optimizer not in followed:
            followed[optimizer] = _models_of(optimizer)
        for model in followed[optimizer]:
            model.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)


def _models_of(optimizer: Optimizer) -> list[_Model]:
    """Return the models whose parameters the optimizer has, in the order of these.

    None for an optimizer inside another one, whose step is not over when its own is.
    """
    objects = gc.get_objects()
    optimizers = [each for each in objects if issubclass(type(each), Optimizer)]
    if any(value is optimizer for each in optimizers for value in vars(each).values()):
        return []
    groups = optimizer.param_groups
    places = {id(each): place for place, each in enumerate(p for g in groups for p in g["params"])}
    found: dict[int, _Model] = {}
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
        caller = getattr(model.process_group, "_caller", None)  # Another backend has none.
        if names and caller is not None:
            label = f"ddp.{min(names.values())}.{len(names)}"
            check = check_by_setting(label, caller.process_set)
            if check is not None:
                found[min(places[id(parameter)] for parameter in names)] = _Model(
                    model, names, check
                )
    return [model for _, model in sorted(found.items())]
