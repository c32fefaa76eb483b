"""The state of training with PyTorch, and commits of it without copies.

With ``commit="step"`` weights change in `optimizer.step()` only, and each step is a commit. A step
reduces all gradients before it changes the first weight, so a failure leaves a rank before its step
or after it, and never inside. What changes outside of the step is small and copied: plain objects,
options of the optimizer, buffers of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.base.warn import warn_user
from hvdlite.common.elastic.state import ObjectState, check_names, map_leaves
from hvdlite.common.runtime.basics import rank
from hvdlite.common.tensors.comparison import Compared
from hvdlite.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
)
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.optimizer.adasum import AdasumMixin
from hvdlite.torch.weights import of_tensor

BY_STEP = "step"


class StepTracker:
    """Counts the steps since the last commit, and finds weights that changed in no step."""

    def __init__(self, handlers: Mapping[str, StateHandler]) -> None:
        """Follow the optimizer among the handlers' values. Raises `ValueError` unless it is one."""
        self._handlers = handlers
        self._hook: Any = None
        # How many steps were made since the last commit: 0 or 1.
        self._steps = 0
        # The versions of the parameters after the last step.
        self._versions: list[int] = []
        # Whether weights have changed that no commit and no step has known, in a failure.
        self._is_inconsistent = False
        self._follow()

    def replace(self) -> None:
        """Follow the optimizer that the state has now."""
        self._hook.remove()
        self._follow()

    def _follow(self) -> None:
        optimizers = [h for h in self._handlers.values() if isinstance(h, OptimizerStateHandler)]
        if len(optimizers) != 1:
            raise ValueError(
                f'commit="step" needs one optimizer in the state, not {len(optimizers)}: with '
                'more, a failure may come between their steps; use commit="copy"'
            )
        self._optimizer: torch.optim.Optimizer = optimizers[0].value
        if isinstance(self._optimizer, (AdasumMixin, torch.optim.LBFGS)):
            raise ValueError(
                'commit="step" needs an optimizer that changes weights when all gradients of the '
                "step are reduced; Adasum and LBFGS change them before, too: use "
                'commit="copy"'
            )
        if hasattr(self._optimizer, "consolidate"):
            raise ValueError(
                'commit="step" needs an optimizer whose state is whole on each rank, and this one '
                'has shard_state=True: use commit="copy"'
            )
        self._hook = self._optimizer.register_step_post_hook(self._on_step)
        self._set_by_step(True)
        self.accept()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters()]

    def _set_by_step(self, by_step: bool) -> None:
        stepped = {id(parameter) for parameter in self._parameters()}
        for handler in self._handlers.values():
            if isinstance(handler, (ModelStateHandler, OptimizerStateHandler)):
                handler.by_step = by_step
            if isinstance(handler, ModelStateHandler):
                handler.stepped = stepped
        self._is_active = by_step

    def _on_step(self, *arguments: Any) -> None:
        self._steps += 1
        self._versions = self._current_versions()

    def accept(self) -> None:
        """Take the current weights as those of the last step: all ranks hold them, or will."""
        self._steps = 0
        self._is_inconsistent = False
        self._versions = self._current_versions()

    def on_save(self) -> None:
        """Count a commit. Raises `ValueError` after more steps than one.

        From the first change of weights outside of a step on, commits copy them.
        """
        if not self._is_active:
            return
        steps, self._steps = self._steps, 0
        if steps > 1:
            raise ValueError(
                f'commit="step" needs a commit() after each optimizer.step(), and there were '
                f'{steps} steps since the last one: call it, or use commit="copy"'
            )
        if self._versions != self._current_versions():
            warn_user(
                "weights have changed outside of optimizer.step(), so commit() copies them from "
                'now on, as with commit="copy"'
            )
            self._set_by_step(False)

    def on_restore(self) -> None:
        """Find out whether this rank is between two commits."""
        if not self._is_active:
            return
        if self._versions != self._current_versions():
            self._is_inconsistent = True
        elif self._steps:
            warn_user(
                "a collective has failed between optimizer.step() and commit(), so a step is made "
                "again: call commit() right after each step"
            )

    def held(self, commit: int) -> int:
        """Return the number of the commit that others may receive from this rank.

        A rank that has made a step without a commit has new weights with old objects: it comes
        after all ranks that hold its last commit, and goes on by itself only if there is none.
        """
        if not self._is_active or not commit:
            return commit
        if self._is_inconsistent:
            return 0
        return commit - 1 if self._steps else commit


