"""Callbacks that count epochs and batches in a state of elastic training, and commit it.

Their order does not matter: a commit lets the callbacks that count for the same state in the same
`fit` count first. The end of an epoch is not divided: its last batch, its validation, and what all
callbacks do at its end are committed together, so that none of that is left out if ranks change.
"""

from __future__ import annotations

import logging
from typing import Any

from hvdlite.keras.callbacks.base import Callback

Logs = dict[str, Any] | None
log = logging.getLogger("hvdlite")


class CompletedBatch(int):
    """The number of a batch that is done, unlike a plain number, which is that of batches done."""


def _batches_done(batch: int) -> int:
    return batch + 1 if isinstance(batch, CompletedBatch) else batch


class StateCallback(Callback):
    """The base of these callbacks, for one state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        # The number that Keras gives to the current epoch; None: none has begun.
        self._epoch: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Let commits of the state find this callback."""
        self._epoch = None
        others = [callback for callback in self.callbacks() if callback is not self]
        self.state._callbacks = [*others, self]

    def callbacks(self) -> list[StateCallback]:
        """Return the callbacks for this state that take part in the same `fit`."""
        known: list[StateCallback] = vars(self.state).get("_callbacks", [])
        return [callback for callback in known if callback.params is self.params]

    def is_last_batch(self, batch: int) -> bool:
        """Return whether a batch of the current epoch is known to be its last one."""
        return False

    def end_batch(self, batch: int) -> None:
        """Let all callbacks for this state count a batch, and the epoch if that ends with it."""
        callbacks = self.callbacks()
        for callback in callbacks:
            callback.count_batch(batch)
        counts_epochs = any(isinstance(each, UpdateEpochStateCallback) for each in callbacks)
        if self._epoch is None or not counts_epochs:
            return  # A script that counts epochs itself does so at their ends.
        if any(callback.is_last_batch(batch) for callback in callbacks):
            for callback in callbacks:
                callback.count_epoch(self._epoch)

    def count_batch(self, batch: int) -> None:
        """Write down that a batch is done; may be called again for the same one."""

    def count_epoch(self, epoch: int) -> None:
        """Write down that an epoch is done; may be called again for the same one."""


