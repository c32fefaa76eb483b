"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks before a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.warn import warn_user
from hvdlite.common.gradients.arguments import explain_arguments
from hvdlite.common.gradients.buckets import (
    BucketSchedule,
    ReductionConfig,
    buckets_of,
    check_groups,
    check_names,
    check_passes,
    resolve_groups,
    scaling,
    split_evenly,
)
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.gradients.weights_check import check_by_setting
from hvdlite.common.iterations.trace import announce
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.basics import size
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.segmentation.parsing import resolve
from hvdlite.common.segmentation.strategies import Strategy
from hvdlite.common.tensors.compression import AnyCompressor
from hvdlite.torch.compression import Compression
from hvdlite.torch.functions import broadcast_object, leave_zero_gradients
from hvdlite.torch.optimizer.adasum import AdasumMixin
from hvdlite.torch.optimizer.gradient_exchange import GradientExchange, named_by_position
from hvdlite.torch.optimizer.in_flight import CASTS
from hvdlite.torch.optimizer.reducing_optimizer import NO_EFFECT, Names, ReducingMixin
from hvdlite.torch.subclass import wrap


@explain_arguments
def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    segmentation: str | Strategy | None = None,
    gradient_as_bucket_view: bool = False,
    fuse_all_optimizer_ops: bool | None = None,
    shard_state: bool = False,
    **fusion: Any,
) -> Any:
    """Return an optimizer of the same class that reduces gradients over all ranks before each step.

    Gradients are sent while backward still runs, soon after they are complete.

    - `optimizer`: the optimizer to wrap; do not use it yourself afterwards. Its state is kept.
    - `named_parameters`: ``model.named_parameters()``. All parameters of the optimizer must be
      among them. Without it they are named by position.
    - `backward_passes_per_step`: how many backward passes accumulate, as a sum, before gradients
      are sent.
    - `op`: Average, Sum, Min, Max, Product, or Adasum, which combines the steps that the ranks
      would make on their own instead of the gradients (and takes no groups, no predivide factor).
    - `sparse_as_dense`: sparse gradients are sent as dense ones, otherwise by their entries.
    - `gradient_as_bucket_view`: after the first step gradients are views of the buffer of their
      segment, which is sent as it is; segments of 25 MiB where no other segmentation was chosen.
    - `fuse_all_optimizer_ops`: SGD, Adam and AdamW step over whole segments, with parameters and
      state in such buffers too. None: where gradients are views and it is possible. True: make
      gradients views, and warn where it is not possible.
    - `shard_state`: the state of the optimizer is divided among the ranks. Each rank reduces its
      part of the gradients, steps over it, and sends the parameters to the others. For optimizers
      that treat each element on its own, with op=Average or Sum.
    (what hvdlite.common.gradients.arguments tells of all others)

    Raises `ValueError` for arguments that contradict each other, and before `init`; `TypeError`
    for what is no optimizer, and for `fusion` of another type.
    """
    if isinstance(optimizer, (ReducingMixin, AdasumMixin)):
        raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
    if not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        raise TypeError(f"DistributedOptimizer wraps an optimizer of PyTorch, not {kind}")
    reduction = ReductionConfig(
        compression,
        scaling(op, gradient_predivide_factor),
        sparse_as_dense,
        process_set,
        resolve(segmentation, **fusion),
    )
    passes = check_passes(backward_passes_per_step)
    names = _name_parameters(optimizer, named_parameters)
    chosen = resolve_groups(num_groups, groups)
    if shard_state:
        return _shard(
            optimizer,
            names,
            passes,
            reduction,
            groups=chosen,
            gradient_as_bucket_view=gradient_as_bucket_view,
            fuse_all_optimizer_ops=fuse_all_optimizer_ops,
            segmentation=reduction.segmentation,
        )
    objection = _reason_against_views(reduction, chosen is not None)
    if objection and gradient_as_bucket_view:
        raise ValueError(f"gradient_as_bucket_view: {objection}")
    if objection and fuse_all_optimizer_ops:
        warn_user(f"{NO_EFFECT}: {objection}")
    if op == ReduceOp.ADASUM and (size() > 1 or worlds.elastic()):
        SegmentPlan(reduction, grouped=False).settle()  # Warns where a segmentation was set.
        wrapped = wrap(AdasumMixin, optimizer, reduction)
        # Kept for callers that read it; see `AdasumMixin.set_backward_passes_per_step`.
        wrapped.backward_passes_per_step = passes
        wrapped._parameter_names, wrapped._reduction = names, reduction
    else:
        as_views = gradient_as_bucket_view or bool(fuse_all_optimizer_ops and not objection)
        segments = SegmentPlan(reduction, chosen is not None, as_views)
        buckets = buckets_of(names.values(), _resolve_groups(chosen, names, reduction))
        schedule = BucketSchedule(buckets, passes)
        wrapped = wrap(ReducingMixin, optimizer, reduction)
        wrapped._fuses = fuse_all_optimizer_ops
        wrapped._exchange = GradientExchange(
            optimizer.param_groups, names, schedule, reduction, segments
        )
    return _completed(wrapped, optimizer, names, reduction)


