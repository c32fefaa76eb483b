"""The last indices of segments: their validation, and the user's call that yields them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.common.segmentation.strategies import HCCL_DEFAULT, MOST_SEGMENTS, Gradient, Size

MOST_DIGITS = 9  # after the point; the sum has to be 100 within 1e-6


def check_last_indices(last_indices: Sequence[int], gradients: Sequence[Gradient]) -> None:
    """Raise `ValueError` unless `last_indices` divide these gradients into 1 to 8 segments."""
    last = len(gradients) - 1
    if len(last_indices) > MOST_SEGMENTS:
        raise ValueError(
            f"{list(last_indices)} are {len(last_indices)} segments: {MOST_SEGMENTS} are the most"
        )
    ascending = list(last_indices) == sorted(set(last_indices))
    if not last_indices or not ascending or last_indices[0] < 0 or last_indices[-1] != last:
        raise ValueError(
            f"{list(last_indices)} are no ends of segments of {last + 1} gradients: they must "
            f"ascend, and the last must be {last}"
        )


def percentages(
    last_indices: Sequence[int], gradients: Sequence[Gradient]
) -> tuple[float, ...] | None:
    """Return the percentages from which `Size` yields exactly these last indices.

    They have as few digits as possible. Return None where no percentages yield these last indices.
    """
    if len(last_indices) > MOST_SEGMENTS:
        return None
    total = sum(gradient.bytes for gradient in gradients)
    firsts = [0, *(last + 1 for last in last_indices[:-1])]
    exact = [
        100 * sum(gradient.bytes for gradient in gradients[first : last + 1]) / total
        if total
        else 0.0
        for first, last in zip(firsts, last_indices, strict=True)
    ]
    for digits in range(1, MOST_DIGITS + 1):
        rounded = [round(share, digits) for share in exact[:-1]]
        rounded.append(abs(round(100 - sum(rounded), digits)))
        same = Size(tuple(rounded)).last_indices(gradients) == list(last_indices)
        if same and abs(sum(rounded) - 100) < 1e-7:
            return tuple(rounded)
    return HCCL_DEFAULT if Size().last_indices(gradients) == list(last_indices) else None


def split_call(last_indices: Sequence[int], gradients: Sequence[Gradient]) -> str:
    """Return the call that yields these segments, as source code to paste into a script.

    The call sets percentages where any yield these segments, and otherwise the indices.
    """
    shares = percentages(last_indices, gradients)
    if shares is None:
        return f"hvd.set_split_strategy_by_idx({list(last_indices)})"
    return f"hvd.set_split_strategy_by_size([{', '.join(map(_format_share, shares))}])"


def _format_share(share: float) -> str:
    return f"{share:.{MOST_DIGITS}f}".rstrip("0").rstrip(".")
