"""Learning rates that follow a plan, for a batch that is size() times as large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite import numpy as hvd
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.keras.callbacks.base import Callback
from hvdlite.keras.optimizer_families import parts_of


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to ``initial_lr`` times a multiplier.

    `multiplier` is a function of the epoch, or a number: that is taken to the power of the epochs
    since `start_epoch`. It is in force from `start_epoch` on, until before `end_epoch` (None: to
    the end). With `staircase` the rate changes once an epoch; otherwise with every batch, and
    the function is called with fractions of epochs. That needs `steps_per_epoch`, which is
    taken from Keras where it knows it.

    A step of SGD or RMSprop with momentum holds past gradients times past learning rates. With
    `momentum_correction` they are scaled by new rate / old rate when the rate changes (Goyal et
    al., "Accurate, Large Minibatch SGD", remark 2).

    The rate is written to ``logs['lr']`` when an epoch ends. Raises `ValueError` without an
    `initial_lr`. `fit` raises `ValueError` for an optimizer that was made with a
    LearningRateSchedule, and without `steps_per_epoch` where it is needed.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.multiplier: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: float(multiplier ** (epoch - self.start_epoch))
        )
        self.start_epoch, self.end_epoch, self.staircase = start_epoch, end_epoch, staircase
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self._detected: int | None = None  # The steps of an epoch, as they were found out last.
        self._steps = 0  # Of an epoch, as Keras knew when `fit` began; 0: it did not.
        self.current_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the rate can be set."""
        get_learning_rate(self.model, type(self).__name__)
        self._steps = self._known_steps()
        given = self.steps_per_epoch and self.steps_per_epoch != self._detected
        if not self.staircase and not given:
            self._detected = self._autodetect_steps_per_epoch()  # Each `fit` has data of its own.
            self.steps_per_epoch = self._detected

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of a staircase."""
        self.current_epoch = epoch
        if self.staircase and self._in_force():
            self._set(self.multiplier(epoch))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of a slope."""
        if not self.staircase and self._in_force():
            assert self.steps_per_epoch
            # `UpdateBatchStateCallback` leaves the batches that are to be done of this epoch.
            done = self._steps - self._known_steps() + batch
            self._set(self.multiplier(self.current_epoch + done / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the rate down."""
        if logs is not None:
            logs["lr"] = get_learning_rate(self.model, type(self).__name__)

    def _in_force(self) -> bool:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        return self.current_epoch >= self.start_epoch and not ended

    def _set(self, multiplier: float) -> None:
        old = get_learning_rate(self.model, type(self).__name__)
        new = self.initial_lr * multiplier
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old > 0 and new != old:
            scale_velocities(self.model, new / old)

    def _known_steps(self) -> int:
        return int((self.params or {}).get("steps") or 0)

    def _autodetect_steps_per_epoch(self) -> int:
        params = self.params or {}
        if steps := self._known_steps():
            return steps
        if params.get("samples") and params.get("batch_size"):
            return int(params["samples"] // params["batch_size"])
        raise ValueError(
            f"{type(self).__name__} cannot find out the number of steps per epoch: Keras does not "
            "know the length of this data before its end. Give steps_per_epoch="
        )


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to `initial_lr`, batch by batch.

    `initial_lr` is the rate of the whole batch of all ranks, such as that of one rank times
    ``size()``. It is reached with the last batch of `warmup_epochs`; with `verbose` rank 0 says so.
    `process_set` are the ranks that train the model together, whose size and first rank these are.
    Everything else as in `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(
            initial_lr,
            self._slope,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.process_set, self.warmup_epochs, self.verbose = process_set, warmup_epochs, verbose

    def _slope(self, epoch: float) -> float:
        assert self.steps_per_epoch
        done = (epoch + 1 / self.steps_per_epoch) / self.warmup_epochs  # 1 in the last batch
        size = len(self.ranks())
        return (1 + done * (size - 1)) / size

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the rate down, and say that it has been reached."""
        super().on_epoch_end(epoch, logs)
        is_first = hvd.rank() == self.ranks()[0]
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and is_first:
            rate = get_learning_rate(self.model, type(self).__name__)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def get_learning_rate(model: Any, asked_by: str) -> float:
    """Return the learning rate of the model's optimizer.

    Raises `ValueError` for one that cannot be set, because the optimizer calculates it itself.
    """
    *_, innermost = parts_of(model.optimizer)
    # What it was made with: a variable, a number or a schedule.
    hyper = getattr(innermost, "_hyper", {})  # The legacy optimizers of Keras 2.
    argument = hyper.get("learning_rate", getattr(innermost, "_learning_rate", None))
    if argument is None:
        argument = innermost.learning_rate
    if callable(argument) and not hasattr(argument, "assign"):
        raise ValueError(
            f"{asked_by} sets the learning rate, but {type(innermost).__name__} was made with "
            f"learning_rate={type(argument).__name__}, which it follows itself: make it with a "
            "number, or leave the callback out"
        )
    rate = model.optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else np.asarray(rate))


def scale_velocities(model: Any, factor: float) -> None:
    """Multiply the velocities of SGD and RMSprop with momentum.

    The velocities of other optimizers do not contain the learning rate as a factor.
    """
    *_, optimizer = parts_of(model.optimizer)
    if not {"SGD", "RMSprop"} & {kind.__name__ for kind in type(optimizer).__mro__}:
        return
    velocities: list[Any] = getattr(optimizer, "momentums", getattr(optimizer, "_momentums", []))
    if hasattr(optimizer, "get_slot_names"):  # The legacy optimizers of Keras 2.
        has_any = "momentum" in optimizer.get_slot_names()
        weights = model.trainable_variables if has_any else []
        velocities = [optimizer.get_slot(weight, "momentum") for weight in weights]
    for velocity in velocities:
        velocity.assign(velocity * factor)
