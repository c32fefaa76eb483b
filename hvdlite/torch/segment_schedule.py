"""Where the gradients of one optimizer are cut, from one step to the next.

first step -> note, agree    nothing is known: gradients become ready in the reverse order
           -> adapt          segments follow the order in which they became ready
every step -> adapt          `auto` tries and chooses; parameters may come and go

While a rank has joined, nothing is learned: it would not hear of it. When all ranks are back a new
era begins, in which they make the same calls again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.gradients.auto_segments import AutoSegments, no_rank_has_joined
from hvdlite.common.gradients.buckets import ReductionConfig, Schedule
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.runtime.state import for_collective
from hvdlite.common.segmentation.strategies import Auto, Gradient, Strategy
from hvdlite.torch.dtypes import DTYPE_NAMES
from hvdlite.torch.flat_gradients import FlatGradients
from hvdlite.torch.functions import broadcast_object
from hvdlite.torch.sparsity import Layouts

ParamGroups = list[dict[str, Any]]
MOST_LEARNED = 20  # times; a loop that freezes and thaws parameters all the time has other worries


class Cuts:
    """Tells a schedule in which segments gradients travel."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        schedule: Schedule[str],
        layouts: Layouts,
        reduction: ReductionConfig,
        segments: SegmentPlan,
    ) -> None:
        """`names` and `schedule` grow when parameters are added."""
        self._names = names
        self.parameter_of = {name: parameter for parameter, name in names.items()}
        self._schedule = schedule
        self._layouts = layouts
        self._reduction = reduction
        self._segments = segments
        self._label = next(iter(names.values()), "")  # the same on all ranks
        self._era: object = None
        self._runtime: Callable[[], object] = lambda: None  # that of the era
        self._learned: set[str] = set()  # gradients whose segments follow the order of readiness
        self._times_learned = 0
        self._ready: dict[str, None] = {}  # that order, as far as it is known
        self.auto: AutoSegments | None = None
        # Where gradients live in segments, as soon as these are settled: by the first name of each.
        self.flat: dict[str, FlatGradients] | None = None

    def note(self, name: str) -> None:
        """This gradient is ready; there is a strategy."""
        self._begin()
        if not self._learned:
            self._ready.pop(name, None)  # of several passes the last one counts
            self._ready[name] = None
        elif self.auto is not None:
            self.auto.note(name)

    def agree(self, gradients: Mapping[str, torch.Tensor | None]) -> list[str]:
        """Backward has ended. The names of gradients that some rank has; the same on all ranks."""
        self._begin()
        if self.auto is not None:
            self.auto.note_missing()
        return self._layouts.agree(gradients)

    def _begin(self) -> None:
        """Before anything is sent in a new era: all ranks begin with the same."""
        runtime = for_collective()
        era = runtime.era(self._reduction.process_set)
        if era is self._era:
            return
        if runtime is not self._runtime():
            self._runtime = weakref.ref(runtime)
            self._times_learned = 0
            self._forget()
        self._layouts.ask_again()
        strategy = self._segments.strategy
        if strategy is not None and not self._learned:
            self._plan(strategy)
        if self.auto is not None:
            self.auto.restart_count()
        self._era = era

    def _forget(self) -> None:
        """Learn the order of readiness in the next step."""
        self._learned, self._ready, self.auto, self.flat = set(), {}, None, None

    def _plan(self, strategy: Strategy) -> None:
        """Before anything is known: gradients become ready in the reverse order of parameters."""
        trained = [name for each, name in self._names.items() if each.requires_grad]
        order = trained[::-1] if strategy.in_ready_order else trained
        self._schedule.rearrange(self._segments.cut(self._describe(order)))

    def adapt(self, known: Sequence[str], param_groups: ParamGroups) -> None:
        """All gradients of a step, which are `known`, have been reduced."""
        strategy = self._segments.strategy
        if strategy is None:
            return
        dense = [
            name
            for name in known
            if self._reduction.sparse_as_dense or self._layouts.is_dense(name)
        ]
        if not self._learned:
            self._learn(strategy, dense, param_groups)
        elif self._learned != {*dense} and self._times_learned < MOST_LEARNED:
            if self._all_here():
                self._forget()
        elif self.auto is not None:
            ends = self.auto.step()
            if ends is not None:
                segments = self._segments.cut_again(self.auto.gradients, ends)
                self._arrange(segments, param_groups, self.auto.frozen)

    def _learn(self, strategy: Strategy, dense: Sequence[str], param_groups: ParamGroups) -> None:
        """Cut the dense gradients in the order of the first rank."""
        if not dense or not self._all_here():
            return
        process_set = self._reduction.process_set
        wanted = {*dense}
        if strategy.in_ready_order:
            root = min(process_set.ranks or [0])
            name = f"segmentation.{self._label}"
            order = broadcast_object(list(self._ready), root, name, process_set)
            every = dict.fromkeys([*order, *dense[::-1]])
            dense = [name for name in every if name in wanted]
        gradients = self._describe(dense)
        tunes = isinstance(strategy, Auto)
        self._arrange(self._segments.cut_again(gradients), param_groups, settled=not tunes)
        self._learned = wanted
        self._times_learned += 1
        if isinstance(strategy, Auto):
            self.auto = AutoSegments(gradients, self._label, process_set, strategy.file)

    def _all_here(self) -> bool:
        return no_rank_has_joined(self._label, self._reduction.process_set)

    def live_alone(self, param_groups: ParamGroups) -> None:
        """Let gradients that do not travel live in segments, for the optimizer's step."""
        dense = {name for name, parameter in self.parameter_of.items() if _is_dense(parameter)}
        if not dense <= self._learned and self._times_learned < MOST_LEARNED:
            wanted = dense | self._learned
            order = [name for name in self.parameter_of if name in wanted]
            segments = self._segments.cut_again(self._describe(order[::-1]))
            self._arrange(segments, param_groups, settled=True)
            self._learned = wanted
            self._times_learned += 1
        for flat in (self.flat or {}).values():
            for parameter in filter(_is_dense, flat.parameters):
                flat.take(parameter)

    def _arrange(
        self, segments: Sequence[Sequence[str]], param_groups: ParamGroups, settled: bool
    ) -> None:
        """From the next step on gradients travel in these segments."""
        self._schedule.rearrange(segments)
        self.flat = {} if settled else None
        if self.flat is not None and self._segments.as_views:
            # Neighbours of one group can be stepped together.
            group_of = {p: n for n, each in enumerate(param_groups) for p in each["params"]}
            for names in segments:
                parameters = [self.parameter_of[name] for name in names]
                parameters.sort(key=group_of.__getitem__)
                self.flat[names[0]] = FlatGradients(parameters, self._names)

    def _describe(self, names: Sequence[str]) -> list[Gradient]:
        described = []
        for name in names:
            parameter = self.parameter_of[name]
            size_bytes = parameter.numel() * parameter.element_size()
            kind = DTYPE_NAMES[parameter.dtype]
            if parameter.device.type != "cpu":  # one segment has one dtype, on one device
                kind = f"{kind} on {parameter.device}"
            described.append(Gradient(name, size_bytes, kind))
        return described


def _is_dense(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and not parameter.grad.is_sparse
