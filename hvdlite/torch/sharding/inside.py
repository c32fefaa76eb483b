"""Operators inside a sharded part for which DTensor has no rule, or a wrong one."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hvdlite.common.base.warn import warn_user
from hvdlite.torch.sharding.dtensor import DTensor, Replicate, Shard

# DTensor's convolution is silently wrong where a dimension of the image is cut.
_NEVER_CUT = {
    torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
}  # fmt: skip


class EqualNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to draw random numbers where ranks hold equal values: each would draw others."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator. Raises `ValueError` for one that would draw other numbers on ranks."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags and _draws(function, args, kwargs):
            self._check_cut(function, tree_leaves((args, kwargs)))
        return function(*args, **kwargs)

    def _check_cut(self, function: Any, values: Sequence[Any]) -> None:
        cut = [each for each in values if isinstance(each, DTensor)]
        if self._mesh.size() == 1 or (cut and all(map(self._is_cut_everywhere, cut))):
            return
        where = f"an input with {tuple(cut[0].placements)}" if cut else "no cut input"
        raise ValueError(
            f"{str(function).split('.')[1]} draws random numbers in a sharded part, and has "
            f"{where}: ranks whose values should be equal would draw other numbers, and their "
            "parameters drift apart. Have its input cut among all ranks, as data parallel ones "
            "are, or leave it outside of the part; a dropout draws none after eval()"
        )

    def _is_cut_everywhere(self, tensor: Any) -> bool:
        return all(
            isinstance(placement, Shard) or self._mesh.size(axis) == 1
            for axis, placement in enumerate(tensor.placements)
        )


def _draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator that may draw does so: a dropout of rate 0 does not."""
    given = {
        argument.name: args[index] if index < len(args) else kwargs.get(argument.name, default)
        for index, argument in enumerate(function._schema.arguments)
        for default in [argument.default_value if argument.has_default_value() else None]
    }
    rates = [given[name] for name in ("p", "dropout_p") if isinstance(given.get(name), float)]
    switches = [given[name] for name in ("train", "training") if given.get(name) is not None]
    return all(rates) and all(switches)


class WholeFallback(TorchFunctionMode):
    """Runs operators for which DTensor has no rule, or a wrong one, on whole inputs."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, and again on whole inputs if DTensor does not know it."""
        kwargs = kwargs or {}
        cut = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
        if cut and function in _NEVER_CUT:
            return self._on_whole_inputs(function, args, kwargs)
        try:
            return function(*args, **kwargs)
        except NotImplementedError:
            return self._on_whole_inputs(function, args, kwargs)

    def _on_whole_inputs(self, function: Any, args: Any, kwargs: Any) -> Any:
        moved = 0

        def gathered(value: Any) -> Any:
            nonlocal moved
            if not isinstance(value, DTensor):
                return value
            moved += value.numel() * value.element_size() - _local_bytes(value)
            return value.redistribute(self._mesh, whole_placements(self._mesh)).to_local()

        inputs = tree_map(gathered, (args, kwargs))
        _warn_once(getattr(function, "__name__", str(function)), moved)
        result = function(*inputs[0], **inputs[1])
        return tree_map(
            lambda each: (
                DTensor.from_local(each, self._mesh, whole_placements(self._mesh), run_check=False)
                if isinstance(each, torch.Tensor)
                else each
            ),
            result,
        )


@functools.cache
def _warn_once(name: str, moved: int) -> None:
    warn_user(
        f"{name} runs on whole inputs in a sharded part, for which each rank receives {moved} bytes"
    )


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local()
    return int(math.prod(local.shape) * local.element_size())


def whole_placements(mesh: Any) -> list[Any]:
    """Return the placements of a tensor that each rank has all of."""
    return [Replicate()] * mesh.ndim
