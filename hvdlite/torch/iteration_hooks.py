"""What tells the iteration trace of an optimizer's iterations: hooks, while a trace is on.

    forward     of the outermost modules that are called and have parameters of the optimizer; which
                these are is found out in the first iterations, by a hook that all modules share
    backward    the first gradient asks the engine of torch to say when the pass has ended
    step        the hooks of the optimizer

No hook keeps the model or the optimizer alive, and a copy of the model has none that work.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hvdlite.common.base.warn import warn_user
from hvdlite.common.iterations.marks import StepMarks

UNSEEN_STEPS = 2  # after which forward is not looked for any more


class IterationHooks:
    """The hooks of one optimizer for one trace, from the beginning until `remove`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: StepMarks, ends_later: bool
    ) -> None:
        """With `ends_later` the optimizer itself calls `on_iteration_end`."""
        self._optimizer = weakref.ref(optimizer)
        self._steps = steps
        self._ends_later = ends_later
        self._unseen_steps = 0  # without forward
        self._in_backward = False
        self._search: Any = None  # the hook of all modules, while it is there
        self._searching = True
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._on_step_start),
            optimizer.register_step_post_hook(self._on_step_end),
            *(
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            ),
        ]
        self._look_for_forward()

    def remove(self) -> None:
        """Hook nothing any more; nothing happens the second time."""
        self._searching = False
        self._pause_search()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- forward

    def _look_for_forward(self) -> None:
        if self._searching and self._search is None:
            self._search = register_module_forward_pre_hook(_uncompiled(self._on_any_module))

    def _pause_search(self) -> None:
        if self._search is not None:
            self._search.remove()
            self._search = None

    def _on_any_module(self, module: torch.nn.Module, args: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not torch.is_grad_enabled():
            return
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            return
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if own.isdisjoint(map(id, module.parameters())):
            return
        self._pause_search()  # what is called inside is not outermost
        self._handles += [
            module.register_forward_pre_hook(_ModuleHook(_uncompiled(self._on_forward))),
            module.register_forward_hook(_ModuleHook(_uncompiled(self._on_output))),
        ]
        self._on_forward()

    def _on_forward(self) -> None:
        self._in_backward = False  # also when a pass has raised
        if torch.is_grad_enabled():  # otherwise it is no part of training
            self._steps.forward_started()

    def _on_output(self) -> None:
        if torch.is_grad_enabled():
            self._steps.forward_ended()
        if self._searching:
            self._look_for_forward()

    # -- backward

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._in_backward = False
        self._steps.backward_ended()

    # -- the step

    def _on_step_start(self, *arguments: Any) -> None:
        self._steps.optimizer_started()

    def _on_step_end(self, *arguments: Any) -> None:
        self._steps.optimizer_ended()
        if not self._ends_later:
            self.on_iteration_end()

    def on_iteration_end(self) -> None:
        """The optimizer has made its step."""
        self._in_backward = False
        computed = self._steps.bp_end is not None
        taken = self._steps.ended()
        if self._searching and computed:
            self._unseen_steps += not taken  # the first may have begun before the trace
            self._searching = not taken and self._unseen_steps < UNSEEN_STEPS
            if not self._searching:
                self._pause_search()
                if not taken:
                    _warn_unseen()

    def start_over(self) -> None:
        """The gradients are set to zero."""
        self._steps.start_over()


def _warn_unseen() -> None:
    warn_user(
        "the iteration trace sees no torch.nn.Module with parameters of the optimizer that is "
        "called before a step: put each iteration of the loop into a block 'with "
        "trace.iteration():', where trace = hvd.trace_iterations(...)"
    )


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that runs as it is, also of a module whose calls are compiled."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import; nothing is compiled
        return hook
    disable: Any = torch.compiler.disable
    uncompiled: Callable[..., None] = disable(hook)
    return uncompiled


class _ModuleHook:
    """Calls a function without arguments. A copy of the module gets one that does nothing."""

    def __init__(self, function: Callable[[], None] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        if self._function is not None:
            self._function()

    def __reduce__(self) -> Any:
        return _ModuleHook, ()
