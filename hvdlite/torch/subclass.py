"""The subclass of an optimizer's class that makes it a distributed one; hooks of a trace."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hvdlite.common.base.warn import warn_user
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.gradients.weights_check import WeightsCheck
from hvdlite.common.iterations.marks import StepMarks
from hvdlite.common.runtime.basics import is_initialized
from hvdlite.common.runtime.process_sets import ProcessSet

# The decorator of torch that calls the user's hooks before and after a step.
hooked: Any = torch.optim.Optimizer.profile_hook_step


class OptimizerMixin(torch.optim.Optimizer):
    """The base of the mixins, which come before the class of the wrapped optimizer."""

    # True while the mixin itself calls the wrapped optimizer's step.
    _step_allowed = False
    # Whether the step is followed by communication. The mixin calls `on_iteration_end` then.
    _communicates_after_step = False
    _trace_hooks: tuple[IterationHooks, ...] = ()
    _after_step: tuple[Callable[[], None], ...] = ()
    _parameter_names: Any  # a dict of names by parameter
    # Compares the weights of all ranks after some steps, where the settings ask for it.
    _weights_check: WeightsCheck | None = None
    # Whether each rank has all of the optimizer's state, as the others have it.
    _state_is_common = True

    @contextmanager
    def _allow_step(self) -> Iterator[None]:
        """Let the wrapped optimizer make its step inside of this block."""
        self._step_allowed = True
        try:
            yield
        finally:
            self._step_allowed = False

    def call_after_step(self, function: Callable[[], None]) -> None:
        """Call `function` once, in the training thread, when the next step has ended."""
        self._after_step = (*self._after_step, function)

    def _end_step(self) -> None:
        """Do what is due after a step: begin to count, or compare the weights of all ranks."""
        if self._after_step:
            due, self._after_step = self._after_step, ()
            for function in due:
                function()
        if self._weights_check is not None:
            from hvdlite.torch.weights import weights_of  # Most jobs never need it.

            self._weights_check.step(
                lambda: weights_of(self, self._parameter_names, state=self._state_is_common)
            )

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do as the wrapped optimizer does, which then has the same groups and state."""
        with same_objects(self):
            super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy would lack the exchange with other ranks."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: save its state_dict(), or wrap "
            "a copy of the optimizer that it was made from"
        )


@contextmanager
def same_objects(wrapped: Any) -> Iterator[None]:
    """Let what is loaded inside of this block fill the groups and the state that there are.

    The optimizer that was wrapped shares them: its schedulers set the rates there.
    """
    groups, state = wrapped.__dict__["param_groups"], wrapped.state
    yield
    for group, loaded in zip(groups, wrapped.__dict__["param_groups"], strict=True):
        options = {**loaded}
        group.clear()
        group.update(options)
    entries = {**wrapped.state}
    state.clear()
    state.update(entries)
    wrapped.__dict__["param_groups"], wrapped.state = groups, state


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
    own: Any = optimizer

    def check(stepping: Any, *arguments: Any) -> None:
        allowed = isinstance(stepping, OptimizerMixin) and stepping._step_allowed
        if not allowed and is_initialized() and reduction.active:
            raise RuntimeError(
                f"this step() of {type(stepping).__name__} would apply gradients of this rank "
                "alone, and the ranks' weights would drift apart: call step() of the optimizer "
                "that DistributedOptimizer has returned"
            )
        own._opt_called = True  # As its schedulers have its step note: they warn of none.

    optimizer.register_step_pre_hook(check)  # Both share their hooks.
    return wrapped


def wrapped_class(optimizer: torch.optim.Optimizer) -> type:
    """Return the class of an optimizer, or of the one that was wrapped."""
    return next(cls for cls in type(optimizer).__mro__ if not issubclass(cls, OptimizerMixin))


# So many steps without a forward pass of any module end the search for modules, with a warning.
UNSEEN_STEPS = 2


