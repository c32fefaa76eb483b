"""Callbacks for `fit`, the same for Keras 3, with any backend, and for Keras 2."""

from __future__ import annotations

from hvdlite.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdlite.keras.callbacks.checkpoint import BestModelCheckpoint
from hvdlite.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvdlite.keras.callbacks.metrics import MetricAverageCallback
from hvdlite.keras.callbacks.trace import IterationTraceCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "IterationTraceCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