def _completed(
    wrapped: Any, optimizer: torch.optim.Optimizer, names: Names, reduction: ReductionConfig
) -> Any:
    """Return the wrapped optimizer, which traces and the check of weights know from now on."""
    if names and reduction.active:
        label = f"{min(names.values())}.{len(names)}"
        wrapped._weights_check = check_by_setting(label, reduction.process_set)
    announce(wrapped)
    leave_zero_gradients(optimizer)
    return wrapped


def _shard(
    optimizer: torch.optim.Optimizer,
    names: Names,
    passes: int,
    reduction: ReductionConfig,
    **others: object,
) -> Any:
    """Wrap an optimizer whose state is divided. Raises `ValueError` for options it cannot have."""
    given = [name for name, value in others.items() if value]
    if given:
        raise ValueError(
            f"shard_state=True and {', '.join(given)} both say how gradients are laid out: give one"
        )
    from hvdlite.torch.sharded_state.optimizer import shard  # Most jobs never need it.

    wrapped = shard(optimizer, names, passes, reduction)
    return _completed(wrapped, optimizer, names, reduction)


def _reason_against_views(reduction: ReductionConfig, grouped: bool) -> str:
    """Return why gradients cannot be views of segments; empty when they can."""
    if grouped:
        return "groups are given, and gradients that live in a segment need a segmentation"
    if not reduction.fusable:
        op = reduction.scaling.op.name.capitalize()
        return f"gradients that live in a segment need op=Average or Sum, not {op}"
    compression = reduction.compression
    if compression is not Compression.none and compression not in CASTS:
        return (
            f"{compression} compresses gradient by gradient, and those that live in a segment "
            "are sent as one tensor: use Compression.none, fp16 or bf16"
        )
    return ""


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Names:
    """Return the optimizer's parameters with their names, in the optimizer's order."""
    by_position = dict(named_by_position(optimizer.param_groups))
    if named_parameters is None:
        return by_position
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()"
        )
    check_names([name for name, _ in named])
    names = {parameter: name for name, parameter in named}
    unnamed = [default for parameter, default in by_position.items() if parameter not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            + ", ".join(default.removeprefix("allreduce.noname.") for default in unnamed)
            + " (group.index)"
        )
    return {parameter: names[parameter] for parameter in by_position}


def _resolve_groups(groups: object, names: Names, reduction: ReductionConfig) -> list[list[str]]:
    check_groups(groups, lambda value: isinstance(value, torch.Tensor), "torch.Tensor")
    if isinstance(groups, list):
        if any(parameter not in names for group in groups for parameter in group):
            raise ValueError("groups has a tensor that is not a parameter of the optimizer")
        return [[names[parameter] for parameter in group] for group in groups]
    if not isinstance(groups, int):
        return []
    order = [names[parameter] for parameter in names if parameter.requires_grad]
    if reduction.active:  # Ranks may have made their parameters in different orders.
        root = min(reduction.process_set.ranks or [0])
        order = broadcast_object(order, root, "groups", reduction.process_set)
    return split_evenly(order, groups)


__all__ = ["DistributedOptimizer"]
