"""The subclass of an optimizer's class that makes it a distributed one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.iterations.marks import StepMarks
from hvdlite.common.runtime.basics import is_initialized
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.torch.iteration_hooks import IterationHooks


class OptimizerMixin(torch.optim.Optimizer):
    """The base of the mixins, which come before the class of the wrapped optimizer."""

    # True while the mixin itself calls the wrapped optimizer's step.
    _step_allowed = False
    # Whether the step is followed by communication. The mixin calls `on_iteration_end` then.
    _communicates_after_step = False
    _trace_hooks: tuple[IterationHooks, ...] = ()
    _parameter_names: Any  # a dict of names by parameter

    @contextmanager
    def _allow_step(self) -> Iterator[None]:
        """Let the wrapped optimizer make its step inside of this block."""
        self._step_allowed = True
        try:
            yield
        finally:
            self._step_allowed = False

    def trace_steps(self, steps: StepMarks) -> Callable[[], None]:
        """Mark every iteration in `steps`; return a function that ends this."""
        hooks = IterationHooks(self, steps, self._communicates_after_step)
        self._trace_hooks = (*self._trace_hooks, hooks)
        reference = weakref.ref(self)

        def close() -> None:
            hooks.remove()
            if (optimizer := reference()) is not None:
                others = (other for other in optimizer._trace_hooks if other is not hooks)
                optimizer._trace_hooks = tuple(others)

        return close

    def gradient_names(self) -> Collection[str]:
        """Return the names under which gradients are reduced."""
        names: Collection[str] = self._parameter_names.values()
        return names

    def share_state(self, root_rank: int, process_set: ProcessSet) -> bool:
        """Return whether state was made equal on all ranks; False where it is all on each rank."""
        return False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do as the wrapped optimizer does; an iteration that is traced begins anew."""
        for hooks in self._trace_hooks:
            hooks.start_over()
        super().zero_grad(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy would lack the exchange with other ranks."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: save its state_dict(), or wrap "
            "a copy of the optimizer that it was made from"
        )


def wrap(
    mixin: type[OptimizerMixin], optimizer: torch.optim.Optimizer, reduction: ReductionConfig
) -> Any:
    """Return an instance of a new class that shares the groups and the state of `optimizer`.

    The class has the name of the optimizer's class, and is derived from it. From now on the
    optimizer that was wrapped refuses to step.
    """
    base = type(optimizer)
    same = {"__doc__": base.__doc__, "__module__": base.__module__}
    cls: Any = type(base.__name__, (mixin, base), same)
    wrapped: Any = object.__new__(cls)
    for name, value in vars(optimizer).items():
        # A learning rate scheduler replaces step() on the instance. That one belongs to the
        # optimizer that was wrapped.
        if not callable(getattr(cls, name, None)):
            wrapped.__dict__[name] = value
    optimizer.register_step_pre_hook(_refuse_other_steps(reduction))  # Both share their hooks.
    return wrapped


def _refuse_other_steps(reduction: ReductionConfig) -> Callable[..., None]:
    def check(optimizer: Any, *arguments: Any) -> None:
        allowed = isinstance(optimizer, OptimizerMixin) and optimizer._step_allowed
        if not allowed and is_initialized() and reduction.active:
            raise RuntimeError(
                f"this step() of {type(optimizer).__name__} would apply gradients of this rank "
                "alone, and the ranks' weights would drift apart: call step() of the optimizer "
                "that DistributedOptimizer has returned"
            )

    return check