COPY = "copy"
Registry = list[tuple[type, type[StateHandler]]]

_handler_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs of a class and its handler, of which the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: Registry) -> None:
    """Take these pairs for all states that are made from now on."""
    global _handler_registry  # noqa: PLW0603
    _handler_registry = registry


class TorchState(ObjectState):
    """The state of training with PyTorch: models, optimizers, samplers and plain objects.

    Each keyword becomes an attribute. A model, an optimizer, an `ElasticSampler`, and anything with
    ``state_dict()`` and ``load_state_dict()`` is changed in place; a value of another kind is
    copied. An attribute of the first kind can be assigned anew, which saves it at once.

    `commit` says what ``commit()`` copies. ``"copy"``: everything. ``"step"``: not the optimizer
    and the parameters that it steps, which change in its step only. No step is lost then: after a
    failure the ranks that have made the newest step go on from it, and others receive it. This
    needs one optimizer, and ``commit()`` after each step, before any other collective.

    Raises `ValueError` for a keyword that is the name of a method, and where ``commit="step"``
    cannot work.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, commit: str = COPY, **kwargs: Any
    ) -> None:
        if commit not in (COPY, BY_STEP):
            raise ValueError(f"commit={commit!r}: it must be {COPY!r} or {BY_STEP!r}")
        values = {"model": model, "optimizer": optimizer, **kwargs}
        check_names(type(self), values)
        self._handlers: dict[str, StateHandler] = {}
        self._tracker: StepTracker | None = None
        for name, value in values.items():
            handler = _handler_of(value)
            if handler is not None:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        objects = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **objects)
        if commit == BY_STEP:
            self._first_commit = 2  # See `StepTracker.held`.
            self._tracker = StepTracker(self._handlers)
            self.save()

    def save(self) -> None:
        """Copy everything that the state was made with."""
        if self._tracker is not None:
            self._tracker.on_save()
        self._save_handled()
        super().save()

    def _save_handled(self) -> None:
        """Copy what has a handler: nothing where another rank is lost that has a part of it."""
        for handler in self._handlers.values():
            handler.gather()
        for handler in self._handlers.values():
            handler.save()

    def restore(self) -> None:
        """Go back to the last save."""
        if self._tracker is not None:
            self._tracker.on_restore()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make all ranks equal to the root: what is current, and objects as last saved; save it."""
        # Optimizers last: where the root is lost in between, weights that have changed tell it.
        for handler in sorted(
            self._handlers.values(), key=lambda each: isinstance(each, OptimizerStateHandler)
        ):
            handler.sync()
        super().sync()
        self._save_handled()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one with a handler is replaced there, and saved."""
        handlers: Mapping[str, StateHandler] = self.__dict__.get("_handlers", {})
        super().__setattr__(name, value)
        if name in handlers:
            handlers[name].set_value(value)
            if self._tracker is not None:
                self._tracker.replace()

    def _begin(self) -> None:
        if self._tracker is not None:
            self._tracker.accept()
        super()._begin()

    def _settle(self) -> None:
        if self._tracker is not None:
            self._tracker.accept()

    def _held_commit(self) -> int:
        held = super()._held_commit()
        return held if self._tracker is None else self._tracker.held(held)

    def _enter_world(self) -> None:
        for handler in self._handlers.values():
            handler.enter_world()

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the plain objects; tensors with a graph, such as losses, lose it."""
        try:
            return super()._copies(values)
        except TypeError:
            detached = map_leaves(
                dict(values),
                lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf,
            )
            return super()._copies(detached)

    def _tensors_to_compare(self) -> Iterator[Compared]:
        for name, handler in self._handlers.items():
            for part, tensor in handler.tensors():
                yield of_tensor(f"{name}.{part}", tensor)


def _handler_of(value: Any) -> StateHandler | None:
    """Return a new handler for the value; None for a plain object."""
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return StateDictHandler(value) if StateDictHandler.fits(value) else None


__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]
