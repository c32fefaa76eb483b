"""From what a user gives to a strategy; whatever is wrong is said with the value that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from hvdlite.common.segmentation.strategies import (
    MIB,
    MOST_SEGMENTS,
    Auto,
    Count,
    Index,
    Megabytes,
    Size,
    Strategy,
    Threshold,
)

_TOLERANCE = 1e-6  # of the sum of percentages
_KINDS = "threshold:MB, size:PERCENT,..., index:LAST,..., mb:MB[,COUNT], count:N, auto[:FILE]"


def by_size(percentages: Any) -> Size:
    """`Size`. Raises `ValueError` unless they are 1 to 8 numbers from 0 that sum to 100."""
    values = _sequence(percentages, "percentages")
    for value in values:
        if not _is_number(value) or not value >= 0 or math.isinf(value):
            raise ValueError(f"percentages: {value!r} is no number from 0 to 100")
    if abs(math.fsum(values) - 100) > _TOLERANCE:
        raise ValueError(f"percentages: {list(values)} sum to {math.fsum(values):g}, not to 100")
    return Size(tuple(values))


def by_index(indices: Any) -> Index:
    """`Index`. Raises `ValueError` unless they are 1 to 8 ascending numbers from 0."""
    values = _sequence(indices, "indices")
    for value in values:
        if not _is_whole(value) or value < 0:
            raise ValueError(f"indices: {value!r} is no whole number from 0 on")
    for before, value in pairwise(values):
        if value <= before:
            raise ValueError(f"indices: {value} does not come after {before}")
    return Index(tuple(values))


def by_megabytes(
    fuse_grad_size_in_MB: Any = None,  # noqa: N803
    fuse_grad_count: Any = None,
    fuse_all_reduce_ops: Any = True,
) -> Strategy:
    """`Megabytes`, by default 32 and 50; without `fuse_all_reduce_ops` nothing is fused.

    Raises `TypeError` for a value of another type.
    """
    size = 32 if fuse_grad_size_in_MB is None else fuse_grad_size_in_MB
    count = 50 if fuse_grad_count is None else fuse_grad_count
    if not _is_number(size):
        raise TypeError(f"fuse_grad_size_in_MB={size!r} must be a number (MiB)")
    if not _is_whole(count):
        raise TypeError(f"fuse_grad_count={count!r} must be a whole number (tensors)")
    if not isinstance(fuse_all_reduce_ops, bool):
        raise TypeError(f"fuse_all_reduce_ops={fuse_all_reduce_ops!r} must be True or False")
    return Megabytes(size, count) if fuse_all_reduce_ops else Threshold(0)


def read_strategy(text: str) -> Strategy | None:
    """The strategy that `text` names; None for ``threshold``, by which the engine fuses anyway.

    Raises `ValueError` that says what is wrong.
    """
    kind, given, rest = text.strip().partition(":")
    reader = _READERS.get(kind)
    if reader is None or (given and not rest):
        raise ValueError(f"must be one of {_KINDS}")
    return reader(rest)


def _read_size(rest: str) -> Size:
    return by_size([_number(part, float) for part in rest.split(",")]) if rest else Size()


def _read_index(rest: str) -> Index:
    return by_index([_number(part, int) for part in rest.split(",")])


def _read_megabytes(rest: str) -> Megabytes:
    size, _, count = rest.partition(",")
    return Megabytes(_number(size, float), _number(count, int) if count else 50)


def _read_threshold(rest: str) -> Threshold | None:
    if not rest:
        return None
    size = _number(rest, float)
    if size < 0:
        raise ValueError(f"threshold:{rest} must not be negative")
    return Threshold(int(size * MIB))


_READERS: dict[str, Callable[[str], Strategy | None]] = {
    "threshold": _read_threshold,
    "size": _read_size,
    "index": _read_index,
    "mb": _read_megabytes,
    "count": lambda rest: Count(_number(rest, int)),
    "auto": Auto,
}


def _number(text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no {'whole ' if kind is int else ''}number")
    return value


def _sequence(values: Any, what: str) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"{what}: {values!r} is not a list with something in it")
    if len(values) > MOST_SEGMENTS:
        raise ValueError(f"{what}: {len(values)} segments, and {MOST_SEGMENTS} are the most")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
