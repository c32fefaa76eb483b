"""The segments of one optimizer's gradients, from one step to the next.

first step -> note, agree    Nothing is known: gradients are expected in the reverse order of their
                             parameters.
           -> adapt          Segments follow the order in which the gradients became ready.
every step -> adapt          `auto` measures and chooses; gradients may come and go.

While a rank has joined, segments stay as they are, since that rank would not learn of a change.
When all ranks are back a new era begins, in which they make the same calls again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.gradients.auto_segments import AutoSegments, no_rank_has_joined
from hvdlite.common.gradients.buckets import BucketSchedule, ReductionConfig
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.segmentation.strategies import Auto, Gradient, Strategy
from hvdlite.torch.dtypes import DTYPE_NAMES
from hvdlite.torch.functions import broadcast_object
from hvdlite.torch.optimizer.flat_gradients import FlatGradients
from hvdlite.torch.optimizer.sparsity import Layouts

ParamGroups = list[dict[str, Any]]
# Segments are made anew for another set of gradients at most so often. A loop that freezes and
# thaws parameters all the time would otherwise wait for a broadcast in many of its steps.
MOST_ARRANGEMENTS = 20


class SegmentSchedule:
    """Arranges the buckets of a `BucketSchedule` as segments; idle where there is no strategy."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        schedule: BucketSchedule[str],
        layouts: Layouts,
        reduction: ReductionConfig,
        segments: SegmentPlan,
    ) -> None:
        """Keep `names` and `schedule`, which grow when parameters are added to the optimizer."""
        self._names = names
        self.parameter_of = {name: parameter for parameter, name in names.items()}
        self._schedule, self._layouts, self._reduction = schedule, layouts, reduction
        self._segments = segments
        self._label = next(iter(names.values()), "")  # This is the same on all ranks.
        self._era: object = None
        self._runtime: Callable[[], object] = lambda: None  # a weak reference to that of the era
        # The gradients for which the segments were arranged; empty until that has happened.
        self._arranged: set[str] = set()
        self._arrangements = 0
        # The order of readiness, recorded until segments have been arranged by it.
        self._ready: dict[str, None] = {}
        # Set with the strategy `auto`, when segments have been arranged for the first time.
        self.auto: AutoSegments | None = None
        # By the first name of each segment: the buffer in which its gradients live. Set when the
        # segments are final; empty where gradients are not views.
        self.flat: dict[str, FlatGradients] | None = None

    def note(self, name: str) -> None:
        """Record that this gradient is ready. Callers check that there is a strategy."""
        self._begin_era()
        if not self._arranged:
            self._ready.pop(name, None)  # Of several backward passes the last one counts.
            self._ready[name] = None
        elif self.auto is not None:
            self.auto.note(name)

    def agree(self, gradients: Mapping[str, torch.Tensor | None]) -> list[str]:
        """Return the names of gradients that some rank has, the same on all ranks.

        Backward has ended on this rank; blocks while some are unknown, see `Layouts.agree`.
        """
        self._begin_era()
        if self.auto is not None:
            self.auto.note_missing()
        return self._layouts.agree(gradients)

    def _begin_era(self) -> None:
        """Start as all other ranks do, if an era has begun since the last call."""
        runtime = for_collective()
        era = runtime.era(self._reduction.process_set)
        if era is self._era:
            return
        if runtime is not self._runtime():
            self._runtime = weakref.ref(runtime)
            self._arrangements = 0
            self._forget()
        self._layouts.ask_again()
        strategy = self._segments.strategy
        if strategy is not None and not self._arranged:
            # Gradients are assumed to become ready in the reverse order of their parameters.
            trained = [name for parameter, name in self._names.items() if parameter.requires_grad]
            order = trained[::-1] if strategy.in_ready_order else trained
            self._schedule.rearrange(self._segments.cut(self._describe(order)))
        if self.auto is not None:
            self.auto.restart_count()
        self._era = era

    def _forget(self) -> None:
        """Record the order of readiness again in the next step."""
        self._arranged, self._ready, self.auto, self.flat = set(), {}, None, None

    def adapt(self, names: Sequence[str], param_groups: ParamGroups) -> None:
        """Arrange the segments of the next step; the gradients `names` have just been reduced."""
        strategy = self._segments.strategy
        if strategy is None:
            return
        dense = [
            name
            for name in names
            if self._reduction.sparse_as_dense or self._layouts.is_dense(name)
        ]
        if not self._arranged:
            self._arrange_by_readiness(strategy, dense, param_groups)
        elif self._arranged != {*dense} and self._arrangements < MOST_ARRANGEMENTS:
            if self._no_rank_has_joined():
                self._forget()
        elif self.auto is not None:
            last_indices = self.auto.step()
            if last_indices is not None:
                segments = self._segments.cut_again(self.auto.gradients, last_indices)
                self._arrange(segments, param_groups, self.auto.frozen)

    def _arrange_by_readiness(
        self, strategy: Strategy, dense: Sequence[str], param_groups: ParamGroups
    ) -> None:
        """Cut the dense gradients in the order in which the first rank had them."""
        if not dense or not self._no_rank_has_joined():
            return
        process_set = self._reduction.process_set
        dense_names = {*dense}
        if strategy.in_ready_order:
            root = min(process_set.ranks or [0])
            name = f"segmentation.{self._label}"
            order = broadcast_object(list(self._ready), root, name, process_set)
            # The first rank has not recorded gradients that only others have: these come last.
            candidates = dict.fromkeys([*order, *dense[::-1]])
            dense = [name for name in candidates if name in dense_names]
        gradients = self._describe(dense)
        tunes = isinstance(strategy, Auto)
        self._arrange(self._segments.cut_again(gradients), param_groups, final=not tunes)
        self._arranged = dense_names
        self._arrangements += 1
        if isinstance(strategy, Auto):
            self.auto = AutoSegments(gradients, self._label, process_set, strategy.file)

    def _no_rank_has_joined(self) -> bool:
        return no_rank_has_joined(self._label, self._reduction.process_set)

    def adopt_local_gradients(self, param_groups: ParamGroups) -> None:
        """Move gradients that are not reduced into segments, for the optimizer's fused step."""
        dense = {name for name, parameter in self.parameter_of.items() if _has_dense(parameter)}
        if not dense <= self._arranged and self._arrangements < MOST_ARRANGEMENTS:
            names = dense | self._arranged
            order = [name for name in self.parameter_of if name in names]
            segments = self._segments.cut_again(self._describe(order[::-1]))
            self._arrange(segments, param_groups, final=True)
            self._arranged = names
            self._arrangements += 1
        for flat in (self.flat or {}).values():
            for parameter in filter(_has_dense, flat.parameters):
                flat.adopt(parameter)

    def _arrange(
        self, segments: Sequence[Sequence[str]], param_groups: ParamGroups, final: bool
    ) -> None:
        """Reduce gradients in these segments from the next step on."""
        self._schedule.rearrange(segments)
        self.flat = {} if final else None
        if self.flat is not None and self._segments.as_views:
            # The fused step handles neighbours of one group of the optimizer together.
            group_of = {
                parameter: number
                for number, group in enumerate(param_groups)
                for parameter in group["params"]
            }
            for names in segments:
                parameters = [self.parameter_of[name] for name in names]
                parameters.sort(key=lambda parameter: group_of.get(parameter, -1))  # or it has left
                self.flat[names[0]] = FlatGradients(parameters, self._names)

    def _describe(self, names: Sequence[str]) -> list[Gradient]:
        described = []
        for name in names:
            parameter = self.parameter_of[name]
            size_bytes = parameter.numel() * parameter.element_size()
            kind = DTYPE_NAMES[parameter.dtype]
            if parameter.device.type != "cpu":  # A segment has one dtype, and is on one device.
                kind = f"{kind} on {parameter.device}"
            described.append(Gradient(name, size_bytes, kind))
        return described


def _has_dense(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and not parameter.grad.is_sparse
