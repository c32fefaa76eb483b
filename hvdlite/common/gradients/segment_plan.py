"""The segment plan: which gradients of one optimizer are reduced together, in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.warn import warn_user
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.requests.messages import WHOLE_GROUP
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.segmentation.parsing import (
    UserChoice,
    by_index,
    by_size,
    read_comm_fusion,
    read_strategy,
)
from hvdlite.common.segmentation.saved_results import load
from hvdlite.common.segmentation.strategies import (
    MIB,
    Auto,
    Gradient,
    Index,
    Size,
    Strategy,
    Threshold,
    segments_of,
)
from hvdlite.common.tensors.compression import FeedbackCompressor

# The public functions that choose how gradients of a process set are split into segments.


def set_split_strategy_by_size(
    percentages: Sequence[float], process_set: ProcessSet = global_process_set
) -> None:
    """Reduce gradients in segments of these percentages of their bytes, in the order of readiness.

    `percentages` are 1 to 8 numbers from 0 on with the sum 100: with ``[80, 20]``, the first four
    fifths that backward computes are one segment, and the rest is another. Call it on all ranks
    alike, after `init` and before the first gradient of the set is reduced. A second call replaces
    the first, and sizes win over indices, both with a warning. Raises `ValueError` for anything
    else.
    """
    _set_split(by_size(percentages), process_set)


def set_split_strategy_by_idx(
    indices: Sequence[int], process_set: ProcessSet = global_process_set
) -> None:
    """Reduce gradients in segments that end with the gradients of these indices, from 0 on.

    `indices` are 1 to 8 ascending numbers in the order of readiness, of which the last one belongs
    to the last gradient: ``[20, 100, 159]`` for 160 gradients. For everything else see
    `set_split_strategy_by_size`.
    """
    _set_split(by_index(indices), process_set)


def set_comm_fusion(
    config: dict[str, dict[str, Any]], process_set: ProcessSet = global_process_set
) -> None:
    """Fuse collectives as MindSpore's ``comm_fusion`` does.

    ``{"allreduce": {"mode": "size", "config": 32}}``: a segment of gradients has at most 32 MiB.
    The collectives are allreduce, allgather and reducescatter; the modes "auto" (64 MiB, config
    None), "size" (MiB, a whole number) and, for allreduce, "index" (a list of last indices; those
    past the last gradient are ignored with a warning, and the rest is one more segment).

    Call it on all ranks alike. Raises `TypeError`, `KeyError` or `ValueError` for a wrong `config`.
    """
    strategies = read_comm_fusion(config)
    runtime = current()
    gradients = [strategies.pop(name) for name in [*strategies] if SPECS[name].carries_gradients]
    _choice(runtime, process_set).set_fusion(next(iter(gradients), None), strategies)
    runtime.forget_calls()  # Prepared requests may contain other limits.


def _set_split(strategy: Size | Index, process_set: ProcessSet) -> None:
    warning = _choice(current(), process_set).set_split(strategy)
    if warning:
        warn_user(warning)


def _choice(runtime: Runtime, process_set: ProcessSet) -> UserChoice:
    process_set_id = process_set.process_set_id
    if process_set_id is None:
        raise ValueError(f"{process_set} is not registered: add it first")
    return runtime.choices.setdefault(process_set_id, UserChoice())


def chosen(process_set: ProcessSet) -> Strategy:
    """Return the strategy for gradients of `process_set`, by calls or by settings, and fix it.

    Raises `ValueError` before `init`.
    """
    runtime = current()
    by_calls = _choice(runtime, process_set).strategy()
    return by_calls or read_strategy(runtime.config.segmentation)


# The default for gradients that are views of their segment: the size of PyTorch's buckets.
VIEWED = Threshold(25 * MIB)
# The default for compressors with error feedback: ranks must exchange the same gradients together.
# Smaller ones begin earlier in backward, and each costs two collectives of little data.
COMPRESSED = Threshold(8 * MIB)


class SegmentPlan:
    """The split of one optimizer's gradients, settled when they are first reduced."""

    def __init__(self, reduction: ReductionConfig, grouped: bool, as_views: bool = False) -> None:
        """Plan for gradients that are reduced as `reduction` says.

        With `grouped` the user has named groups, which are reduced as they are. With `as_views`
        gradients are views of their segment, so segments must be planned; the caller has checked
        that views are possible. Raises `ValueError` for groups beside a segmentation.
        """
        if grouped and reduction.segmentation is not None:
            raise ValueError(
                f"groups and segmentation {reduction.segmentation.spec}: give one of them"
            )
        self._reduction, self.as_views, self._grouped = reduction, as_views, grouped
        # Set by `settle`; the strategy below is final from then on.
        self._settled = False
        self._strategy: Strategy | None = None
        self._views = " as views" if as_views else ""
        self._fixed: dict[tuple[Gradient, ...], list[int]] = {}  # last indices by `cut_once`
        # Set by `cut_once` for the negotiation: ranks whose files differ get a mismatch error.
        self._last_indices_label = ""

    @property
    def strategy(self) -> Strategy | None:
        """The strategy; None: each gradient is sent when ready. `ValueError` before `init`."""
        if not self._settled:
            self.settle()
        return self._strategy

    def settle(self) -> None:
        """Make the user's choice final, since gradients are about to be reduced."""
        if self._settled:
            return
        process_set = self._reduction.process_set
        registered = process_set.process_set_id is not None  # others have no choice by calls
        # This is asked in any case, because the question makes the choice final.
        by_calls = chosen(process_set) if registered else Threshold()
        strategy = self._reduction.segmentation or by_calls
        compresses = isinstance(self._reduction.compression, FeedbackCompressor)
        if self.as_views and strategy == Threshold():
            strategy = VIEWED
        elif strategy == Threshold() and compresses and not self._grouped:
            strategy = COMPRESSED
        if strategy != Threshold():
            objection = ""
            if self._grouped:
                objection = "groups are given"
            elif not self._reduction.fusable:
                op = self._reduction.scaling.op.name.capitalize()
                objection = f"only Average and Sum can be reduced in segments, not {op}"
            self._strategy = None if objection else strategy
            if objection:
                warn_user(f"segmentation {strategy.spec} has no effect: {objection}")
        self._settled = True

    def cut(self, gradients: Sequence[Gradient]) -> list[list[str]]:
        """Return the names of the gradients of each segment.

        Raises `ValueError` where the strategy does not fit these gradients.
        """
        strategy = self.strategy
        assert strategy is not None  # callers check `strategy` first
        if isinstance(strategy, Index) and not strategy.strict:
            ignored = [str(index) for index in strategy.indices if index >= len(gradients)]
            if ignored:
                warn_user(
                    f"{strategy.spec}: {', '.join(ignored)} lies past the last of "
                    f"{len(gradients)} gradients and is ignored"
                )
        return _names(strategy, tuple(gradients))

    def cut_once(self, gradients: Sequence[Gradient]) -> list[list[str]]:
        """Cut as `cut` does where nothing is measured: `auto` follows its file, or the default."""
        strategy = self.strategy
        if not isinstance(strategy, Auto):
            return self.cut(gradients)
        key = tuple(gradients)
        if key not in self._fixed:  # an eager tape asks in each step
            saved = load(strategy.file, gradients) if strategy.file else None
            if saved is None:
                saved = strategy.last_indices(gradients)
                warn_user(
                    "segmentation auto learns from the hooks of PyTorch: here gradients are cut as "
                    f"{Size().spec} says. Give another segmentation, or auto:FILE with what was "
                    "learned"
                )
            self._fixed[key] = saved
        last_indices = self._fixed[key]
        self._last_indices_label = f" (ends {','.join(map(str, last_indices))})"
        return self.cut_again(gradients, last_indices)

    def cut_again(
        self, gradients: Sequence[Gradient], last_indices: Sequence[int] | None = None
    ) -> list[list[str]]:
        """Cut as `cut` does after the first step, when sparse and unused gradients are left out.

        With `last_indices`, segments end there. Fewer gradients than the strategy names are no
        error here.
        """
        strategy = self.strategy if last_indices is None else Index(tuple(last_indices))
        assert strategy is not None  # callers check `strategy` first
        if isinstance(strategy, (Index, Size)):
            strategy = replace(strategy, strict=False)
        return _names(strategy, tuple(gradients))

    def options(self, names: Sequence[str]) -> CallOptions:
        """Return the options of the reduction of these gradients, which form one segment."""
        options = self._reduction.options
        if self.strategy is None:
            grouped = len(names) > 1
            return options if options.grouped == grouped else options._replace(grouped=grouped)
        return options._replace(
            grouped=True,
            names=tuple(names),
            settings=f"segmentation={self.strategy.spec}{self._last_indices_label}{self._views}",
            fusion_bytes=WHOLE_GROUP,
        )


@lru_cache(maxsize=64)  # an eager tape asks in each step
def _names(strategy: Any, gradients: tuple[Gradient, ...]) -> list[list[str]]:
    return [[gradient.name for gradient in segment] for segment in segments_of(strategy, gradients)]
