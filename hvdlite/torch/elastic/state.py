"""The state of training with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.elastic.state import ObjectState, check_names, map_leaves
from hvdlite.common.runtime.basics import rank
from hvdlite.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
)
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.elastic.steps import BY_STEP, StepTracker

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
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the last save."""
        if self._tracker is not None:
            self._tracker.on_restore()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make all ranks equal to rank 0, and save that: what is current, objects as saved last."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

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
            return super()._copies(map_leaves(dict(values), _detached))

    def _tensors_to_compare(self) -> Iterator[tuple[str, Any]]:
        for name, handler in self._handlers.items():
            for part, tensor in handler.tensors():
                flat = tensor.detach().cpu().reshape(-1).contiguous()
                yield f"{name}.{part}", flat.view(torch.uint8).numpy()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


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
