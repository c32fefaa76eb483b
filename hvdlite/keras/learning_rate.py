"""The learning rate of a compiled model, and the velocities that contain it as a factor."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.keras.optimizer_families import parts_of


def get_learning_rate(model: Any, asked_by: str) -> float:
    """Return the learning rate of the model's optimizer.

    Raises `ValueError` for one that cannot be set, because the optimizer calculates it itself.
    """
    *_, innermost = parts_of(model.optimizer)
    argument = _learning_rate_argument(innermost)
    if callable(argument) and not hasattr(argument, "assign"):
        raise ValueError(
            f"{asked_by} sets the learning rate, but {type(innermost).__name__} was made with "
            f"learning_rate={type(argument).__name__}, which it follows itself: make it with a "
            "number, or leave the callback out"
        )
    rate = model.optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else np.asarray(rate))


def _learning_rate_argument(optimizer: Any) -> Any:
    """Return the learning rate that the optimizer was made with: a variable, number or schedule."""
    hyper = getattr(optimizer, "_hyper", {})  # The legacy optimizers of Keras 2.
    argument = hyper.get("learning_rate", getattr(optimizer, "_learning_rate", None))
    return optimizer.learning_rate if argument is None else argument


def set_learning_rate(model: Any, rate: float) -> None:
    """Set the learning rate of the model's optimizer, from the next step on."""
    model.optimizer.learning_rate = rate


def scale_velocities(model: Any, factor: float) -> None:
    """Multiply the velocities of SGD and RMSprop with momentum.

    The velocities of other optimizers do not contain the learning rate as a factor.
    """
    *_, optimizer = parts_of(model.optimizer)
    if not {"SGD", "RMSprop"} & {kind.__name__ for kind in type(optimizer).__mro__}:
        return
    for velocity in _velocities(optimizer, model):
        velocity.assign(velocity * factor)


def _velocities(optimizer: Any, model: Any) -> list[Any]:
    if hasattr(optimizer, "get_slot_names"):  # The legacy optimizers of Keras 2.
        if "momentum" not in optimizer.get_slot_names():
            return []
        return [optimizer.get_slot(weight, "momentum") for weight in model.trainable_variables]
    velocities: list[Any] = getattr(optimizer, "momentums", getattr(optimizer, "_momentums", []))
    return velocities
