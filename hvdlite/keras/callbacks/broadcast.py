"""All ranks start `fit` from the same variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import numpy as hvd
from hvdlite.common.base.warn import warn_user
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.keras.callbacks.base import Callback
from hvdlite.keras.optimizer_families import inside_of, parts_of
from hvdlite.keras.subclass import Distributed
from hvdlite.keras.variables import (
    broadcast_values,
    build_optimizer_for,
    model_variables,
    optimizer_variables,
    optimizers_of,
    sources,
    without,
)

NAME = "BroadcastGlobalVariablesCallback"
NONE = -1  # in place of an epoch


class BroadcastGlobalVariablesCallback(Callback):
    """Gives the variables of the model and of its optimizers on `root_rank` to all ranks, once.

    It does so before the first batch, so that already the first step is the same everywhere.
    Variables that come into being in the first batch are made equal at its end, and all others
    then once more: on the root only may the state have been loaded from a checkpoint.

    Where a callback before this one has restored a backup on the root, as `BackupAndRestore` of
    Keras 3 does, all ranks go on at its epoch, with its variables in each such `fit`.

    `local_variables` are left alone: variables, whose values each rank keeps for itself.
    `process_set` are the ranks that train the model together; `root_rank` is a global rank, one of
    them. `device` has no effect. Raises `ValueError` for what is no variable. `fit` raises
    `ValueError` when ranks have different numbers of variables, or begin at different epochs, and
    `HorovodInternalError` when they have other shapes or dtypes, or a rank is lost.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Sequence[Any] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(process_set)
        self.root_rank = root_rank
        self.broadcast_done = False
        self._broadcast_count = 0  # of variables, before the first batch
        self._epochs_are_due = False  # to be compared, in this `fit`
        self._local_variables: list[Any] = []
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable alone. Raises `ValueError` for what is no variable."""
        if not sources().is_variable(var):
            raise ValueError(
                f"a local variable must be a variable of Keras, not {var!r}; those of a layer are "
                "layer.weights"
            )
        self._local_variables.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Make equal what there is, where that is the same on all ranks."""
        self._epochs_are_due = len(self.ranks()) > 1
        if not self._epochs_are_due:
            return
        if self._take_restored_epoch():
            self.broadcast_done = False  # An earlier `fit` has not given what was restored since.
            self._broadcast_count = 0
        if self.broadcast_done:
            return
        if self.model.built:
            build_optimizer_for(self.model.optimizer, self.model)
        self._warn_of_drift()
        variables = self._variables()
        counts, built = self._gather([len(variables), bool(self.model.built)]).T
        if built.all():
            self._check_same(counts)
        if (counts == len(variables)).all():
            broadcast_values(variables, self.root_rank, NAME, self.process_set)
            self._broadcast_count = len(variables)

    def _take_restored_epoch(self) -> bool:
        """Go on where the root does; return whether that is at the epoch of a backup."""
        own = np.array([self._restored_epoch()])
        (epoch,) = hvd.broadcast(own, self.root_rank, f"{NAME}.epoch", self.process_set)
        if hasattr(self._trained, "_initial_epoch"):
            self._trained._initial_epoch = None if epoch == NONE else int(epoch)
        return bool(epoch != NONE)

    def _restored_epoch(self) -> int:
        """Return the epoch of a backup, at which `fit` of Keras 3 begins after all callbacks."""
        epoch = getattr(self._trained, "_initial_epoch", None)
        return NONE if epoch is None else int(epoch)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compare the first epoch of all ranks."""
        self._check_epochs(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Meet the ranks that have begun an epoch, if there was none here."""
        self._check_epochs(NONE)

    def _check_epochs(self, first: int) -> None:
        """Raise `ValueError` if ranks begin at different epochs, or some with a backup."""
        if not self._epochs_are_due:
            return
        self._epochs_are_due = False
        epochs = self._gather([first, self._restored_epoch()])
        differs = (epochs != epochs[0]).any(axis=1)
        if not differs.any():
            return
        remedy = "before this callback, and give fit() the same initial_epoch on all ranks"
        if not hasattr(self._trained, "_initial_epoch"):
            remedy = "of Keras 2 on no rank, and give fit() the same initial_epoch on all ranks"
        other = int(np.argmax(differs))
        raise ValueError(
            f"{NAME}: rank {self.ranks()[0]} {_begins(*epochs[0])}, rank {self.ranks()[other]} "
            f"{_begins(*epochs[other])}: put BackupAndRestore {remedy}"
        )

    def _warn_of_drift(self) -> None:
        """Say so where `fit` would apply gradients that nobody has reduced."""
        if not type(self.model).train_step.__module__.startswith(("keras.", "tf_keras.")):
            return
        optimizers = optimizers_of(self.model)
        plain = [self._plain_parts(optimizer) for optimizer in optimizers]
        if not all(plain):
            return
        parts = [part for whole in optimizers for part in parts_of(whole)]
        if any(isinstance(part, Distributed) for part in parts):
            warn_user(
                f"{type(plain[0][0]).__name__}, inside the optimizer of this model, is not "
                "distributed, as others are: ranks drift apart in the variables that it trains. "
                "Give each of them to hvd.DistributedOptimizer, or only the one around them"
            )
        else:
            warn_user(
                "the optimizer of this model is not distributed: each rank trains a model of its "
                "own. Compile it with optimizer=hvd.DistributedOptimizer(optimizer)"
            )

    def _plain_parts(self, optimizer: Any) -> list[Any]:
        """Return the optimizers in it that give others than local variables gradients as they are.

        One that was built knows its variables; inside of one that was built, others have none.
        """
        if isinstance(optimizer, Distributed):
            return []
        inside = inside_of(optimizer)
        if not inside:
            variables = getattr(optimizer, "_trainable_variables", None)
            is_local = variables and not without(variables, self._local_variables)
            return [] if is_local else [optimizer]
        built = getattr(optimizer, "built", False)
        used = [part for part in inside if getattr(part, "built", True) or not built]
        return [plain for part in used for plain in self._plain_parts(part)]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Make equal what has come since, if anything has on any rank."""
        if self.broadcast_done:
            return
        self.broadcast_done = True
        if len(self.ranks()) == 1:
            return
        variables = self._variables()
        counts = self._gather([len(variables), self._broadcast_count])
        before, now = counts[:, 1], counts[:, 0]
        if (now == before).all():
            return
        self._check_same(now)
        broadcast_values(variables, self.root_rank, NAME, self.process_set)

    def _check_same(self, counts: Any) -> None:
        """Raise `ValueError` if ranks have different numbers of variables."""
        other = int(np.argmax(counts != counts[0]))
        if counts[other] != counts[0]:
            first_rank, other_rank = self.ranks()[0], self.ranks()[other]
            raise ValueError(
                f"{NAME}: rank {first_rank} has {counts[0]} variables in its model and optimizer, "
                f"rank {other_rank} has {counts[other]}: build the same model with the same "
                "optimizer on all ranks"
            )

    def _variables(self) -> list[Any]:
        variables = model_variables(self.model)
        for optimizer in optimizers_of(self.model):
            variables += optimizer_variables(optimizer)
        return without(variables, self._local_variables)

    def _gather(self, numbers: list[int]) -> Any:
        """Return the numbers of all ranks, a row for each rank."""
        return hvd.allgather(np.array([numbers]), f"{NAME}.counts", self.process_set)


def _begins(first: int, restored: int) -> str:
    begin = "has no epoch left" if first == NONE else f"begins at epoch {first}"
    return begin if restored == NONE else f"{begin}, with a backup"
