"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks before a step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.warn import warn_user
from hvdlite.common.gradients.arguments import explain_arguments
from hvdlite.common.gradients.buckets import (
    ReductionConfig,
    Schedule,
    buckets_of,
    check_groups,
    check_names,
    check_passes,
    resolve_groups,
    scaling,
    split_evenly,
)
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.iterations.trace import announce
from hvdlite.common.plain.compression import Compressor
from hvdlite.common.runtime.basics import size
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.segmentation.parsing import resolve
from hvdlite.common.segmentation.strategies import Strategy
from hvdlite.torch.adasum_optimizer import AdasumMixin
from hvdlite.torch.compression import Compression
from hvdlite.torch.functions import broadcast_object, leave_zero_gradients
from hvdlite.torch.gradient_exchange import CASTS, GradientExchange, named_by_position
from hvdlite.torch.segment_schedule import ParamGroups
from hvdlite.torch.subclass import Wrapped, wrap

if TYPE_CHECKING:
    from hvdlite.torch.fused_step import FusedStep

NO_EFFECT = "fuse_all_optimizer_ops has no effect"
Names = dict[torch.Tensor, str]
Closure = Callable[[], Any]


class _DistributedMixin(Wrapped):
    """Comes before the class of the wrapped optimizer."""

    _exchange: GradientExchange
    _fuses: bool | None = None  # None: where it can be
    _fused: FusedStep | None = None
    _fused_for: object = None  # the segments that it was made for
    _closure_told = False
    _should_synchronize = True
    _synchronized_for_scaler = False

    @property
    def param_groups(self) -> ParamGroups:
        """The wrapped optimizer's groups.

        ``torch.amp.GradScaler`` unscales the gradients in place when it finds them here, and
        nothing else tells of it. What travels has to arrive before that.
        """
        exchange = self._exchange
        if exchange.reduction.active and not exchange.synchronized and _called_by_scaler():
            self._exchange.synchronize()
            self._synchronized_for_scaler = True
        groups: ParamGroups = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def _parameter_names(self) -> Names:
        return self._exchange.names

    def step(self, closure: Closure | None = None, **options: Any) -> Any:
        """Synchronize the gradients, and let the wrapped optimizer make its step with them.

        A `closure` is synchronized each time after the wrapped optimizer has called it.
        """
        arguments: list[Closure] = []
        if closure is None:
            self._synchronize_for_step()
        else:
            if self._exchange.pending:
                self._exchange.synchronize()
            arguments.append(self._synchronizing(closure))
        self._exchange.synchronized = self._synchronized_for_scaler = False
        with self._own_step():
            if self._fuse(bool(arguments or options)):
                return _fused_step(self)
            return super().step(*arguments, **options)

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped step calls the user's hooks

    def _fuse(self, with_arguments: bool) -> bool:
        """Whether the step is made over segments; prepares that when there are new ones."""
        if with_arguments:
            if self._fuses and not self._closure_told:
                self._closure_told = True
                warn_user(f"{NO_EFFECT}: step() was given a closure or an option")
            return False
        flat = self._exchange.cuts.flat
        if flat is not self._fused_for:
            self._fused_for, self._fused = flat, None
            if flat is not None and self._fuses is not False:
                from hvdlite.torch.fused_step import FusedStep

                self._fused, reason = FusedStep.of(self, [*flat.values()])
                if reason and self._fuses:
                    warn_user(f"{NO_EFFECT}: {reason}")
        return self._fused is not None

    def _synchronize_for_step(self) -> None:
        exchange = self._exchange
        if not self._should_synchronize:
            if exchange.reduction.active and not exchange.synchronized and exchange.has_gradients:
                raise RuntimeError(
                    "step() inside skip_synchronize() would apply gradients of this rank alone: "
                    "call optimizer.synchronize() before it"
                )
        elif not exchange.synchronized:
            exchange.synchronize()
        elif exchange.reduction.active and not self._synchronized_for_scaler:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). The gradients are not synchronized a second time; use "
                "optimizer.skip_synchronize() to say that this is meant",
                stacklevel=3,
            )

    def _synchronizing(self, closure: Closure) -> Closure:
        def synchronized_closure() -> Any:
            loss = closure()
            if not self._exchange.synchronized:
                self._exchange.synchronize()
            self._exchange.synchronized = False
            if isinstance(self, torch.optim.LBFGS):  # its line search must be the same everywhere
                loss = self._exchange.share_loss(loss)
            return loss

        return synchronized_closure

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, so that they can be clipped or looked at.

        Follow it with a ``step()`` inside `skip_synchronize`. Raises `HorovodInternalError` when
        a reduction failed.
        """
        self._exchange.synchronize()
        self._synchronized_for_scaler = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this, ``step()`` takes the gradients as `synchronize` has left them."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's. Raises `AssertionError` while gradients travel."""
        if self._exchange.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition"
            )
        self._exchange.restart_count()
        super().zero_grad(*args, **kwargs)

    @property
    def backward_passes_per_step(self) -> int:
        """After how many backward passes gradients travel; they accumulate locally until then."""
        return self._exchange.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._exchange.reset(check_passes(passes))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let gradients travel after `passes` backward passes from now on.

        Raises `ValueError` for what is no positive integer.
        """
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; what travels is forgotten, as after a failure."""
        self._exchange.reset()
        super().load_state_dict(state_dict)
        self._exchange.param_groups = self.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the new parameters are named after their position."""
        super().add_param_group(param_group)
        if self._exchange.reduction.active:
            self._exchange.watch()


@explain_arguments
def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
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
    **fusion: Any,
) -> Any:
    """An optimizer of the same class that reduces gradients over all ranks before each step.

    Gradients start to travel while backward still runs, each as soon as it is complete.

    - `optimizer`: the optimizer to wrap; do not use it yourself afterwards. Its state is kept.
    - `named_parameters`: ``model.named_parameters()``. All parameters of the optimizer must be
      among them. Without it they are named by position.
    - `backward_passes_per_step`: how many passes accumulate before a gradient travels.
    - `op`: Average, Sum, Min, Max, Product, or Adasum, which combines the steps that the ranks
      would make on their own instead of the gradients (and takes no groups, no predivide factor).
    - `sparse_as_dense`: sparse gradients travel as dense ones, otherwise by their entries.
    - `gradient_as_bucket_view`: after the first step gradients are views of the buffer of their
      segment, which is what travels; segments of 25 MiB where no other segmentation was chosen.
    - `fuse_all_optimizer_ops`: SGD, Adam and AdamW step over whole segments, with parameters and
      state that live in buffers too. None does so where gradients live in segments and it is
      possible; True makes gradients live there, and warns where it is not possible.
    (what hvdlite.common.gradients.arguments tells of all others)

    Raises `ValueError` for arguments that contradict each other, and before `init`; `TypeError`
    for `fusion` of another type.
    """
    if isinstance(optimizer, (_DistributedMixin, AdasumMixin)):
        raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
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
    against = _reason_against_views(reduction, chosen is not None)
    if against and gradient_as_bucket_view:
        raise ValueError(f"gradient_as_bucket_view: {against}")
    if against and fuse_all_optimizer_ops:
        warn_user(f"{NO_EFFECT}: {against}")
    if op == ReduceOp.ADASUM and size() > 1:
        SegmentPlan(reduction, grouped=False).settle()  # says it where one was set
        adasum = wrap(AdasumMixin, optimizer, reduction)
        adasum._set_up(names, reduction, passes)
        announce(adasum)
        leave_zero_gradients(optimizer)
        return adasum
    as_views = gradient_as_bucket_view or bool(fuse_all_optimizer_ops and not against)
    segments = SegmentPlan(reduction, chosen is not None, as_views)
    schedule = Schedule(
        buckets_of(names.values(), _resolve_groups(chosen, names, reduction)), passes
    )
    wrapped = wrap(_DistributedMixin, optimizer, reduction)
    wrapped._fuses = fuse_all_optimizer_ops
    wrapped._exchange = GradientExchange(
        optimizer.param_groups, names, schedule, reduction, segments
    )
    announce(wrapped)
    leave_zero_gradients(optimizer)
    return wrapped


def _reason_against_views(reduction: ReductionConfig, grouped: bool) -> str:
    """Why gradients cannot live in segments; empty when they can."""
    if grouped:
        return "groups are given, and gradients that live in a segment need a segmentation"
    if not reduction.fusable:
        op = reduction.scaling.op.name.capitalize()
        return f"gradients that live in a segment need op=Average or Sum, not {op}"
    compression = reduction.compression
    if compression is not Compression.none and compression not in CASTS:
        return (
            f"{compression} compresses gradient by gradient, and those that live in a segment "
            "travel as one tensor: use Compression.none, fp16 or bf16"
        )
    return ""


def _step_over_segments(optimizer: _DistributedMixin) -> None:
    assert optimizer._fused is not None
    optimizer._fused.step()


_hooked: Any = torch.optim.Optimizer.profile_hook_step  # calls the user's hooks around it
_fused_step = _hooked(_step_over_segments)


def _called_by_scaler() -> bool:
    """Whether the function that asks `_DistributedMixin.param_groups` is one of torch.amp."""
    module = str(sys._getframe(2).f_globals.get("__name__"))
    return module.startswith(("torch.amp.", "torch.cuda.amp."))


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Names:
    """The optimizer's parameters with their names, in the optimizer's order."""
    by_position = dict(named_by_position(optimizer.param_groups))
    if named_parameters is None:
        return by_position
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()"
        )
    check_names([name for name, _ in named])
    names = {parameter: name for name, parameter in named}
    unnamed = [place for parameter, place in by_position.items() if parameter not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            + ", ".join(place.removeprefix("allreduce.noname.") for place in unnamed)
            + " (group.index)"
        )
    return {parameter: names[parameter] for parameter in by_position}


def _resolve_groups(groups: object, names: Names, reduction: ReductionConfig) -> list[list[str]]:
    """The names of the parameters of each group."""
    check_groups(groups, lambda each: isinstance(each, torch.Tensor), "torch.Tensor")
    if isinstance(groups, list):
        return [_names_of(group, names) for group in groups]
    if not isinstance(groups, int):
        return []
    order = [names[parameter] for parameter in names if parameter.requires_grad]
    if reduction.active:  # the ranks might have made their parameters in different orders
        root = min(reduction.process_set.ranks or [0])
        order = broadcast_object(order, root, "groups", reduction.process_set)
    return split_evenly(order, groups)


def _names_of(group: Sequence[torch.Tensor], names: Names) -> list[str]:
    if any(parameter not in names for parameter in group):
        raise ValueError("groups has a tensor that is not a parameter of the optimizer")
    return [names[parameter] for parameter in group]


__all__ = ["DistributedOptimizer"]
