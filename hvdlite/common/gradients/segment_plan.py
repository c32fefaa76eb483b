"""The segments in which the gradients of one optimizer travel, in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hvdlite.common.api.options import Options
from hvdlite.common.base.warn import warn_user
from hvdlite.common.gradients.buckets import Terms
from hvdlite.common.gradients.user_calls import chosen
from hvdlite.common.plain.messages import WHOLE_GROUP
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

VIEWED = Threshold(25 * MIB)  # of gradients that live in segments; PyTorch's buckets are so large


class Segments:
    """Finds out, when gradients travel for the first time, how they are cut."""

    def __init__(self, terms: Terms, grouped: bool, as_views: bool = False) -> None:
        """`grouped`: the user has named groups, which travel as they are.

        `as_views`: gradients are views of their segment, which has to be planned for that; the
        caller has seen that this can be.
        """
        if grouped and terms.segmentation is not None:
            raise ValueError(f"groups and segmentation {terms.segmentation.text}: give one of them")
        self._terms = terms
        self.as_views = as_views
        self._grouped = grouped
        self._known = False
        self._strategy: Strategy | None = None
        self._views = " as views" if as_views else ""
        self._fixed: dict[tuple[Gradient, ...], list[int]] = {}  # ends, by `cut_once`
        self._ends = ""  # that a file has given: ranks may have different files

    @property
    def strategy(self) -> Strategy | None:
        """None: what is ready travels. Raises `ValueError` before `init`."""
        if not self._known:
            self.settle()
        return self._strategy

    def settle(self) -> None:
        """Gradients travel, or would if there were other ranks: nothing else can be chosen now."""
        if not self._known:
            process_set = self._terms.process_set
            registered = process_set.process_set_id is not None  # others have nothing chosen
            by_set = chosen(process_set) if registered else Threshold()  # asked in any case
            found = self._terms.segmentation or by_set
            if self.as_views and found == Threshold():
                found = VIEWED
            if found != Threshold():
                against = self._reason_against_segments()
                self._strategy = None if against else found
                if against:
                    warn_user(f"segmentation {found.text} has no effect: {against}")
            self._known = True

    def _reason_against_segments(self) -> str:
        if self._grouped:
            return "groups are given"
        if not self._terms.fusable:
            op = self._terms.scaling.op.name.capitalize()
            return f"only Average and Sum travel in segments, not {op}"
        return ""

    def cut(self, gradients: Sequence[Gradient]) -> list[list[str]]:
        """The names of the gradients of each segment.

        Raises `ValueError` where the strategy cannot be followed with these gradients.
        """
        strategy = self.strategy
        assert strategy is not None  # the caller has looked
        if isinstance(strategy, Index) and not strategy.strict:
            _warn_of_what_is_ignored(strategy, len(gradients))
        return _names(strategy, gradients)

    def cut_once(self, gradients: Sequence[Gradient]) -> list[list[str]]:
        """As `cut`, where nothing can be learned: `auto` only knows what its file says."""
        strategy = self.strategy
        if not isinstance(strategy, Auto):
            return self.cut(gradients)
        key = tuple(gradients)
        if key not in self._fixed:  # a tape that executes eagerly asks in each step
            self._fixed[key] = self._ends_of(strategy, gradients)
        ends = self._fixed[key]
        self._ends = f" (ends {','.join(map(str, ends))})"
        return self.cut_again(gradients, ends)

    def _ends_of(self, strategy: Auto, gradients: Sequence[Gradient]) -> list[int]:
        ends = load(strategy.file, gradients) if strategy.file else None
        if ends is None:
            ends = strategy.ends(gradients)
            warn_user(
                "segmentation auto learns from the hooks of PyTorch: here gradients are cut as "
                f"{Size().text} says. Give another segmentation, or auto:FILE with what was learned"
            )
        return ends

    def cut_again(
        self, gradients: Sequence[Gradient], ends: Sequence[int] | None = None
    ) -> list[list[str]]:
        """As `cut`, when more is known: sparse and unused gradients may be missing among them.

        With `ends`, segments end at these numbers.
        """
        strategy = self.strategy if ends is None else Index(tuple(ends))
        assert strategy is not None  # the caller has looked
        if isinstance(strategy, (Index, Size)):
            strategy = replace(strategy, strict=False)
        return _names(strategy, gradients)

    def options(self, names: Sequence[str]) -> Options:
        """What the reduction of gradients with these names says, which are to travel together."""
        options = self._terms.options
        if self.strategy is None:
            return options._replace(grouped=len(names) > 1)
        return options._replace(
            grouped=True,
            names=tuple(names),
            settings=f"segmentation={self.strategy.text}{self._ends}{self._views}",
            fusion_bytes=WHOLE_GROUP,
        )


def _names(strategy: Strategy, gradients: Sequence[Gradient]) -> list[list[str]]:
    return _names_of(strategy, tuple(gradients))


@lru_cache(maxsize=64)  # a tape that executes eagerly asks in each step
def _names_of(strategy: Any, gradients: tuple[Gradient, ...]) -> list[list[str]]:
    return [[each.name for each in segment] for segment in segments_of(strategy, gradients)]


def _warn_of_what_is_ignored(strategy: Index, gradients: int) -> None:
    ignored = [str(last) for last in strategy.last if last >= gradients]
    if ignored:
        warn_user(
            f"{strategy.text}: {', '.join(ignored)} lies past the last of {gradients} gradients "
            "and is ignored"
        )
