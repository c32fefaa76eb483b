"""An optimizer's state in two parts: a skeleton that is pickled, and the tensors it is full of."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from hvdlite.torch.dtypes import DTYPE_NAMES


@dataclass(frozen=True)
class _Place:
    """What has to be allocated for a tensor that was taken out of the skeleton."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool  # otherwise it is on the device of the parameters


@dataclass
class OptimizerState:
    """The state and the options of an optimizer. Its tensors are not pickled with it."""

    skeleton: bytes
    places: list[_Place]
    tensors: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Take a state apart; `tensors` are the optimizer's own."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(optimizer.state_dict())
        tensors = pickler.tensors
        places = [_Place(tuple(t.shape), t.dtype, t.device.type == "cpu") for t in tensors]
        return cls(file.getvalue(), places, [tensor.contiguous() for tensor in tensors])

    def __getstate__(self) -> dict[str, Any]:
        return {"skeleton": self.skeleton, "places": self.places, "tensors": []}

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `tensors`, without values, for an optimizer that is to take over this state."""
        device = _parameters(optimizer)[0].device
        self.tensors = [
            torch.empty(place.shape, dtype=place.dtype, device="cpu" if place.on_host else device)
            for place in self.places
        ]

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Make this the state of `optimizer`. Raises `ValueError` where it does not fit."""
        saved = _Unpickler(self.skeleton, self.tensors).load()
        theirs = [len(group["params"]) for group in saved["param_groups"]]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if theirs != ours:
            raise ValueError(
                "the optimizer of the root rank has groups of other sizes: "
                f"{theirs} parameters there, {ours} here"
            )
        for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
        parameters: dict[Any, Any] = dict(enumerate(_parameters(optimizer)))
        optimizer.state.clear()
        for key, value in saved["state"].items():
            optimizer.state[parameters.get(key, key)] = value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles everything but tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided:
            return None
        if obj.dtype not in DTYPE_NAMES:
            return None  # pickled like any other object
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]
