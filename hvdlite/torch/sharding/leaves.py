"""The parameters and buffers of a sharded part: what this rank holds of them, for each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvdlite.common.base.lists import split_by_bytes
from hvdlite.torch.sharding.dtensor import DTensor, gradient_of

# So many bytes of gradients are held back at most until all of a function's inputs have theirs.
_TOGETHER_BYTES = 1 << 22


class Leaves:
    """The leaves of a part, under the shapes that it was planned with on this rank."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        self._names = names
        self._places = [place_of(module, name) for name in names]
        self._shapes = [each.shape for each in map(_local, self._tensors())]
        self._trained: list[bool] = []
        self._together: list[list[int]] = []

    def local_tensors(self) -> list[torch.Tensor]:
        """Return what this rank holds of the leaves, which shares their memory.

        `DTensor.to_local` takes a function of autograd for each of them, and another one for its
        gradient; a model has hundreds of parameters. Here small ones have a function together. It
        is a new one in each call: autograd runs first what was made last, and who waits for the
        gradient of an input, as FSDP2 does, finds those of parameters there.

        Raises `ValueError` for a leaf that is cut otherwise than when the part was planned.
        """
        tensors = self._tensors()
        found = list(map(_local, tensors))
        if [each.shape for each in found] != self._shapes:
            self._refuse(found)
        if torch.is_grad_enabled():
            trained = [isinstance(each, DTensor) and each.requires_grad for each in tensors]
            if trained != self._trained:
                self._trained = trained
                self._together = list(
                    split_by_bytes(
                        [place for place, is_trained in enumerate(trained) if is_trained],
                        lambda place: int(found[place].nbytes),
                        _TOGETHER_BYTES,
                    )
                )
            for places in self._together:
                locals_: Any = _Locals.apply(*[tensors[place] for place in places])  # type: ignore[no-untyped-call]
                for place, local in zip(places, locals_, strict=True):
                    found[place] = local
        return found

    def _tensors(self) -> list[Any]:
        return [table[name] for table, name in self._places]

    def _refuse(self, held: Sequence[torch.Tensor]) -> None:
        for name, tensor, shape in zip(self._names, held, self._shapes, strict=True):
            if tensor.shape != shape:
                raise ValueError(
                    f"{name} has come into a sharded part as {tuple(tensor.shape)} on this rank, "
                    f"where it was planned as {tuple(shape)}: give a DTensor that is cut as it, or "
                    "load values by hvd.checkpoint.load"
                )


def place_of(module: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the table of a module that a parameter or buffer is in, and its name there.

    Another tensor may take its place.
    """
    path, _, own = name.rpartition(".")
    submodule = module.get_submodule(path)
    tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
    return next(table for table in tables if own in table), own


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Locals(torch.autograd.Function):
    """What this rank holds of DTensors, whose gradients are DTensors that are cut as they are."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        held = [each._local_tensor for each in tensors]
        ctx.like = [(each._spec, local.stride()) for each, local in zip(tensors, held, strict=True)]
        return tuple(local.detach() for local in held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = []
        for gradient, (spec, strides) in zip(gradients, ctx.like, strict=True):
            part = gradient
            if part is not None and part.stride() != strides:
                # Plain parameters get gradients with their own strides, too.
                part = part.new_empty_strided(part.shape, strides).copy_(part)
            found.append(None if part is None else gradient_of(part, spec))
        return tuple(found)
