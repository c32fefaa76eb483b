"""The parameters and buffers of a sharded part: what this rank holds of them, for each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvdlite.torch.sharding.dtensor import DTensor, gradient_of

# So many bytes of gradients are held back at most until all of a function's inputs have theirs.
_TOGETHER_BYTES = 1 << 22
# A table of a module, and the name that a tensor has there: another one may take its place.
Place = tuple[dict[str, Any], str]


class Leaves:
    """The leaves of a part, under the shapes that it was planned with on this rank.

    In most calls they are the tensors of the call before. Then only this is found out, and autograd
    goes on with the functions that it has: they save nothing, so that any number of graphs, one
    after the other or at once, may end in them.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        self._names = names
        self._places = [place_of(module, name) for name in names]
        self._held: list[torch.Tensor] = []
        self._known: list[Any] = []
        self._trained: list[bool] = []
        self._addresses: list[int] = []
        self._in_graph: list[torch.Tensor] = []
        self._shapes = [each.shape for each in map(_local, self._tensors())]

    def local_tensors(self) -> list[torch.Tensor]:
        """Return what this rank holds of the leaves, which shares their memory.

        Raises `ValueError` for a leaf that is cut otherwise than when the part was planned.
        """
        tensors = self._tensors()
        held = list(map(_local, tensors))
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            self._check_shapes(held)
            return held
        trained = [each.requires_grad for each in tensors]
        addresses = [each.data_ptr() for each in held]
        if (
            trained != self._trained
            or addresses != self._addresses
            or not all(map(is_, tensors, self._known))
            or not all(map(is_, held, self._held))
        ):
            self._check_shapes(held)
            self._in_graph = _joined_to_graph(tensors, held)
            self._known, self._held = tensors, held
            self._trained, self._addresses = trained, addresses
        return self._in_graph

    def _tensors(self) -> list[Any]:
        return [table[name] for table, name in self._places]

    def _check_shapes(self, held: Sequence[torch.Tensor]) -> None:
        for name, tensor, shape in zip(self._names, held, self._shapes, strict=True):
            if tensor.shape != shape:
                raise ValueError(
                    f"{name} has come into a sharded part as {tuple(tensor.shape)} on this rank, "
                    f"where it was planned as {tuple(shape)}: give a DTensor that is cut as it, or "
                    "load values by hvd.checkpoint.load"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of a module has: no graph, which would end in this one's tensors."""
        own = {**self.__dict__, "_held": [], "_known": [], "_trained": [], "_addresses": []}
        return {**own, "_in_graph": []}


def place_of(module: torch.nn.Module, name: str) -> Place:
    """Return where a parameter or buffer is found."""
    path, _, own = name.rpartition(".")
    submodule = module.get_submodule(path)
    tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
    return next(table for table in tables if own in table), own


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _joined_to_graph(tensors: Sequence[Any], held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return local tensors whose gradients go to their DTensors.

    `DTensor.to_local` takes a function of autograd for each of them, and another one for its
    gradient; a model has hundreds of parameters. Here small ones have a function together.
    """
    found = list(held)
    for places in _together(tensors, held):
        locals_: Any = _Locals.apply(*(tensors[place] for place in places))  # type: ignore[no-untyped-call]
        for place, local in zip(places, locals_, strict=True):
            found[place] = local
    return found


def _together(tensors: Sequence[Any], held: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the places of neighbours that need gradients, few enough bytes at a time."""
    places: list[int] = []
    held_back = 0
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and tensor.requires_grad:
            if places and held_back + held[place].nbytes > _TOGETHER_BYTES:
                yield places
                places, held_back = [], 0
            places.append(place)
            held_back += held[place].nbytes
    if places:
        yield places


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
        return tuple(
            None if gradient is None else _cut_alike(gradient, *like)
            for gradient, like in zip(gradients, ctx.like, strict=True)
        )


def _cut_alike(gradient: torch.Tensor, spec: Any, strides: Sequence[int]) -> Any:
    """Return the gradient of a DTensor, of which this rank has a part."""
    if gradient.stride() != strides:
        # Plain parameters get gradients with their own strides, too.
        gradient = gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
    return gradient_of(gradient, spec)
