"""Metrics averaged over all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.keras.callbacks.base import Callback

NAME = "MetricAverageCallback"


class MetricAverageCallback(Callback):
    """Replaces every number in the logs by its average over all ranks, when an epoch ends.

    Must come before callbacks that look at the logs or write them down: ReduceLROnPlateau,
    EarlyStopping, ModelCheckpoint, TensorBoard, CSVLogger. All ranks then see the same numbers and
    decide alike. A number that is not a number (NaN) on one rank is so on all afterwards.

    `process_set` are the ranks that train the model together. `device` has no effect. `fit` raises
    `ValueError` when ranks have different metrics.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__(process_set)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place."""
        if logs is None or len(self.ranks()) == 1:
            return
        metrics = {key: np.asarray(value, np.float64) for key, value in numbers(logs).items()}
        of_ranks = allgather_object(metrics, NAME, self.process_set)
        check_same_metrics(dict(zip(self.ranks(), of_ranks, strict=True)), epoch)
        for key in metrics:
            mean = np.mean([theirs[key] for theirs in of_ranks], axis=0)
            logs[key] = float(mean) if mean.ndim == 0 else mean


def numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers among the logs, which can be averaged, in the order of their keys."""
    metrics = {}
    for key in sorted(logs):
        value = logs[key].numpy() if callable(getattr(logs[key], "numpy", None)) else logs[key]
        array = np.asarray(value)
        if np.issubdtype(array.dtype, np.number) or array.dtype == bool:
            metrics[key] = array
    return metrics


def check_same_metrics(of_ranks: dict[int, dict[str, Any]], epoch: int) -> None:
    """Raise `ValueError` if ranks have different metrics, and name both."""
    first_rank, first = next(iter(of_ranks.items()))
    for rank, other in of_ranks.items():
        shapes = {key: np.shape(value) for key, value in other.items()}
        if shapes != {key: np.shape(value) for key, value in first.items()}:
            raise ValueError(
                f"{NAME}: ranks disagree on the metrics of epoch {epoch}: rank {first_rank} has "
                f"{describe(first)}, rank {rank} has {describe(other)}. Compile the same metrics, "
                "and validate (validation_data, validation_freq) in the same epochs, on all ranks"
            )


def describe(metrics: dict[str, Any]) -> str:
    """Return the names of metrics, with the shapes of those that are no single numbers."""
    shapes = {key: np.shape(value) for key, value in metrics.items()}
    return ", ".join(f"{key}{shape or ''}" for key, shape in shapes.items()) or "none"
