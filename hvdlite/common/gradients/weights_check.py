"""The check that all ranks still have the same weights, every N steps (HVDLITE_CHECK_WEIGHTS).

An optimizer counts its steps; its framework says which tensors are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

from hvdlite.common.api.objects import GatherByRank
from hvdlite.common.gradients.reducer import Reducer
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import find, for_collective
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.tensors.comparison import Compared, compare

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
        gather = GatherByRank(f"weights.{self._label}", self._process_set)
        compare([*tensors], what, remedy, gather)
        self._equal_at = self._steps

    def step(self, tensors: Callable[[], Iterable[Compared]]) -> None:
        """Count a step, and compare where it is time to; raises as `compare`."""
        if self.is_due():
            self.compare(tensors())


def check_by_setting(label: str, process_set: ProcessSet, first: int = 1) -> WeightsCheck | None:
    """Return a check where the settings ask for one."""
    every = _steps_by_setting()
    return WeightsCheck(label, process_set, every, first) if every else None


def _steps_by_setting() -> int:
    runtime = find()
    return 0 if runtime is None else runtime.config.check_weights


# What a framework gives: counts a step, and compares variables of these names where it is time to.
# In a graph it makes operations that do so, and returns the last of them.
CompareVariables = Callable[[WeightsCheck, Sequence[str], Sequence[Any]], Any]


Use = tuple[str, ProcessSet]  # A label, and among which ranks.
# The check of each use of a variable, by its id, as long as it lives. Variables are no keys of a
# dict, and their attributes would be saved with them.
_known: dict[int, tuple[ref[Any], dict[Use, WeightsCheck]]] = {}


class VariablesCheck:
    """Compares the variables whose gradients a `Reducer` reduces, for frameworks without hooks.

    Local variables are each rank's own, and so is all state where there are some. The first check
    is that of the second step: variables may be made, and broadcast, only after the first batch.

    A tape lives for one step, and the next one over its variables goes on counting. Before the
    broadcast there may be several, so their first check is that of the first N steps, or later.
    """

    def __init__(
        self, reducer: Reducer, compare: CompareVariables, *, of_tape: bool = False
    ) -> None:
        self._reducer, self._compare, self._of_tape = reducer, compare, of_tape
        self._check: WeightsCheck | None = None
        self._began = False  # Settings are read in the first step.

    def step(self, variables: Sequence[Any], state: Callable[[], Sequence[Any]] = list) -> Any:
        """Count a step over these variables, and compare them and `state` where it is time to.

        Returns an operation that does it, in a graph; None where nothing is to be done. Raises as
        `WeightsCheck.compare`.
        """
        if not self._began and not _steps_by_setting():
            return None  # Before anything is listed: a tape is made for each step.
        reducer = self._reducer
        if not reducer.reduction.active or (self._began and self._check is None):
            return None
        pairs = zip(variables, reducer.local.pick(variables), strict=True)
        shared = [each for each, own in pairs if not own and reducer.sources.is_variable(each)]
        if not self._began:
            self._began = True
            self._check = self._check_of(shared)
        if self._check is None:
            return None
        names = reducer.sources.names_of("weights", shared)
        if not reducer.local:
            found = state()
            shared += found
            names += reducer.sources.names_of("state", found)
        return self._compare(self._check, names, shared)

    def _check_of(self, shared: Sequence[Any]) -> WeightsCheck | None:
        reducer = self._reducer
        names = reducer.sources.names_of(reducer.prefix, shared)
        label = f"{len(names)}.{names[0] if names else reducer.prefix}"
        process_set, every = reducer.reduction.process_set, _steps_by_setting()
        if not self._of_tape or not every:
            return check_by_setting(label, process_set, first=2)
        # The first multiple of N after the second step.
        check = check_by_setting(label, process_set, first=every * (2 // every + 1))
        if check is None or not shared:
            return check
        variable = reducer.sources.plain(shared[0])
        key = id(variable)
        if key not in _known:
            _known[key] = ref(variable, lambda _: _known.pop(key, None)), {}
        return _known[key][1].setdefault((label, process_set), check)
