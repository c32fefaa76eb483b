"""`ps.DistributedOptimizer`: gradients are pushed to servers, and weights pulled from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import SparseAdam

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import check_passes
from hvdlite.ps import context
from hvdlite.ps.context import new_store, serve
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.description import TableDescription
from hvdlite.torch.ps.embedding import ROWS
from hvdlite.torch.ps.parameters import ReducedParameters, names_of, served_names, specs_of
from hvdlite.torch.ps.pushing_optimizer import PushingMixin, check_no_state
from hvdlite.torch.ps.updater import TorchRows, TorchUpdater
from hvdlite.torch.sharded_state.elementwise import check_elementwise

_REMEDY = (
    "servers step over flat pieces of many parameters, and need an optimizer that treats each "
    "element on its own, as SGD, Adam and AdamW do. Give partition='tensor', which keeps tensors "
    "whole"
)


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    mode: str = "sync",
    staleness: int | None = None,
    parameters: Sequence[str] | None = None,
    partition: str = "element",
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    scale: str | None = None,
) -> Any:
    """Return an optimizer of the same class whose steps are made by the servers.

    A server does not return from here: it serves, and its process ends with the job.

    - `named_parameters`: ``model.named_parameters()``, with all parameters of the optimizer.
    - `mode`: "sync": a step is made of the gradients of all workers; "async": of those of one;
      "ssp": the same, and no worker is more than `staleness` + 1 steps ahead of another.
    - `parameters`: names, or patterns as ``"embedding.*"``, of the parameters that go by the
      servers; all others are reduced among the ranks of the job, which makes their steps itself.
      None: those of `set_param_ps`, or all.
    - `partition`: "element": tensors are cut; "tensor": they stay whole, for optimizers that look
      at more than one element at a time.
    - `backward_passes_per_step`: how many gradients add up in the parameters before a step.
    - `op`: of sync: Average or Sum.
    - `scale`: of async and ssp: "1/W" divides each push by the number of workers that take part.

    Raises `ValueError` for arguments that contradict each other, for an optimizer that has made
    steps, and for a second one.
    """
    options = TableOptions.of(mode, staleness, op, scale, partition)
    check_passes(backward_passes_per_step)
    every = names_of(optimizer, named_parameters)
    names = served_names(every, parameters)
    served = [hasattr(parameter, ROWS) for parameter in names]
    is_for_rows = isinstance(optimizer, SparseAdam) and all(served)
    if (partition == "element" or any(served)) and not is_for_rows:
        check_elementwise(optimizer, type(optimizer), _REMEDY)
    if any(cls.__name__ == "LBFGS" for cls in type(optimizer).__mro__):
        raise ValueError(
            "LBFGS looks at all gradients at once, and calls the model again within a step: no "
            "server has either"
        )
    check_no_state(optimizer.state, names)
    rest = {parameter: name for parameter, name in every.items() if parameter not in names}
    settings = context.current().settings
    if rest and settings.independent:
        raise ValueError(
            f"{next(iter(rest.values()))!r} would be reduced among the workers, and independent "
            "workers have no collectives: let all parameters go by the servers"
        )
    if context.role() == "server":
        # The first table changes the groups of the optimizer.
        specs = specs_of(optimizer, names)
        groups = {
            names[parameter]: group
            for group in optimizer.param_groups
            for parameter in group["params"]
            if hasattr(parameter, ROWS) and parameter in names
        }
        serve(
            lambda described: (
                _updater(optimizer, specs, described, whole=partition == "tensor")
                if described.rows is None
                else _row_updater(optimizer, groups, described)
            )
        )
    context.worker().begin_optimizer()
    base = type(optimizer)
    cls: Any = type(base.__name__, (PushingMixin, base), {"__module__": base.__module__})
    wrapped: Any = object.__new__(cls)
    wrapped.__dict__.update(
        (name, value)
        for name, value in vars(optimizer).items()
        if not callable(getattr(cls, name, None))
    )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # Its schedulers see no step.
    wrapped._rest = (
        ReducedParameters(optimizer, rest, op, backward_passes_per_step) if rest else None
    )
    wrapped._set_up(names, options, backward_passes_per_step)
    return wrapped


def _updater(
    optimizer: torch.optim.Optimizer, own: Sequence[TensorSpec], described: TableDescription, *,
    whole: bool,
) -> TorchUpdater:  # fmt: skip
    for there, here in zip(described.specs, own, strict=False):
        if there != here:
            raise ValueError(f"a worker has the parameter {there}, and the server {here}")
    if len(described.specs) != len(own):
        counts = len(described.specs), len(own)
        raise ValueError("a worker has {} parameters, and the server {}".format(*counts))
    return TorchUpdater(optimizer, described, whole=whole)


def _row_updater(
    optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, Any]],
    described: TableDescription,
) -> TorchRows:  # fmt: skip
    if described.name not in groups:
        raise ValueError(
            f"a worker has rows of {described.name!r}, and the server has none of them"
        )
    return TorchRows(new_store(described), optimizer, groups[described.name])
