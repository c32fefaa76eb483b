"""Where segments end: whether that can be, and the line that a user can paste for it."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.common.segmentation.strategies import HCCL_DEFAULT, MOST_SEGMENTS, Gradient, Size

MOST_DIGITS = 9  # after the point; the sum has to be 100 within 1e-6


def check_ends(ends: Sequence[int], gradients: Sequence[Gradient]) -> None:
    """Raise `ValueError` unless these are the ends of segments of these gradients."""
    last = len(gradients) - 1
    if len(ends) > MOST_SEGMENTS:
        raise ValueError(f"{list(ends)} are {len(ends)} segments: {MOST_SEGMENTS} are the most")
    if not ends or list(ends) != sorted(set(ends)) or ends[0] < 0 or ends[-1] != last:
        raise ValueError(
            f"{list(ends)} are no ends of segments of {last + 1} gradients: they must ascend, "
            f"and the last must be {last}"
        )


def percentages(ends: Sequence[int], gradients: Sequence[Gradient]) -> tuple[float, ...] | None:
    """What `Size` makes exactly these ends of, with as few digits as do; None: nothing does."""
    if len(ends) > MOST_SEGMENTS:
        return None
    total = sum(each.bytes for each in gradients)
    firsts = [0, *(end + 1 for end in ends[:-1])]
    exact = [
        100 * sum(each.bytes for each in gradients[first : end + 1]) / total if total else 0.0
        for first, end in zip(firsts, ends, strict=True)
    ]
    for digits in range(1, MOST_DIGITS + 1):
        rounded = [round(share, digits) for share in exact[:-1]]
        rounded.append(abs(round(100 - sum(rounded), digits)))
        if Size(tuple(rounded)).ends(gradients) == list(ends) and abs(sum(rounded) - 100) < 1e-7:
            return tuple(rounded)
    return HCCL_DEFAULT if Size().ends(gradients) == list(ends) else None


def pasted(ends: Sequence[int], gradients: Sequence[Gradient]) -> str:
    """The call that makes these segments of these gradients, by size if it can be, or by index."""
    shares = percentages(ends, gradients)
    if shares is None:
        return f"hvd.set_split_strategy_by_idx({list(ends)})"
    return f"hvd.set_split_strategy_by_size([{', '.join(_text(each) for each in shares)}])"


def _text(share: float) -> str:
    return f"{share:.{MOST_DIGITS}f}".rstrip("0").rstrip(".")
