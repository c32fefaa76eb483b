"""The exchange of one Keras optimizer: its gradients are accumulated, reduced, then applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar
from weakref import ref

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import ReductionConfig, Scaling
from hvdlite.common.gradients.variables import LocalSources, is_overwritten
from hvdlite.common.gradients.weights_check import VariablesCheck
from hvdlite.common.segmentation.strategies import Threshold
from hvdlite.common.tensors.compression import NoneCompressor

Then = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Settings:
    """The arguments of `DistributedOptimizer`, kept in the class, so that copies have them too."""

    backend: str  # The backend of Keras, whose tensors the gradients are.
    prefix: str  # The names of all gradients begin with it.
    reduction: ReductionConfig
    groups: object
    passes: int
    average_passes: bool
    scale_local_gradients: bool
    local_layers: Any
    shard_state: bool = False


class Exchange:
    """The way of gradients into an optimizer.

    gradients -> accumulate, if several passes make a step -> reduce over all ranks -> apply
    """

    # Methods of the optimizer besides those of its family, each called as an entry of `Kind`.
    more_entries: ClassVar[dict[str, Callable[..., Any]]] = {}
    # Whether each rank has all of the optimizer's state, as the others have it.
    state_is_common = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        tools = import_module(f"hvdlite.keras.on_{settings.backend}")
        self.untraced: Callable[[Any], Any] = tools.untraced
        self.reducer = tools.Reducer(
            settings.prefix, settings.reduction, settings.groups, settings.scale_local_gradients
        )
        largest = replace(
            settings.reduction,
            compression=NoneCompressor,
            scaling=Scaling(ReduceOp.MAX),
            segmentation=Threshold(),  # The default: no segments.
        )
        self._maximizer = tools.Reducer(settings.prefix, largest, scale_local_gradients=False)
        # The variables whose gradients stay on this rank.
        self.local: LocalSources = self.reducer.local
        self._maximizer.local = self.local
        self.accumulator: Any = None
        if settings.passes > 1:
            self.accumulator = tools.Accumulator(
                settings.passes, settings.average_passes, settings.reduction.sparse_as_dense
            )
        # The same, where its sums are among the variables of the optimizer: with JAX.
        self._sums = self.accumulator if hasattr(self.accumulator, "variables_for") else None
        if self._sums is not None:
            self._sums.state = self._state
        # Whether a step keeps nothing but what it returns.
        self.is_stateless = self.accumulator is None or self._sums is not None
        self._lasting_only = False
        if settings.local_layers is not None:
            self.local.add_layers(settings.local_layers)
        # Whether gradients count as reduced: those that are handed over within a step.
        self.is_reduced = False
        self._check = VariablesCheck(self.reducer, tools.compare_variables)
        # The optimizer that the user has called last, which may be around the others.
        self._optimizer: Callable[[], Any] = lambda: None
        # The one that the user has wrapped, which may be around the others, too.
        self._wrapped: Callable[[], Any] = lambda: None

    def wrap(self, optimizer: Any) -> None:
        """Take note of the optimizer that this is the exchange of."""
        self._wrapped = ref(optimizer)

    def called_by(self, optimizer: Any) -> None:
        """Take note that a method of this optimizer was called, by the user or by another one."""
        if not self.is_reduced:
            self._optimizer = ref(optimizer)

    def own_state(self, optimizer: Any) -> list[Any]:
        """Return the state of the optimizer that each rank has a part of, and others have not."""
        return []

    def targets(self, variables: Any) -> Any:
        """Return the variables that the optimizer steps over, where gradients of these come in."""
        return variables

    def sources(self, built: Sequence[Any]) -> list[Any]:
        """Return the variables whose gradients come in, where the optimizer was built for these."""
        return list(built)

    def passing_variables(self, optimizer: Any, built: Sequence[Any]) -> list[Any]:
        """Return what an optimizer, built for these variables, has only until a step ends."""
        if self._sums is None or self._lasting_only or not built:
            return []
        if self._wrapped() is not optimizer:
            return []
        passing: list[Any] = self._sums.variables_for(self.sources(built))
        return passing

    def forget_passes(self) -> None:
        """Begin a step anew, as all ranks of a new world do."""
        if self.accumulator is not None:
            self.accumulator.forget()

    @contextmanager
    def lasting_only(self) -> Iterator[None]:
        """Let the optimizer have only variables that last, within this context.

        What it has until a step ends is of this rank alone, and of no other optimizer.
        """
        before, self._lasting_only = self._lasting_only, True
        try:
            yield
        finally:
            self._lasting_only = before

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, reduced over all ranks.

        Variables that are overwritten with their gradients get the maximum over all ranks.
        """
        overwritten = [is_overwritten(variable) for variable in variables]
        if not any(overwritten):
            reduced: list[Any] = self.reducer.reduce(gradients, variables)
            return reduced
        results = list(gradients)
        for reducer, kind in ((self.reducer, False), (self._maximizer, True)):
            places = [place for place, value in enumerate(overwritten) if value is kind]
            some = [[values[place] for place in places] for values in (gradients, variables)]
            for place, result in zip(places, reducer.reduce(*some), strict=True):
                results[place] = result
        return results

    def through(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        then: Then,
        skip: Callable[[], Any],
    ) -> Any:
        """Return ``then(reduced gradients)``, or ``skip()`` in a pass that only accumulates.

        Within `then`, gradients count as reduced: methods of Keras that call each other reduce
        them once.
        """
        if self.is_reduced:
            return then(list(gradients))
        if self.accumulator is None:
            return self._apply(gradients, variables, then)

        def due(sums: list[Any]) -> None:
            self._apply(sums, variables, then)

        return self.accumulator.add(gradients, variables, due, lambda sums: skip())

    def _apply(self, gradients: Sequence[Any], variables: Sequence[Any], then: Then) -> Any:
        reduced = self.reduce(gradients, variables)
        with self._gradients_are_reduced():
            result = then(reduced)
        self.check_weights(variables)
        return result

    def check_weights(self, variables: Sequence[Any]) -> None:
        """Compare the weights of all ranks, and the optimizer's state, if it is time to.

        A step over these variables has ended.
        """
        self._check.step(variables, self._common_state)

    def _common_state(self) -> list[Any]:
        with self.lasting_only():
            return self._state() if self.state_is_common else []

    def _state(self) -> list[Any]:
        variables = getattr(self._optimizer(), "variables", ())
        return list(variables() if callable(variables) else variables)

    @contextmanager
    def _gradients_are_reduced(self) -> Iterator[None]:
        self.is_reduced = True
        try:
            yield
        finally:
            self.is_reduced = False

    def check(self, method: str) -> None:
        """Raise `RuntimeError` when gradients that were not reduced are about to be applied."""
        if not self.is_reduced and self.settings.reduction.active:
            raise RuntimeError(
                f"{method}() of a DistributedOptimizer would apply gradients of this rank alone, "
                "and the ranks' weights would drift apart: call apply_gradients(), or make such "
                "updates with an optimizer that is not wrapped"
            )
