"""Parse user input into a `Strategy`. Every error quotes the offending value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from hvdlite.common.base.warn import warn_user
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

_TOLERANCE = 1e-6  # the most by which the sum of percentages may differ from 100
_KINDS = "threshold[:MB], size[:PERCENT,...], index:LAST,..., mb:MB[,COUNT], count:N, auto[:FILE]"

_FUSION = ("fuse_grad_size_in_MB", "fuse_grad_count", "fuse_all_reduce_ops")
_FLEETS_COUNT = "_fuse_grad_size_in_TFLOPS"


def by_size(percentages: Any) -> Size:
    """Return `Size`; raise `ValueError` unless 1 to 8 numbers from 0 on sum to 100."""
    values = _sequence(percentages, "percentages")
    for value in values:
        if not _is_number(value) or not value >= 0 or math.isinf(value):
            raise ValueError(f"percentages: {value!r} is no number from 0 to 100")
    if abs(math.fsum(values) - 100) > _TOLERANCE:
        raise ValueError(f"percentages: {list(values)} sum to {math.fsum(values):g}, not to 100")
    return Size(tuple(values))


def by_index(indices: Any) -> Index:
    """Return `Index`; raise `ValueError` unless there are 1 to 8 ascending integers from 0 on."""
    values = _sequence(indices, "indices")
    for value in values:
        if not _is_whole(value) or value < 0:
            raise ValueError(f"indices: {value!r} is no whole number from 0 on")
    for previous, value in pairwise(values):
        if value <= previous:
            raise ValueError(f"indices: {value} does not come after {previous}")
    return Index(tuple(values))


def by_megabytes(
    fuse_grad_size_in_MB: Any = None,  # noqa: N803
    fuse_grad_count: Any = None,
    fuse_all_reduce_ops: Any = True,
) -> Strategy:
    """Return `Megabytes`, by default 32 and 50, or no fusion without `fuse_all_reduce_ops`.

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


def resolve(segmentation: Any, **fusion: Any) -> Strategy | None:
    """Return the strategy that the arguments of an optimizer select; None where they select none.

    `segmentation` is a string for `read_strategy`, or a strategy. `fusion` has the names of
    PaddlePaddle Fleet: `fuse_grad_size_in_MB`, `fuse_grad_count` (Fleet calls it
    `_fuse_grad_size_in_TFLOPS`), `fuse_all_reduce_ops`. Raises `TypeError` for another name or
    type, and `ValueError` for any other mistake.
    """
    count = fusion.pop(_FLEETS_COUNT, None)
    for name in fusion:
        if name not in _FUSION:
            raise TypeError(
                f"there is no argument {name}; those that say how gradients are cut are "
                f"segmentation, {', '.join(_FUSION)}"
            )
    if count is not None and fusion.get("fuse_grad_count") is not None:
        grad_count = fusion["fuse_grad_count"]
        warn_user(f"fuse_grad_count={grad_count!r} wins over {_FLEETS_COUNT}={count!r}: give one")
    elif count is not None:
        fusion["fuse_grad_count"] = count
    if segmentation is None:
        return by_megabytes(**fusion) if fusion else None
    if fusion:
        raise ValueError(f"segmentation={segmentation!r} and {', '.join(fusion)}: give one of them")
    if isinstance(segmentation, str):
        try:
            return read_strategy(segmentation)
        except ValueError as error:
            raise ValueError(f"segmentation={segmentation!r}: {error}") from None
    if not isinstance(segmentation, (Threshold, Size, Index, Megabytes, Count, Auto)):
        raise TypeError(f"segmentation={segmentation!r} is no text and no strategy")
    return segmentation


def read_comm_fusion(config: Any) -> dict[str, Strategy]:
    """Return the strategy of each collective in a ``comm_fusion``, the dict of MindSpore.

    Raises `TypeError` where a dict is expected, `KeyError` for keys and modes that are unknown or
    missing, and `ValueError` for a config that its mode does not accept.
    """
    if not isinstance(config, dict):
        raise TypeError(f"comm_fusion: {config!r} is not a dict")
    return {name: _fusion_of(name, entry) for name, entry in config.items()}