class CommitStateCallback(StateCallback):
    """Commits `state` after every `batches_per_commit` batches, and at the end of each epoch.

    An epoch is committed when all callbacks have seen its end, with its last batch, and have undone
    for the next one what they had changed for its validation: before the first batch of that, or as
    training ends. A commit may raise `HostsUpdatedInterrupt`, which ends `fit`. Raises
    `ValueError` unless `batches_per_commit` is a positive integer.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit={batches_per_commit}: it must be at least 1")
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit
        # Whether an epoch is over and not committed yet.
        self._epoch_is_due = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Count batches from the beginning."""
        super().on_train_begin(logs)
        self.batches_remaining = self.batches_per_commit
        self._epoch_is_due = False

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Commit the epoch before."""
        self._commit_epoch()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit if it is time, and the epoch goes on."""
        self.batches_remaining -= 1
        if self.batches_remaining > 0:
            return
        self.batches_remaining = self.batches_per_commit
        self.end_batch(batch)
        steps = (self.params or {}).get("steps")  # Of those that are left of the epoch.
        if steps is None or batch + 1 < steps:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Count the epoch. Callbacks that come later in the list have not seen its end yet."""
        for callback in self.callbacks():
            callback.count_epoch(epoch)
        self._epoch_is_due = True

    def on_train_end(self, logs: Logs = None) -> None:
        """Commit the last epoch."""
        self._commit_epoch()

    def _commit_epoch(self) -> None:
        if self._epoch_is_due:
            self._epoch_is_due = False
            self.state.commit()


class UpdateBatchStateCallback(StateCallback):
    """Keeps the number of the last batch of this epoch in ``state.batch``.

    After a reset the first epoch has only the batches that are left of it: `fit` then ends it
    early, if Keras knows how many batches an epoch has, and their numbers go on; if it does not,
    all batches are done again, and a warning says so. At the end of an epoch, which is its last
    batch where `UpdateEpochStateCallback` counts epochs, ``state.batch`` is 0. A number that you
    have set yourself is that of batches done.
    """

    _has_warned = False

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        # How many batches of the current epoch were done before this `fit`.
        self._done_before = 0
        # How many batches an epoch has; None: Keras does not know.
        self._steps: int | None = None
        self._end = _EndOfEpoch()

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out how long an epoch is."""
        super().on_train_begin(logs)
        self._steps = (self.params or {}).get("steps")
        self._done_before = 0
        # An earlier `fit` may have been left before the batch that was to be skipped.
        train = self.model.train_function
        self.model.train_function = getattr(train, "instead_of", train)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Plan the batches that are left."""
        super().on_epoch_begin(epoch)
        self._done_before = 0
        if self._steps is None or self.params is None:
            self._warn_of_repeated_batches()
            return
        self._done_before = _batches_done(self.state.batch)
        self.params["steps"] = max(self._steps - self._done_before, 0)  # What Keras shows.
        if self._done_before >= self._steps:
            self._skip_one_batch()

    def _warn_of_repeated_batches(self) -> None:
        """Say once what an epoch of unknown length means after a reset.

        The number of batches of an earlier epoch would be of no use: it changes with the ranks that
        share the data, and a newcomer has seen none.
        """
        done = _batches_done(getattr(self.state, "batch", 0))
        if done == 0 or self._has_warned:
            return
        UpdateBatchStateCallback._has_warned = True
        log.warning(
            "Keras does not know how many batches an epoch of this dataset has, so the %d batches "
            "that were done of this one before the reset are done again: give fit() "
            "steps_per_epoch, or the dataset tf.data.experimental.assert_cardinality(batches)",
            done,
        )

    def _skip_one_batch(self) -> None:
        """Let the epoch, whose batches are all done, pass without training: Keras begins one."""
        model, train = self.model, self.model.train_function

        def skip(*arguments: Any) -> Any:
            model.train_function = train
            *state, _ = arguments  # With JAX the first is the state, which is returned.
            return ({}, *state) if state else {}

        skip.instead_of = train  # type: ignore[attr-defined]
        model.train_function = skip

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count, and end an epoch that has begun in an earlier `fit`."""
        self.end_batch(batch)
        if self._done_before and self.is_last_batch(batch):
            self._end.is_reached = True
            if not self.model.stop_training:
                self.model.stop_training = self._end

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Begin the next epoch with its first batch."""
        self._end.is_reached = False
        self.count_epoch(epoch)

    def is_last_batch(self, batch: int) -> bool:
        return self._steps is not None and self._done_before + batch + 1 >= self._steps

    def count_batch(self, batch: int) -> None:
        if self._steps is None or self._done_before < self._steps:
            self.state.batch = CompletedBatch(self._done_before + batch)

    def count_epoch(self, epoch: int) -> None:
        self.state.batch = 0


class _EndOfEpoch:
    """What ``model.stop_training`` is to end an epoch: true after its last batch only.

    Keras asks once after each batch and once after each epoch. Another callback that wants to end
    the training replaces it by True.
    """

    is_reached = False

    def __bool__(self) -> bool:
        return self.is_reached


class UpdateEpochStateCallback(StateCallback):
    """Keeps the number of epochs that are done in ``state.epoch``.

    Where `UpdateBatchStateCallback` knows the last batch of an epoch, it is done with that.

    `fit` gets ``initial_epoch=state.epoch``. With ``epochs=total - state.epoch``, as Horovod's
    examples have it, all that goes by the number of the epoch begins anew after a reset.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.initial_epoch = 0
        # The number that Keras gives to the first epoch of this `fit`.
        self._first: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Remember how many epochs were done before."""
        super().on_train_begin(logs)
        self.initial_epoch, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Notice from which number Keras counts."""
        super().on_epoch_begin(epoch)
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Count."""
        self.count_epoch(epoch)

    def count_epoch(self, epoch: int) -> None:
        first = epoch if self._first is None else self._first
        self.state.epoch = self.initial_epoch + epoch - first + 1
