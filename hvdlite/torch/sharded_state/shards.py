"""Flat buffers of parameters and gradients, and the part of each that is this rank's shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.torch.optimizer.flat_gradients import ALIGNMENT_BYTES, FlatLayout

Tensor = torch.Tensor
State = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The position of this rank among the ranks that share the state, and their number."""

    position: int
    members: int


class FlatShard:
    """Parameters of one group, dtype and device in one buffer, of which a shard is this rank's.

    The buffer is cut into equal shards, one for each member, with zeros behind the last parameter.
    Parameters become views of it; `shard` is the part that the optimizer steps over.
    """

    @torch.no_grad()
    def __init__(self, group: int, parameters: Sequence[Tensor], label: str, place: Place) -> None:
        self.group, self.label = group, f"shard.{label}"
        self.parameters = tuple(parameters)
        self.layout = FlatLayout(self.parameters)
        itemsize = self.layout.dtype.itemsize
        granule = math.lcm(ALIGNMENT_BYTES, itemsize) // itemsize * place.members
        self.size = -(-self.layout.size // granule) * granule
        length = self.size // place.members
        self.own = slice(place.position * length, (place.position + 1) * length)
        self.data, self.gradient = self.allocate(), self.allocate()
        self._data_views = self.layout.views(self.data)
        self._gradient_views = self.layout.views(self.gradient)
        self.shard = torch.nn.Parameter(self.data[self.own])
        self.shard_gradient = torch.zeros_like(self.shard)
        self.adopt_parameters()

    def allocate(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer of zeros, of shape ``(size,)``."""
        layout = self.layout
        return torch.zeros(self.size, dtype=dtype or layout.dtype, device=layout.device)

    def fits(self) -> bool:
        """Return whether the parameters have the dtype, the device and the shape that they had."""
        return all(
            parameter.dtype == view.dtype
            and parameter.device == view.device
            and parameter.shape == view.shape
            for parameter, view in zip(self.parameters, self._data_views, strict=True)
        )

    def adopt_parameters(self) -> None:
        """Make the parameters views of the buffer, with the values that they have."""
        for parameter, view in zip(self.parameters, self._data_views, strict=True):
            data = parameter.data
            if data.data_ptr() != view.data_ptr() or data.stride() != view.stride():
                view.copy_(data)
                parameter.data = view

    def release_parameters(self) -> None:
        """Give the parameters memory of their own, for another buffer to adopt."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()

    def pack_gradients(self, sparse_as_dense: bool) -> None:
        """Copy all gradients into the buffer; a missing one counts as zeros.

        Raises `TypeError` for a sparse gradient, unless it is to be made dense.
        """
        views, gradients = [], []
        for parameter, view in zip(self.parameters, self._gradient_views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                continue
            if gradient.layout is not torch.strided:
                if not sparse_as_dense:
                    raise TypeError(
                        f"shard_state=True: the gradient of a parameter of shape "
                        f"{tuple(parameter.shape)} in '{self.label}' is sparse, and a flat shard "
                        "is dense: give sparse_as_dense=True"
                    )
                gradient = gradient.to_dense()
            if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)

    def show_gradients(self) -> None:
        """Make views of the buffer the gradients of the parameters."""
        for parameter, view in zip(self.parameters, self._gradient_views, strict=True):
            # Another object than the view, which Module.to() would give other memory.
            parameter.grad = view.detach()

    # -- state

    def is_cut(self, value: Any) -> bool:
        """Return whether a value of the shard's state has an entry for each of its elements."""
        return isinstance(value, Tensor) and value.shape == self.shard.shape

    def cut(self, states: Mapping[Tensor, State], common: Set[str]) -> State:
        """Return the state of the shard, from that of the parameters; {} where they have none.

        `common` are names of what is one for all elements.
        """
        first = next((parameter for parameter in self.parameters if states.get(parameter)), None)
        if first is None:
            return {}
        return {
            name: _copy(value)
            if _is_common(name, value, first, common)
            else self._cut_value(name, states)
            for name, value in states[first].items()
        }

    def _cut_value(self, name: str, states: Mapping[Tensor, State]) -> Tensor:
        buffer = self.allocate()
        for parameter, view in zip(self.parameters, self.layout.views(buffer), strict=True):
            value = states[parameter][name]
            if value.shape != view.shape:
                raise ValueError(
                    f"'{self.label}': a parameter has the shape {tuple(view.shape)}, and its state "
                    f"{name} the shape {tuple(value.shape)}: wrap an optimizer anew where "
                    "parameters are resized"
                )
            view.copy_(value)
        return buffer[self.own].clone()

    def join(self, state: State, gathered: Mapping[str, Tensor]) -> dict[Tensor, State]:
        """Return the state of each parameter, from that of a shard and what was gathered of all."""
        views = {name: self.layout.views(buffer) for name, buffer in gathered.items()}
        return {
            parameter: {
                name: views[name][number].clone() if name in views else _copy(value)
                for name, value in state.items()
            }
            for number, parameter in enumerate(self.parameters)
        }

    def describe(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return what two saved shards must have alike to fit each other."""
        return {
            "group": self.group,
            "dtype": str(self.layout.dtype),
            "parameters": [names[parameter] for parameter in self.parameters],
            "shapes": [tuple(shape) for shape in self.layout.shapes],
            "size": self.size,
        }


def _is_common(name: str, value: Any, parameter: Tensor, common: Set[str]) -> bool:
    """Return whether a value is one for all elements: the step count, above all.

    The shapes do not tell it of a parameter without dimensions.
    """
    return not isinstance(value, Tensor) or name in common or value.dim() == 0 < parameter.dim()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _common(parameter: Tensor, state: State | None, common: Set[str]) -> tuple[Any, ...]:
    """Return what the parameters of one shard have alike: what their state has, and counts."""
    return tuple(
        (name, value.item() if isinstance(value, Tensor) else value)
        if _is_common(name, value, parameter, common)
        else (name, "of each element")
        for name, value in sorted((state or {}).items())
    )


def arrange(
    param_groups: Iterable[Mapping[str, Any]],
    names: Mapping[Tensor, str],
    states: Mapping[Tensor, State],
    place: Place,
    common: Set[str],
) -> list[FlatShard]:
    """Return the shards of the parameters in `names`: those of one kind in one buffer.

    `common` are names of what `states` has one of for all elements.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for number, group in enumerate(param_groups):
        for parameter in group["params"]:
            if parameter in names:
                alike = _common(parameter, states.get(parameter), common)
                kind = number, parameter.dtype, parameter.device, alike
                kinds.setdefault(kind, []).append(parameter)
    return [
        FlatShard(kind[0], parameters, names[parameters[0]], place)
        for kind, parameters in kinds.items()
    ]
