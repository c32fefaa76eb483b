"""Metrics of all ranks instead of one rank's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite import numpy as hvd
from hvdlite.common.objects import allgather_object
from hvdlite.keras.callbacks.base import Callback

NAME = "MetricAverageCallback"


class MetricAverageCallback(Callback):
    """Replaces every number in the logs by its average over all ranks, when an epoch ends.

    Must come before callbacks that look at the logs or write them down: ReduceLROnPlateau,
    EarlyStopping, ModelCheckpoint, TensorBoard, CSVLogger. All ranks then see the same numbers and
    decide alike. A number that is not a number (NaN) on one rank is so on all afterwards.

    `device` has no effect. `fit` raises `ValueError` when ranks have different metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place."""
        if logs is None or hvd.size() == 1:
            return
        own = {key: np.asarray(value, np.float64) for key, value in numbers(logs).items()}
        of_ranks = allgather_object(own, NAME)
        check_same_metrics(of_ranks, epoch)
        for key in own:
            mean = np.mean([each[key] for each in of_ranks], axis=0)
            logs[key] = float(mean) if mean.ndim == 0 else mean


def numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """What can be averaged of the logs, in the order of their keys."""
    found = {}
    for key in sorted(logs):
        value = logs[key].numpy() if callable(getattr(logs[key], "numpy", None)) else logs[key]
        array = np.asarray(value)
        if np.issubdtype(array.dtype, np.number) or array.dtype == bool:
            found[key] = array
    return found


def check_same_metrics(of_ranks: list[dict[str, Any]], epoch: int) -> None:
    """Raises `ValueError` that names what one rank has and another has not."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        shapes = {key: np.shape(value) for key, value in other.items()}
        if shapes != {key: np.shape(value) for key, value in first.items()}:
            raise ValueError(
                f"{NAME}: ranks disagree on the metrics of epoch {epoch}: rank 0 has "
                f"{describe(first)}, rank {rank} has {describe(other)}. Compile the same metrics, "
                "and validate (validation_data, validation_freq) in the same epochs, on all ranks"
            )


def describe(metrics: dict[str, Any]) -> str:
    """Names of metrics, with the shapes of those that are no single numbers."""
    shapes = {key: np.shape(value) for key, value in metrics.items()}
    return ", ".join(f"{key}{shape or ''}" for key, shape in shapes.items()) or "none"
