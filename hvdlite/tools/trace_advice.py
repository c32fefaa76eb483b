"""Which gradients should travel together instead: three rules, applied to an iteration trace.

1. The first reduction starts early, and the last is long: move the last cut later.
2. The first starts late, and ends after backward: move the cuts earlier.
3. Backward is long and has room: add a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.common.segmentation.strategies import MOST_SEGMENTS

ENOUGH = 0.03  # share of the iteration: less communication after backward is not worth a change
LONG_SHARE = 0.1  # of the bytes: from here on the last segment is long
BACKWARD_SHARE = 2 / 3  # of forward and backward, where the end of forward was not seen
SMALLER_LAST = 0.4  # rule 1: 50, 50 becomes 80, 20
FIRST_CUT = (80.0, 20.0)  # rule 3, where all gradients travel together


class Travel(NamedTuple):
    """A reduction; seconds after the beginning of forward."""

    start: float
    end: float
    bytes: int


class Advice(NamedTuple):
    """What to do; without `percentages` no other cut will help."""

    rule: int  # 1, 2 or 3; 0: none applies
    why: str
    percentages: tuple[float, ...] = ()  # of the bytes, segment by segment

    @property
    def segmentation(self) -> str:
        """The value of ``--segmentation``; empty where nothing is proposed."""
        values = ",".join(f"{each:g}" for each in self.percentages)
        return f"size:{values}" if values else ""


def advise(
    fp_end: float | None, bp_end: float | None, iteration_end: float, travels: Sequence[Travel]
) -> Advice:
    """What would shorten the tail. Times are seconds after the beginning of forward.

    `travels` are the reductions of one iteration in their order. `fp_end` None: it was not seen.
    """
    if not travels:
        return Advice(0, "No gradients travelled: there is nothing to cut.")
    if bp_end is None:
        return Advice(0, "The end of backward was not seen: tell it with backward_done().")
    last = travels[-1].end
    if last - bp_end <= ENOUGH * iteration_end:
        return Advice(
            0,
            f"Communication ends {_ms(max(last - bp_end, 0))} after backward, which is "
            f"{max(last - bp_end, 0) / iteration_end:.0%} of the iteration: there is nothing to "
            "gain by another cut.",
        )
    if fp_end is None:
        fp_end = (1 - BACKWARD_SHARE) * bp_end
    return _rule(fp_end, bp_end, travels)


def _rule(fp_end: float, bp_end: float, travels: Sequence[Travel]) -> Advice:
    first, last = travels[0], travels[-1]
    shares = _shares(travels)
    if len(shares) == 1:
        return Advice(
            3,
            f"All gradients travel together, for {_ms(last.end - last.start)} after backward: add "
            "a segment, so that most of them travel while backward still runs.",
            FIRST_CUT,
        )
    late = first.start > (fp_end + bp_end) / 2
    if late and first.end > bp_end:
        return Advice(
            2,
            f"The first reduction starts late, {_ms(first.start - fp_end)} into a backward of "
            f"{_ms(bp_end - fp_end)}, and ends after it: move the cut earlier, so that the first "
            "reduction hides behind backward.",
            _earlier(shares),
        )
    if first.end <= bp_end and shares[-1] > 100 * LONG_SHARE:
        return Advice(
            1,
            f"The first reduction ends {_ms(bp_end - first.end)} before backward does, and the "
            f"last, with {shares[-1]:g} % of the bytes, runs {_ms(last.end - bp_end)} longer: move "
            "the last cut later, so that little is left for the end.",
            _later(shares),
        )
    room = _idle(fp_end, bp_end, travels)
    if room > last.end - bp_end and len(shares) < MOST_SEGMENTS:
        return Advice(
            3,
            f"Backward has room: nothing travels during {_ms(room)} of it, and communication ends "
            f"{_ms(last.end - bp_end)} after it: add a segment.",
            _more(shares),
        )
    return Advice(
        0,
        f"Communication takes longer than there is to hide it behind: {_ms(last.end - bp_end)} are "
        f"left after backward, in which nothing travels for only {_ms(room)}. No other cut will "
        "help much: send less (compression, more backward passes in a step), or use a faster "
        "network.",
    )


def _idle(begin: float, end: float, travels: Sequence[Travel]) -> float:
    """How long nothing travels between two times."""
    busy = sum(max(min(each.end, end) - max(each.start, begin), 0.0) for each in travels)
    return max(end - begin - busy, 0.0)


def _shares(travels: Sequence[Travel]) -> list[float]:
    """Percentages of the bytes; where there are too many segments, small neighbours as one."""
    sizes = [each.bytes for each in travels]
    while len(sizes) > MOST_SEGMENTS:  # the last one is what the tail depends on: it stays
        k = min(range(len(sizes) - 2), key=lambda k: sizes[k] + sizes[k + 1])
        sizes[k : k + 2] = [sizes[k] + sizes[k + 1]]
    return list(_rounded([100 * size / max(sum(sizes), 1) for size in sizes]))


def _later(shares: list[float]) -> tuple[float, ...]:
    """The last cut later: 50, 50 becomes 80, 20."""
    last = shares[-1] * SMALLER_LAST
    return _rounded([*shares[:-2], shares[-2] + shares[-1] - last, last])


def _earlier(shares: list[float]) -> tuple[float, ...]:
    """All cuts earlier: 90, 10 becomes 80, 20."""
    moved = min(max(shares[-1], 5.0), shares[0] / 2)
    return _rounded([shares[0] - moved, *shares[1:-1], shares[-1] + moved])


def _more(shares: list[float]) -> tuple[float, ...]:
    """The largest in two, the later one a quarter of it: 80, 20 becomes 60, 20, 20."""
    k = max(range(len(shares)), key=lambda k: shares[k])
    return _rounded([*shares[:k], 0.75 * shares[k], 0.25 * shares[k], *shares[k + 1 :]])


def _rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """With one digit after the point; the greatest makes up for what the others are off by."""
    values = [round(each, 1) for each in shares]
    k = max(range(len(values)), key=lambda k: values[k])
    values[k] = round(100 - sum(values[:k]) - sum(values[k + 1 :]), 1)
    return tuple(values)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
