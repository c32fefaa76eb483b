"""How an optimizer becomes a distributed one of the same class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.iterations.marks import StepMarks
from hvdlite.common.runtime.basics import is_initialized
from hvdlite.torch.iteration_hooks import IterationHooks


class Wrapped(torch.optim.Optimizer):
    """What comes before the class of the wrapped optimizer."""

    _in_own_step = False
    _communicates_after_step = False  # and says itself when its iteration has ended
    _trace_hooks: tuple[IterationHooks, ...] = ()
    _parameter_names: Any  # dict of names by parameter

    @contextmanager
    def _own_step(self) -> Iterator[None]:
        """Within this the wrapped optimizer's step is made as it should be."""
        self._in_own_step = True
        try:
            yield
        finally:
            self._in_own_step = False

    def trace_steps(self, steps: StepMarks) -> Callable[[], None]:
        """Tell `steps` of every iteration, until what this returns is called."""
        hooks = IterationHooks(self, steps, self._communicates_after_step)
        self._trace_hooks = (*self._trace_hooks, hooks)
        this = weakref.ref(self)

        def end() -> None:
            hooks.remove()
            if (alive := this()) is not None:
                others = (each for each in alive._trace_hooks if each is not hooks)
                alive._trace_hooks = tuple(others)

        return end

    def gradient_names(self) -> Collection[str]:
        """The names under which gradients travel."""
        names: Collection[str] = self._parameter_names.values()
        return names

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; an iteration that is traced begins anew."""
        for hooks in self._trace_hooks:
            hooks.start_over()
        super().zero_grad(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Its exchange with other ranks cannot be copied, and a copy without it would go astray."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: save its state_dict(), or wrap "
            "a copy of the optimizer that it was made from"
        )


def wrap(mixin: type[Wrapped], optimizer: torch.optim.Optimizer, reduction: ReductionConfig) -> Any:
    """The optimizer once more, with its groups and its state, as an instance of a new class.

    The class has the name of the optimizer's own, and is derived from it. From now on the
    optimizer that was wrapped refuses to step.
    """
    base = type(optimizer)
    same = {"__doc__": base.__doc__, "__module__": base.__module__}
    cls: Any = type(base.__name__, (mixin, base), same)
    wrapped: Any = object.__new__(cls)
    for name, value in vars(optimizer).items():
        # A learning rate scheduler puts its own step() in the way of the method.
        if not callable(getattr(cls, name, None)):
            wrapped.__dict__[name] = value
    optimizer.register_step_pre_hook(_refuse_other_steps(reduction))  # both share their hooks
    return wrapped


def _refuse_other_steps(reduction: ReductionConfig) -> Callable[..., None]:
    def check(optimizer: Any, *arguments: Any) -> None:
        own = isinstance(optimizer, Wrapped) and optimizer._in_own_step
        if not own and is_initialized() and reduction.active:
            raise RuntimeError(
                f"this step() of {type(optimizer).__name__} would apply gradients of this rank "
                "alone, and the ranks' weights would drift apart: call step() of the optimizer "
                "that DistributedOptimizer has returned"
            )

    return check
