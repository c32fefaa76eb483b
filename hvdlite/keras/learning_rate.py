"""The learning rate of a compiled model, and the velocities that it is a factor of."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.keras.optimizer_families import parts_of


def get_learning_rate(model: Any, asked_by: str) -> float:
    """The learning rate of the model's optimizer.

    Raises `ValueError` for one that cannot be set, because the optimizer calculates it itself.
    """
    *_, innermost = parts_of(model.optimizer)
    given = _given_learning_rate(innermost)
    if callable(given) and not hasattr(given, "assign"):
        raise ValueError(
            f"{asked_by} sets the learning rate, but {type(innermost).__name__} was made with "
            f"learning_rate={type(given).__name__}, which it follows itself: make it with a "
            "number, or leave the callback out"
        )
    rate = model.optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else np.asarray(rate))


def _given_learning_rate(optimizer: Any) -> Any:
    """A variable, a number, or what the optimizer was told to calculate it with."""
    hyper = getattr(optimizer, "_hyper", {})  # the legacy optimizers of Keras 2
    given = hyper.get("learning_rate", getattr(optimizer, "_learning_rate", None))
    return optimizer.learning_rate if given is None else given


def set_learning_rate(model: Any, rate: float) -> None:
    """Set the learning rate of the model's optimizer, from the next step on."""
    model.optimizer.learning_rate = rate


def scale_velocities(model: Any, factor: float) -> None:
    """Multiply what SGD and RMSprop with momentum add to the weights besides the new gradient.

    Others have velocities that the learning rate is not a factor of.
    """
    *_, optimizer = parts_of(model.optimizer)
    if not {"SGD", "RMSprop"} & {kind.__name__ for kind in type(optimizer).__mro__}:
        return
    for velocity in _velocities(optimizer, model):
        velocity.assign(velocity * factor)


def _velocities(optimizer: Any, model: Any) -> list[Any]:
    if hasattr(optimizer, "get_slot_names"):  # the legacy optimizers of Keras 2
        if "momentum" not in optimizer.get_slot_names():
            return []
        return [optimizer.get_slot(each, "momentum") for each in model.trainable_variables]
    velocities: list[Any] = getattr(optimizer, "momentums", getattr(optimizer, "_momentums", []))
    return velocities
