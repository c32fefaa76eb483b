"""Advice on the split of gradients, from an iteration trace, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdlite.common.segmentation.rules import (
    TimedReduction,
    byte_shares,
    idle_seconds,
    proposed_changes,
)

# The share of the iteration below which communication after backward is not worth a change.
NEGLIGIBLE_TAIL = 0.03
# The share of backward in forward and backward, assumed where the end of forward was not seen.
BACKWARD_SHARE = 2 / 3


class Advice(NamedTuple):
    """The advice; without `percentages` no other split will help."""

    rule: int  # 1, 2 or 3; 0: none applies
    why: str
    percentages: tuple[float, ...] = ()  # of the bytes, segment by segment

    @property
    def segmentation(self) -> str:
        """The value of ``--segmentation``; empty where nothing is proposed."""
        values = ",".join(f"{share:g}" for share in self.percentages)
        return f"size:{values}" if values else ""


def advise(
    fp_end: float | None,
    bp_end: float | None,
    iteration_end: float,
    reductions: Sequence[TimedReduction],
) -> Advice:
    """Return the advice that would shorten the tail most.

    All times are seconds after the beginning of forward; None where they were not seen.
    `reductions` are those of one iteration in their order.
    """
    if not reductions:
        return Advice(0, "No gradients were reduced: there is nothing to cut.")
    if bp_end is None:
        return Advice(0, "The end of backward was not seen: tell it with backward_done().")
    last_end = reductions[-1].end
    if last_end - bp_end <= NEGLIGIBLE_TAIL * iteration_end:
        return Advice(
            0,
            f"Communication ends {_ms(max(last_end - bp_end, 0))} after backward, which is "
            f"{max(last_end - bp_end, 0) / iteration_end:.0%} of the iteration: there is nothing "
            "to gain by another cut.",
        )
    if fp_end is None:
        fp_end = (1 - BACKWARD_SHARE) * bp_end
    changes = proposed_changes(reductions, fp_end, bp_end)
    if not changes:
        return Advice(0, _why_no_change_helps(fp_end, bp_end, reductions))
    best = changes[0]
    return Advice(best.rule, _WHY[best.rule](fp_end, bp_end, reductions), best.percentages)


def _why_last_cut_later(fp_end: float, bp_end: float, reductions: Sequence[TimedReduction]) -> str:
    first, last = reductions[0], reductions[-1]
    return (
        f"The first reduction ends {_ms(bp_end - first.end)} before backward does, and the "
        f"last, with {byte_shares(reductions)[-1]:g} % of the bytes, runs "
        f"{_ms(last.end - bp_end)} longer: move the last cut later, so that little is left for "
        "the end."
    )


def _why_cuts_earlier(fp_end: float, bp_end: float, reductions: Sequence[TimedReduction]) -> str:
    return (
        f"The first reduction starts late, {_ms(reductions[0].start - fp_end)} into a backward of "
        f"{_ms(bp_end - fp_end)}, and ends after it: move the cut earlier, so that the first "
        "reduction hides behind backward."
    )


def _why_one_more(fp_end: float, bp_end: float, reductions: Sequence[TimedReduction]) -> str:
    last = reductions[-1]
    if len(reductions) == 1:
        return (
            f"All gradients are reduced together, for {_ms(last.end - last.start)} after backward: "
            "add a segment, so that most of them are reduced while backward still runs."
        )
    return (
        f"Backward has room: no reduction runs during "
        f"{_ms(idle_seconds(reductions, fp_end, bp_end))} of it, and communication ends "
        f"{_ms(last.end - bp_end)} after it: add a segment."
    )


def _why_no_change_helps(fp_end: float, bp_end: float, reductions: Sequence[TimedReduction]) -> str:
    return (
        "Communication takes longer than there is to hide it behind: "
        f"{_ms(reductions[-1].end - bp_end)} are left after backward, in which no reduction runs "
        f"for only {_ms(idle_seconds(reductions, fp_end, bp_end))}. No other cut will help much: "
        "send less (compression, more backward passes in a step), or use a faster network."
    )


_WHY: dict[int, Callable[[float, float, Sequence[TimedReduction]], str]] = {
    1: _why_last_cut_later,
    2: _why_cuts_earlier,
    3: _why_one_more,
}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
