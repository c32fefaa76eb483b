"""The reduction of the gradients of one optimizer or tape, for frameworks without hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from hvdlite.common.api.options import CallOptions
from hvdlite.common.gradients.background_exchange import BackgroundExchange
from hvdlite.common.gradients.buckets import (
    ReductionConfig,
    check_groups,
    single_and_grouped,
    split_evenly,
)
from hvdlite.common.gradients.compressed_bucket import FeedbackState
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.gradients.variables import LocalSources, Sources
from hvdlite.common.segmentation.strategies import Gradient
from hvdlite.common.tensors.compression import FeedbackCompressor


class Reducer(ABC):
    """A reducer turns gradients of this rank into gradients reduced over all ranks."""

    sources: ClassVar[Sources]
    variable: ClassVar[str]  # the framework's word for a variable, for error texts

    def __init__(
        self,
        prefix: str,
        reduction: ReductionConfig,
        groups: object = None,
        scale_local_gradients: bool = True,
    ) -> None:
        """Begin all names with `prefix`, which is the same on all ranks.

        `groups` is None, a number of groups, or lists of variables whose gradients are reduced
        together. Raises `ValueError` for anything else.
        """
        check_groups(groups, self.sources.is_variable, self.variable)
        self.feedback: BackgroundExchange | None = None
        if isinstance(reduction.compression, FeedbackCompressor):
            state = FeedbackState(reduction.compression, reduction.process_set)
            self.feedback = BackgroundExchange(state, reduction)
        self._source_of: dict[str, int] = {}  # By the names of residuals.
        self.reduction = reduction
        self.segments = SegmentPlan(reduction, groups is not None)
        self.local = LocalSources(self.sources)
        self.prefix, self._groups = prefix, groups
        self._scale_local_gradients = scale_local_gradients

    def compression_state(self) -> dict[str, Any]:
        """Return what compression remembers, with numpy arrays; empty where it needs nothing."""
        return {} if self.feedback is None else self.feedback.state.save()

    def load_compression_state(self, saved: Mapping[str, Any]) -> None:
        """Take what `compression_state` has returned; see `FeedbackState.load`."""
        if self.feedback is not None and saved:
            self.feedback.state.load(saved)

    def reduce(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        names: Sequence[str] | None = None,
    ) -> list[Any]:
        """Return the gradients of `sources`, reduced over all ranks; None where there is none.

        Gradients of local sources are not reduced. With `scale_local_gradients` they are divided by
        the number of ranks, as in an average to which other ranks contribute zeros.

        Every rank gives gradients of the same sources in the same order; `names` replace those that
        are made from the sources. Raises as `send` does.
        """
        self.segments.settle()
        if not self.reduction.active:
            return list(gradients)
        names = names or self.sources.names_of(self.prefix, sources)
        self._forget_residuals_of_others(names, sources)
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

    def _forget_residuals_of_others(self, names: Sequence[str], sources: Sequence[Any]) -> None:
        """Let no gradient get what another one of its name has left: calls may be of some sources.

        All ranks call it alike, so they forget alike.
        """
        if self.feedback is None:
            return
        for name, source in zip(names, sources, strict=True):
            key = self.sources.key_of(source)
            if self._source_of.setdefault(name, key) != key:
                self._source_of[name] = key
                self.feedback.state.forget(name)

    @abstractmethod
    def send(
        self,
        gradients: Mapping[str, Any],
        sources: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
    ) -> Mapping[str, Any]:
        """Return the gradients, reduced over all ranks; all are in flight at the same time.

        The keys of the mappings are the names that `groups` contain. Raises the framework's errors
        when a reduction fails.
        """

    def planned(
        self,
        names: Iterable[str],
        groups: Sequence[Sequence[str]],
        batches: Callable[[list[str]], list[list[str]]],
    ) -> list[tuple[Sequence[str], Callable[[Sequence[str]], CallOptions]]]:
        """Return the gradients that are handed over together, each time with their options.

        These are made of the names under which they are sent. `batches` divides those that are
        reduced on their own.
        """
        segments = self.segments
        if self.feedback is not None:  # The same on all ranks: groups, and each other one alone.
            _, buckets = single_and_grouped(list(names), groups, segmented=True)
            return [(bucket, segments.options) for bucket in buckets]
        single, buckets = single_and_grouped(
            list(names), groups, segmented=segments.strategy is not None
        )
        return [
            *((batch, lambda keys: segments.options(keys[:1])) for batch in batches(single)),
            *((bucket, segments.options) for bucket in buckets),
        ]

    @abstractmethod
    def describe(self, name: str, gradient: Any, source: Any) -> Gradient | None:
        """Return what decides the segment of a gradient; None for one that belongs to none."""

    def divide_by_size(self, gradient: Any) -> Any:
        """Return the gradient, dense or sparse, divided by the number of ranks."""
        return gradient / self.reduction.process_set.size()

    def _name_groups(self, shared: Mapping[str, tuple[Any, Any]]) -> list[list[str]]:
        groups = self._groups
        strategy = self.segments.strategy
        if strategy is not None:
            descriptions = [
                self.describe(name, gradient, source) for name, (gradient, source) in shared.items()
            ]
            gradients = [description for description in descriptions if description is not None]
            # Backward computes the gradients of the last layer first.
            return self.segments.cut_once(gradients[::-1] if strategy.in_ready_order else gradients)
        if isinstance(groups, int):
            return split_evenly(
                [name for name, (gradient, _) in shared.items() if gradient is not None], groups
            )
        if not isinstance(groups, list):
            return []
        name_of = {self.sources.key_of(source): name for name, (_, source) in shared.items()}
        keys = [[self.sources.key_of(source) for source in group] for group in groups]
        return [[name_of[key] for key in group if key in name_of] for group in keys]

    def _scaled(self, gradient: Any) -> Any:
        if gradient is None or not self._scale_local_gradients:
            return gradient
        return self.divide_by_size(gradient)
