"""The optimizer for every op but Adasum: gradients are reduced before the wrapped step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.warn import warn_user
from hvdlite.common.gradients.buckets import check_passes
from hvdlite.torch import mpi_ops
from hvdlite.torch.optimizer.gradient_exchange import GradientExchange
from hvdlite.torch.optimizer.segment_schedule import ParamGroups
from hvdlite.torch.subclass import OptimizerMixin, hooked

if TYPE_CHECKING:
    from hvdlite.torch.optimizer.fused_step import FusedStep

NO_EFFECT = "fuse_all_optimizer_ops has no effect"
Names = dict[torch.Tensor, str]
Closure = Callable[[], Any]


class ReducingMixin(OptimizerMixin):
    """The mixin that comes before the class of the wrapped optimizer."""

    _exchange: GradientExchange
    # The user's `fuse_all_optimizer_ops`; None: fuse the step where it is possible.
    _fuses: bool | None = None
    # Set when the segments are final and the step can be fused over them.
    _fused: FusedStep | None = None
    # The segments for which `_fused` was made, or could not be made.
    _fused_for: object = None
    # Whether the user was told that a step with a closure or an option is not fused.
    _warned_of_arguments = False
    # False inside skip_synchronize().
    _should_synchronize = True
    # Whether a GradScaler, not the user, caused the last synchronize(); step() does not warn then.
    _synchronized_for_scaler = False

    @property
    def param_groups(self) -> ParamGroups:
        """The wrapped optimizer's groups.

        ``torch.amp.GradScaler`` reads them to unscale the gradients in place, and calls nothing
        else before that. The gradients have to be reduced before they are unscaled.
        """
        exchange = self._exchange
        if exchange.reduction.active and not exchange.synchronized:
            reader = str(sys._getframe(1).f_globals.get("__name__"))
            if reader.startswith(("torch.amp.", "torch.cuda.amp.")):
                exchange.synchronize()
                self._synchronized_for_scaler = True
        groups: ParamGroups = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        self.__dict__["param_groups"] = self._exchange.param_groups = groups
        if self._exchange.reduction.active:
            self._exchange.watch()

    @property
    def _parameter_names(self) -> Names:
        return self._exchange.names

    def step(self, closure: Closure | None = None, **options: Any) -> Any:
        """Synchronize the gradients, and let the wrapped optimizer make its step with them.

        With a `closure`, gradients are synchronized each time that the wrapped optimizer has
        called it.
        """
        arguments: list[Closure] = []
        if closure is None:
            self._synchronize_for_step()
        else:
            if self._exchange.busy:
                self._exchange.synchronize()

            def synchronized_closure() -> Any:
                loss = closure()
                if not self._exchange.synchronized:
                    self._exchange.synchronize()
                self._exchange.synchronized = False
                if isinstance(self, torch.optim.LBFGS):
                    loss = self._share_loss(loss)
                return loss

            arguments.append(synchronized_closure)
        self._exchange.synchronized = self._synchronized_for_scaler = False
        with self._allow_step():
            if self._can_fuse(bool(arguments or options)):
                result = _fused_step(self)
            else:
                result = super().step(*arguments, **options)
        self._end_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # The wrapped step calls the user's hooks.

    def _can_fuse(self, with_arguments: bool) -> bool:
        """Return whether this step is fused; prepare the fused step for new segments."""
        if with_arguments:
            if self._fuses and not self._warned_of_arguments:
                self._warned_of_arguments = True
                warn_user(f"{NO_EFFECT}: step() was given a closure or an option")
            return False
        flat = self._exchange.segment_schedule.flat
        if flat is not self._fused_for:
            self._fused_for, self._fused = flat, None
            if flat is not None and self._fuses is not False:
                from hvdlite.torch.optimizer.fused_step import FusedStep  # Most jobs never need it.

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

    def _share_loss(self, loss: Any) -> Any:
        """Return the loss of all ranks: a line search decides by it, alike on all of them."""
        reduction = self._exchange.reduction
        op = reduction.scaling.op
        if not reduction.active or op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            return loss
        local = torch.as_tensor(loss, dtype=torch.float64).detach().cpu()
        return mpi_ops.allreduce(
            local, name="closure.loss", op=op, process_set=reduction.process_set
        )

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, so that they can be clipped or looked at.

        Follow it with a ``step()`` inside `skip_synchronize`. Raises `HorovodInternalError` when
        a reduction failed.
        """
        self._exchange.synchronize()
        self._synchronized_for_scaler = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` use the gradients as they are inside of this block, and send nothing."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do as the wrapped optimizer does. Raises `AssertionError` while gradients are reduced."""
        if self._exchange.busy:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition. Gradients that are to be thrown away are best not computed: by "
                "loss.backward(inputs=...), or requires_grad_(False) of their module meanwhile"
            )
        self._exchange.restart_count()
        super().zero_grad(*args, **kwargs)
        # Zeros that stay are reduced once more: other ranks may add to theirs. Where None is left,
        # reduced gradients that the user has kept may come back for the step.
        if self._exchange.synchronized:
            self._exchange.synchronized = False

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes that accumulate locally before gradients are sent."""
        return self._exchange.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._exchange.reset(check_passes(passes))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Send gradients after `passes` backward passes from now on.

        Raises `ValueError` unless it is a positive integer.
        """
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do as the wrapped optimizer does, and forget reductions in flight, as after a failure."""
        self._exchange.reset()
        super().load_state_dict(state_dict)
        self.load_compression(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Do as the wrapped optimizer does, with what compression remembers, if it does."""
        state: dict[str, Any] = super().state_dict()
        if self._exchange.feedback is not None:
            state["compression"] = self._exchange.feedback.save()
        return state

    def load_compression(self, state_dict: dict[str, Any]) -> None:
        """Load what compression has remembered, if there is something; see `FeedbackState.load`."""
        saved = state_dict.get("compression")
        if saved is not None and self._exchange.feedback is not None:
            self._exchange.feedback.load(saved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do as the wrapped optimizer does; new parameters are named after their position."""
        super().add_param_group(param_group)
        if self._exchange.reduction.active:
            self._exchange.watch()


_fused_step = hooked(lambda optimizer: optimizer._fused.step())
