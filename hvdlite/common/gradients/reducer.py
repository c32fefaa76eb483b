"""How one optimizer or tape treats its gradients: which are reduced, together with which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hvdlite.common.gradients.buckets import ReductionConfig, check_groups, split_evenly
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.gradients.variables import LocalSources, Sources
from hvdlite.common.segmentation.strategies import Gradient


class Reducer(ABC):
    """Gradients of this rank in, gradients of all ranks out."""

    sources: ClassVar[Sources]
    variable: ClassVar[str]  # what the framework calls a variable

    def __init__(
        self,
        prefix: str,
        reduction: ReductionConfig,
        groups: object = None,
        scale_local_gradients: bool = True,
    ) -> None:
        """`prefix` begins all names, and is the same on all ranks.

        `groups` is None, how many groups, or lists of variables whose gradients travel together.
        Raises `ValueError` for anything else.
        """
        check_groups(groups, self.sources.is_variable, self.variable)
        self.reduction = reduction
        self.segments = SegmentPlan(reduction, groups is not None)
        self.local = LocalSources(self.sources)
        self._prefix = prefix
        self._groups = groups
        self._scale_local_gradients = scale_local_gradients

    def reduce(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        names: Sequence[str] | None = None,
    ) -> list[Any]:
        """The gradients of `sources`, reduced over all ranks; None where there is none.

        Those of local sources are not reduced. They are divided by the number of ranks, as they
        would be in an average to which no other rank adds anything, unless that was not wanted.

        Every rank gives gradients of the same sources in the same order; `names` are used in
        place of those that are made from the sources. Raises as `send` does.
        """
        self.segments.settle()
        if not self.reduction.active:
            return list(gradients)
        names = names or self.sources.names_of(self._prefix, sources)
        is_local = self.local.pick(sources)
        shared = {
            name: (gradient, source)
            for name, gradient, source, local in zip(
                names, gradients, sources, is_local, strict=True
            )
            if not local
        }
        reduced = self.send(
            {name: gradient for name, (gradient, _) in shared.items()},
            {name: source for name, (_, source) in shared.items()},
            self._name_groups(shared),
        )
        return [
            reduced[name] if name in shared else self._scaled(gradient)
            for name, gradient in zip(names, gradients, strict=True)
        ]

    @abstractmethod
    def send(
        self,
        gradients: Mapping[str, Any],
        sources: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
    ) -> Mapping[str, Any]:
        """The gradients, reduced over all ranks; all are under way at the same time.

        All arguments speak of the same names. Raises the framework's errors when a reduction fails.
        """

    @abstractmethod
    def describe(self, name: str, gradient: Any, source: Any) -> Gradient | None:
        """What decides the segment of a gradient; None for one that travels in none."""

    @abstractmethod
    def divide(self, gradient: Any, divisor: int) -> Any:
        """The gradient, dense or sparse, divided by a number."""

    def _name_groups(self, shared: Mapping[str, tuple[Any, Any]]) -> list[list[str]]:
        groups = self._groups
        strategy = self.segments.strategy
        if strategy is not None:
            described = [
                self.describe(name, gradient, source) for name, (gradient, source) in shared.items()
            ]
            gradients = [each for each in described if each is not None]
            # The last layer comes first, as backward has it.
            return self.segments.cut_once(gradients[::-1] if strategy.in_ready_order else gradients)
        if isinstance(groups, int):
            return split_evenly(
                [name for name, (each, _) in shared.items() if each is not None], groups
            )
        if not isinstance(groups, list):
            return []
        name_of = {self.sources.key_of(source): name for name, (_, source) in shared.items()}
        keys = [[self.sources.key_of(each) for each in group] for group in groups]
        return [[name_of[key] for key in group if key in name_of] for group in keys]

    def _scaled(self, gradient: Any) -> Any:
        if gradient is None or not self._scale_local_gradients:
            return gradient
        return self.divide(gradient, self.reduction.process_set.size())
