"""The check that all ranks still have the same weights, every N steps (HVDLITE_CHECK_WEIGHTS).

An optimizer counts its steps; its framework says which tensors are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdlite.common.api.objects import gather_by_rank
from hvdlite.common.plain.comparison import Compared, compare
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import find, for_collective
from hvdlite.common.runtime.process_sets import ProcessSet

_FROM_THE_BEGINNING = (
    "Call broadcast_parameters and broadcast_optimizer_state before the first step (in Keras use "
    "BroadcastGlobalVariablesCallback), or make and load weights alike on all ranks, with one seed"
)
_SINCE_THEN = (
    "Look for code that only some ranks run (if hvd.rank() == 0), for gradients that are changed "
    "after they were reduced, for learning rates or data types that differ, and for processors or "
    "releases that round otherwise"
)


class WeightsCheck:
    """Compares the weights of one optimizer after its first step, and then every N steps.

    Steps are counted from the beginning of an era, see [Note: eras and join] in runtime.py: ranks
    whose steps were uneven count alike after a join, and so do the ranks of a new world.
    """

    def __init__(self, label: str, process_set: ProcessSet, every: int, first: int = 1) -> None:
        """Check ranks of the set; they give the same `label`, which no other check has.

        The first check is that of the step `first`.
        """
        self._label, self._process_set = label, process_set
        self._every, self._first = every, first
        self._era: object = None
        self._steps = self._equal_at = 0

    def is_due(self) -> bool:
        """Count a step, and return whether `compare` follows it."""
        era = for_collective().era(self._process_set)
        if era is not self._era:
            self._era, self._steps, self._equal_at = era, 0, 0
        self._steps += 1
        return self._steps == self._first or (
            self._steps > self._first and self._steps % self._every == 0
        )

    def compare(self, tensors: Iterable[Compared]) -> None:
        """Raise `RuntimeError` on all ranks where two have a tensor otherwise."""
        of_world = " of this world" if worlds.elastic() else ""
        what = f"weights have diverged at step {self._steps}{of_world}"
        remedy = _FROM_THE_BEGINNING
        if self._equal_at:
            remedy = f"They were equal after step {self._equal_at}. {_SINCE_THEN}"
        gather = gather_by_rank(f"weights.{self._label}", self._process_set)
        compare([*tensors], what, remedy, gather)
        self._equal_at = self._steps

    def step(self, tensors: Callable[[], Iterable[Compared]]) -> None:
        """Count a step, and compare where it is time to; raises as `compare`."""
        if self.is_due():
            self.compare(tensors())


def check_by_setting(label: str, process_set: ProcessSet, first: int = 1) -> WeightsCheck | None:
    """Return a check where the settings ask for one."""
    runtime = find()
    every = 0 if runtime is None else runtime.config.check_weights
    return WeightsCheck(label, process_set, every, first) if every else None
