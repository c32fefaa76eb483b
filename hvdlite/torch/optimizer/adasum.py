"""The optimizer for ``op=Adasum``: ranks combine their steps instead of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import ReductionConfig, check_passes
from hvdlite.torch import mpi_ops
from hvdlite.torch.optimizer.gradient_exchange import name_new, named_by_position
from hvdlite.torch.subclass import OptimizerMixin


class AdasumMixin(OptimizerMixin):
    """The mixin that comes before the class of the wrapped optimizer.

    Each rank makes a step with its own gradients. What the step has changed is then combined with
    the changes of all other ranks. Gradients stay local, and can be clipped and scaled freely.
    """

    _communicates_after_step = True
    _state_is_common = False  # It is made of the gradients of each rank.
    backward_passes_per_step: int
    _reduction: ReductionConfig
    _parameter_names: dict[torch.Tensor, str]

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Make the wrapped optimizer's step, and replace it by the Adasum of all ranks' steps."""
        arguments, active = [] if closure is None else [closure], self._reduction.active
        starts = {
            parameter: parameter.detach().clone()
            for parameter, _ in named_by_position(self.param_groups)
            if active and parameter.requires_grad
        }
        with self._allow_step():
            result = super().step(*arguments, **options)
        if active:
            with torch.no_grad():
                self._combine(starts)
        for hooks in self._trace_hooks:
            hooks.on_iteration_end()
        if active:
            self._end_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # The wrapped step calls the user's hooks.

    def _combine(self, starts: dict[torch.Tensor, torch.Tensor]) -> None:
        compression, process_set = self._reduction.compression, self._reduction.process_set
        name_new(self.param_groups, self._parameter_names)
        in_flight = []
        for parameter, start in starts.items():
            packed, context = compression.compress(parameter - start)
            name = self._parameter_names[parameter]
            handle = mpi_ops.allreduce_async_(
                packed, name=name, op=ReduceOp.ADASUM, process_set=process_set
            )
            in_flight.append((parameter, start, packed, context, handle))
        error: HorovodInternalError | None = None
        for parameter, start, packed, context, handle in in_flight:
            try:
                mpi_ops.synchronize(handle)
            except HorovodInternalError as failure:
                error = error or failure
                continue
            parameter.copy_(start.add_(compression.decompress(packed, context)))
        if error is not None:
            raise error

    def synchronize(self) -> None:
        """Do nothing: the exchange happens in ``step()``."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise `AssertionError`: there is no step of this rank alone."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer"
        )
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Remember the number; every step is exchanged, however many passes came before it."""
        self.backward_passes_per_step = check_passes(passes)
