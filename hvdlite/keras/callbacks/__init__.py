"""Callbacks for `fit`, the same for Keras 3, with any backend, and for Keras 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite import numpy as hvd
from hvdlite.common.api.objects import allgather_object
from hvdlite.common.iterations.following import Following
from hvdlite.common.iterations.marks import IterationMarks
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.keras.callbacks.base import Callback
from hvdlite.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdlite.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvdlite.keras.framework import keras, wait_for_programs


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint with ``save_best_only``, for a file that is named later.

    Set `filepath` before `fit`: with the endings that Keras asks for, ``.weights.h5`` for
    `save_weights_only`, otherwise ``.keras``. It writes on every rank that has the callback; give
    it to one rank only, or one file to each. `monitor`, `verbose`, `mode` and `save_freq` as there.

    `fit` raises `ValueError` when there is no `filepath`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            "later.weights.h5" if save_weights_only else "later.keras",  # Keras looks at the ending
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that there is a file to write to."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint does not know where to save: set its filepath")
        self.filepath = str(self.filepath)
        super().on_train_begin(logs)


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
        metrics = {}
        for key in sorted(logs):
            value = logs[key].numpy() if callable(getattr(logs[key], "numpy", None)) else logs[key]
            array = np.asarray(value)
            if np.issubdtype(array.dtype, np.number) or array.dtype == bool:
                metrics[key] = np.asarray(array, np.float64)
        of_ranks = allgather_object(metrics, "MetricAverageCallback", self.process_set)
        _check_same_metrics(dict(zip(self.ranks(), of_ranks, strict=True)), epoch)
        for key in metrics:
            mean = np.mean([theirs[key] for theirs in of_ranks], axis=0)
            logs[key] = float(mean) if mean.ndim == 0 else mean


def _check_same_metrics(of_ranks: dict[int, dict[str, Any]], epoch: int) -> None:
    """Raise `ValueError` if ranks have different metrics, and name both."""
    first_rank, first = next(iter(of_ranks.items()))
    for rank, other in of_ranks.items():
        shapes = {key: np.shape(value) for key, value in other.items()}
        if shapes != {key: np.shape(value) for key, value in first.items()}:
            raise ValueError(
                f"MetricAverageCallback: ranks disagree on the metrics of epoch {epoch}: rank "
                f"{first_rank} has {_describe(first)}, rank {rank} has {_describe(other)}. Compile "
                "the same metrics, and validate (validation_data, validation_freq) in the same "
                "epochs, on all ranks"
            )


def _describe(metrics: dict[str, Any]) -> str:
    """Return the names of metrics, with the shapes of those that are no single numbers."""
    shapes = {key: np.shape(value) for key, value in metrics.items()}
    return ", ".join(f"{key}{shape or ''}" for key, shape in shapes.items()) or "none"


class TerminateOnNaN(Callback):
    """Ends `fit` on all ranks after the batch in which the loss of any was NaN or infinite.

    It is Keras' callback of this name for several ranks: that one ends the epoch where it sees such
    a loss, and the others would wait for gradients of that rank. All ranks have it, and each batch
    takes an allreduce of one number. With `raise_error` all raise `RuntimeError` instead, so that
    no callback does what it would at the end of a training that went well.

    `process_set` are the ranks that train the model together.
    """

    def __init__(
        self, raise_error: bool = False, process_set: ProcessSet = global_process_set
    ) -> None:
        super().__init__(process_set)
        self.raise_error = raise_error

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that there are ranks to agree with."""
        self.ranks()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Agree with the other ranks."""
        loss = (logs or {}).get("loss")
        is_bad = loss is not None and not np.isfinite(float(loss))
        found = np.array([hvd.rank() if is_bad else -1])
        if len(self.ranks()) > 1:
            found = hvd.allreduce(
                found, name="TerminateOnNaN", op=hvd.Max, process_set=self.process_set
            )
        if found[0] < 0:
            return
        message = f"batch {batch}: the loss of rank {found[0]} is NaN or infinite"
        if self.raise_error:
            raise RuntimeError(f"TerminateOnNaN: {message}")
        if hvd.rank() == self.ranks()[0]:
            print(f"\nTerminateOnNaN: {message}: training ends on all ranks.")
        self._trained.stop_training = True


class IterationTraceCallback(Callback):
    """Records each batch as an iteration of `trace`, which `trace_iterations` has returned.

    Keras trains a batch in one call: forward begins where the batch begins, and ends unseen; the
    end of backward is when the last gradient was handed over. The optimizer's time is not known
    apart, and is part of the tail. With ``steps_per_execution`` several steps are one iteration.

    Several `fit` can be traced one after the other; stop the trace when they are done.
    """

    def __init__(self, trace: Following) -> None:
        super().__init__()
        self._trace = trace
        self._batch: IterationMarks | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Discard the batch that raised in a `fit` before this one."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.discard()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an iteration."""
        self._batch = self._trace.iteration().__enter__()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """End the iteration."""
        block, self._batch = self._batch, None
        if block is not None:
            wait_for_programs()
            block.__exit__(None)


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "IterationTraceCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "TerminateOnNaN",
]
