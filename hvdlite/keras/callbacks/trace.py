"""The iterations of `fit` in an iteration trace."""

from __future__ import annotations

from typing import Any

from hvdlite.common.iterations.marks import IterationMarks
from hvdlite.common.iterations.trace import IterationTrace
from hvdlite.keras.callbacks.base import Callback


class IterationTraceCallback(Callback):
    """Records each batch as an iteration of `trace`, which `trace_iterations` has returned.

    Keras trains a batch in one call: forward begins where the batch begins, and ends unseen; the
    end of backward is when the last gradient was handed over. The optimizer's time is not known
    apart, and is part of the tail. With ``steps_per_execution`` several steps are one iteration.

    Several `fit` can be traced one after the other; stop the trace when they are done.
    """

    def __init__(self, trace: IterationTrace) -> None:
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
            block.__exit__(None)