def _fusion_of(collective: str, entry: Any) -> Strategy:
    key = f"comm_fusion[{collective!r}]"
    modes = _MODES.get(collective)
    if modes is None:
        raise KeyError(f"{key}: it must be one of {', '.join(_MODES)}")
    if not isinstance(entry, dict):
        raise TypeError(f"{key}: {entry!r} is not a dict")
    if set(entry) != {"mode", "config"}:
        raise KeyError(f"{key}: {entry!r} must have 'mode' and 'config', and nothing else")
    mode, config = entry["mode"], entry["config"]
    if mode not in modes:
        raise KeyError(f"{key}: mode {mode!r} is none of {', '.join(modes)}")
    if mode == "auto":
        if config is not None:
            raise ValueError(f"{key}: mode 'auto' takes the config None, not {config!r}")
        return Threshold(_AUTO_FUSION_BYTES)
    if mode == "size":
        if not _is_whole(config) or config < 0:
            raise ValueError(f"{key}: mode 'size' takes whole MB from 0 on, not {config!r}")
        return Threshold(config * MIB)
    if not isinstance(config, list) or not all(map(_is_whole, config)):
        raise TypeError(f"{key}: mode 'index' takes a list of whole numbers, not {config!r}")
    if not config or config[0] < 0 or any(after <= before for before, after in pairwise(config)):
        raise ValueError(f"{key}: {config!r} must be ascending numbers from 0 on, at least one")
    return Index(tuple(config), strict=False)


_AUTO_FUSION_BYTES = 64 * MIB  # of MindSpore's mode "auto"
_MODES = {
    "allreduce": ("auto", "size", "index"),
    "allgather": ("auto", "size"),
    "reducescatter": ("auto", "size"),
}


def read_strategy(spec: str) -> Strategy:
    """Return the strategy that `spec` spells, such as ``size:80,20``; raise `ValueError`."""
    kind, colon, rest = spec.strip().partition(":")
    reader = _READERS.get(kind)
    if reader is None or (colon and not rest):
        raise ValueError(f"must be one of {_KINDS}")
    return reader(rest)


def _read_megabytes(rest: str) -> Megabytes:
    size, _, count = rest.partition(",")
    return Megabytes(_number(size, float), _number(count, int) if count else 50)


def _read_threshold(rest: str) -> Threshold:
    if not rest:
        return Threshold()
    size = _number(rest, float) * MIB
    if not 0 <= size < math.inf:
        raise ValueError(f"threshold:{rest} is no number of MB from 0 on")
    return Threshold(int(size))


_READERS: dict[str, Callable[[str], Strategy]] = {
    "threshold": _read_threshold,
    "size": lambda rest: (
        by_size([_number(part, float) for part in rest.split(",")]) if rest else Size()
    ),
    "index": lambda rest: by_index([_number(part, int) for part in rest.split(",")]),
    "mb": _read_megabytes,
    "count": lambda rest: Count(_number(rest, int)),
    "auto": Auto,
}


def _number(text: str, kind: type) -> Any:
    try:
        value = kind(text)
        is_number = math.isfinite(value)
    except (ValueError, OverflowError):
        is_number = False
    if not is_number:
        raise ValueError(f"{text!r} is no {'whole ' if kind is int else ''}number")
    return value


def _sequence(values: Any, name: str) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"{name}: {values!r} is not a list with something in it")
    if len(values) > MOST_SEGMENTS:
        raise ValueError(f"{name}: {len(values)} segments, and {MOST_SEGMENTS} are the most")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# The segmentation that the user has chosen by calls for one process set.


class UserChoice:
    """The choices for one process set; they are final once its gradients are reduced."""

    def __init__(self) -> None:
        self._by_size: Size | None = None
        self._by_index: Index | None = None
        self._fused: Strategy | None = None  # of gradients
        self._limits: dict[str, Strategy] = {}  # of other collectives, by name
        self._final = False  # set when the first gradients ask how they are split

    def set_split(self, strategy: Size | Index) -> str:
        """Split gradients by `strategy`; return a warning for the user, or an empty string.

        Raises `ValueError` when gradients have already been reduced.
        """
        self._check()
        by_size = isinstance(strategy, Size)
        previous: Strategy | None = self._by_size if by_size else self._by_index
        if isinstance(strategy, Size):
            self._by_size = strategy
        else:
            self._by_index = strategy
        if previous is not None:
            return f"{strategy.spec} takes the place of {previous.spec}, which was set before"
        if self._by_size is not None and self._by_index is not None:
            return f"{self._by_size.spec} wins over {self._by_index.spec}: both are set"
        return ""

    def set_fusion(self, gradients: Strategy | None, others: dict[str, Strategy]) -> None:
        """Fuse gradients by a strategy, and other collectives by theirs; raise as `set_split`.

        None leaves the choice for gradients as it is.
        """
        if gradients is not None:
            self._check()
            self._fused = gradients
        self._limits.update(others)

    def _check(self) -> None:
        if self._final:
            raise ValueError(
                "gradients of this process set have been reduced already: set how they are split "
                "after init() and before the first of them is reduced"
            )

    def strategy(self) -> Strategy | None:
        """Return the final strategy of the gradients; None where the user has chosen none."""
        self._final = True
        return self._by_size or self._by_index or self._fused

    def limit_bytes(self, collective: str) -> int | None:
        """Return the most bytes of a segment of `collective`; None: the job's setting applies.

        Gradients have no limit: `strategy` plans their segments.
        """
        fused = self._limits.get(collective)
        return fused.bytes if isinstance(fused, Threshold) else None