class IterationHooks:
    """The hooks that mark the iterations of an optimizer in a trace, until `remove`.

    forward     hooks of the outermost modules that have parameters of the optimizer; a hook that
                all modules share finds these modules in the first iterations, and again when a
                step had none of them
    backward    a hook of each gradient, or the exchange that has one; the first gradient of a pass
                asks torch's autograd engine to call back when the pass has ended
    step        the step hooks of the optimizer

    No hook keeps the model or the optimizer alive. In a copy of the model, the hooks do nothing.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: StepMarks, ends_later: bool
    ) -> None:
        """Register the hooks. With `ends_later` the optimizer itself calls `on_iteration_end`."""
        self._optimizer = weakref.ref(optimizer)
        self._steps = steps
        self._ends_later = ends_later
        self._unseen_steps = 0  # steps without a forward pass, since modules were found
        self._in_backward = False
        # The hook that all modules share. None while a module that it found is running, and when
        # the search has ended.
        self._search: Any = None
        self._searching = True
        # The modules that it found, of which some have a hook for their output.
        self._found: WeakSet[torch.nn.Module] = WeakSet()
        self._with_output_hook: WeakSet[torch.nn.Module] = WeakSet()
        self._found_more = False  # since the search began
        # Discards the marks of this iteration, since its gradients are set to zero.
        self.start_over = steps.start_over
        self._handles: list[Any] = [optimizer.register_step_post_hook(self._on_step_end)]
        if not steps.coarse:
            self._handles.append(optimizer.register_step_pre_hook(self._on_step_start))
        self._output_hooks: list[Any] = []
        exchange: Any = getattr(optimizer, "_exchange", None)
        if getattr(exchange, "hooks_all", False):  # Not the exchange of a sharded state.
            self._handles.append(
                _Listening(exchange, "before_waiting", steps.backward_ended)
                if steps.coarse
                else _Listening(exchange, "listeners", self._on_gradient)
            )
        else:
            self._handles += [
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            ]
        self._resume_search()

    def remove(self) -> None:
        """Remove all hooks; idempotent."""
        self._searching = False
        self._pause_search()
        for handle in (*self._handles, *self._output_hooks):
            handle.remove()
        self._handles.clear()
        self._output_hooks.clear()

    # -- forward

    def _resume_search(self) -> None:
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
        if isinstance(module, torch.jit.ScriptModule):  # These accept no hooks.
            return
        optimized = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        if optimized.isdisjoint(map(id, module.parameters())):
            return
        self._pause_search()  # Modules that are called inside of this one are not outermost.
        if module not in self._with_output_hook:
            self._with_output_hook.add(module)
            self._output_hooks.append(module.register_forward_hook(_ModuleHook(self._on_output)))
        if module not in self._found:
            self._found.add(module)
            self._found_more = True
            self._handles.append(module.register_forward_pre_hook(_ModuleHook(self._on_forward)))
            self._on_forward(module, args)

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        # A backward pass that raised an error has not called `_on_backward_end`.
        self._in_backward = False
        if torch.is_grad_enabled():  # Otherwise the pass is no part of training.
            batch = args[0] if args else None
            if isinstance(batch, torch.Tensor) and batch.dim():
                self._steps.forward_started(batch.shape[0])
            else:
                self._steps.forward_started()

    def _on_output(self, *arguments: Any) -> None:
        if torch.is_grad_enabled():
            self._steps.forward_ended()
        if self._searching:
            self._resume_search()

    # -- backward

    def _on_gradient(self, *parameter: torch.Tensor) -> None:
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
        """Mark the end of an iteration: the optimizer has made its step."""
        self._in_backward = False
        computed, began = self._steps.bp_end is not None, self._steps.fp_start is not None
        accepted = self._steps.ended()
        if not computed or not self._handles:  # Without them it was removed meanwhile.
            return
        if not accepted:
            # One step without forward is no reason to warn: it may have begun before the trace.
            self._unseen_steps += 1
            if self._unseen_steps < UNSEEN_STEPS:
                self._searching = True  # Maybe again: steps may run another module by now.
                self._resume_search()
            elif self._searching:
                self._end_search()
                warn_user(
                    "the iteration trace sees no torch.nn.Module with parameters of the optimizer "
                    "that is called before a step: put each iteration of the loop into a block "
                    "'with trace.iteration():', where trace = hvd.trace_iterations(...); the live "
                    "view takes their number from hvd.progress(total, done)"
                )
        elif self._searching and (self._found_more or not self._unseen_steps or not began):
            # Otherwise a module that was found before has run, and not the one that is wanted.
            self._unseen_steps = 0
            self._end_search()

    def _end_search(self) -> None:
        self._searching = self._found_more = False
        self._pause_search()
        if self._steps.coarse:
            for handle in self._output_hooks:
                handle.remove()
            self._output_hooks.clear()
            self._with_output_hook.clear()


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile calls instead of tracing into it."""
    if "torch._dynamo" not in sys.modules:  # Nothing is compiled, and the import takes seconds.
        return hook
    disable: Any = torch.compiler.disable
    uncompiled: Callable[..., None] = disable(hook)
    return uncompiled


class _ModuleHook:
    """A hook that calls a function, also of compiled code; a copied module's copy does nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function
        # Every call of one that torch.compile leaves alone takes some 5 us.
        self._of_compiled = None if function is None else _uncompiled(function)

    def __call__(self, *arguments: Any) -> None:
        function = self._of_compiled if torch.compiler.is_compiling() else self._function
        if function is not None:
            function(*arguments)

    def __reduce__(self) -> Any:
        return _ModuleHook, ()


class _Listening:
    """A function among those that an exchange calls, until `remove`."""

    def __init__(self, exchange: Any, place: str, function: Callable[[], None]) -> None:
        self._exchange, self._place, self._function = weakref.ref(exchange), place, function
        setattr(exchange, place, (*getattr(exchange, place), function))

    def remove(self) -> None:
        exchange = self._exchange()
        if exchange is not None:
            functions = getattr(exchange, self._place)
            others = tuple(each for each in functions if each != self._function)
            setattr(exchange, self._place, others)
