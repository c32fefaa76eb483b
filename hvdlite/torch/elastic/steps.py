"""Commits without copies: weights change in `optimizer.step()` only, and each step is a commit.

A step reduces all gradients before it changes the first weight, so a failure leaves a rank before
its step or after it, and never inside. What changes outside of the step is small and copied: plain
objects, options of the optimizer, buffers of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdlite.common.base.warn import warn_user
from hvdlite.torch.adasum_optimizer import AdasumMixin
from hvdlite.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    StateHandler,
)

BY_STEP = "step"


class StepTracker:
    """Counts the steps since the last commit, and finds weights that changed in no step."""

    def __init__(self, handlers: Mapping[str, StateHandler]) -> None:
        """Follow the optimizer among the handlers' values. Raises `ValueError` unless it is one."""
        self._handlers = handlers
        self._hook: Any = None
        # How many steps were made since the last commit: 0 or 1.
        self._steps = 0
        # The versions of the parameters after the last step.
        self._versions: list[int] = []
        # Whether weights have changed that no commit and no step has known, in a failure.
        self._is_inconsistent = False
        self._follow()

    def replace(self) -> None:
        """Follow the optimizer that the state has now."""
        self._hook.remove()
        self._follow()

    def _follow(self) -> None:
        optimizers = [h for h in self._handlers.values() if isinstance(h, OptimizerStateHandler)]
        if len(optimizers) != 1:
            raise ValueError(
                f'commit="step" needs one optimizer in the state, not {len(optimizers)}: with '
                'more, a failure may come between their steps; use commit="copy"'
            )
        self._optimizer: torch.optim.Optimizer = optimizers[0].value
        if isinstance(self._optimizer, (AdasumMixin, torch.optim.LBFGS)):
            raise ValueError(
                'commit="step" needs an optimizer that changes weights when all gradients of the '
                "step are reduced; Adasum and LBFGS change them before, too: use "
                'commit="copy"'
            )
        if hasattr(self._optimizer, "consolidate"):
            raise ValueError(
                'commit="step" needs an optimizer whose state is whole on each rank, and this one '
                'has shard_state=True: use commit="copy"'
            )
        self._hook = self._optimizer.register_step_post_hook(self._on_step)
        self._set_by_step(True)
        self.accept()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters()]

    def _set_by_step(self, by_step: bool) -> None:
        stepped = {id(parameter) for parameter in self._parameters()}
        for handler in self._handlers.values():
            if isinstance(handler, (ModelStateHandler, OptimizerStateHandler)):
                handler.by_step = by_step
            if isinstance(handler, ModelStateHandler):
                handler.stepped = stepped
        self._is_active = by_step

    def _on_step(self, *arguments: Any) -> None:
        self._steps += 1
        self._versions = self._current_versions()

    def accept(self) -> None:
        """Take the current weights as those of the last step: all ranks hold them, or will."""
        self._steps = 0
        self._is_inconsistent = False
        self._versions = self._current_versions()

    def on_save(self) -> None:
        """Count a commit. Raises `ValueError` after more steps than one.

        From the first change of weights outside of a step on, commits copy them.
        """
        if not self._is_active:
            return
        steps, self._steps = self._steps, 0
        if steps > 1:
            raise ValueError(
                f'commit="step" needs a commit() after each optimizer.step(), and there were '
                f'{steps} steps since the last one: call it, or use commit="copy"'
            )
        if self._versions != self._current_versions():
            warn_user(
                "weights have changed outside of optimizer.step(), so commit() copies them from "
                'now on, as with commit="copy"'
            )
            self._set_by_step(False)

    def on_restore(self) -> None:
        """Find out whether this rank is between two commits."""
        if not self._is_active:
            return
        if self._versions != self._current_versions():
            self._is_inconsistent = True
        elif self._steps:
            warn_user(
                "a collective has failed between optimizer.step() and commit(), so a step is made "
                "again: call commit() right after each step"
            )

    def held(self, commit: int) -> int:
        """Return the number of the commit that others may receive from this rank.

        A rank that has made a step without a commit has new weights with old objects: it comes
        after all ranks that hold its last commit, and goes on by itself only if there is none.
        """
        if not self._is_active or not commit:
            return commit
        if self._is_inconsistent:
            return 0
        return commit - 1 if self._steps else commit
