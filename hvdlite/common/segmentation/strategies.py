"""The strategies: gradients in an order, with bytes, dtype and layer, in; where segments end, out.

This module never sends, sleeps or reads a clock. The law of all of them, by `segments_of`: every
gradient is in exactly one segment, each segment holds one dtype, in the order of the gradients.

The rules are those of Huawei HCCL's gradient split (`Size`, `Index`), of PaddlePaddle Fleet's
communication fusion (`Megabytes`, `Count`), and of MindSpore's ``comm_fusion`` (`Threshold`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import ClassVar, NamedTuple, Protocol

MIB = 1 << 20
JOB_THRESHOLD_BYTES = 128 * MIB  # the default of the job's threshold
MOST_SEGMENTS = 8  # that percentages or indices may ask for
HCCL_DEFAULT = (96.54, 3.46)  # percent of the bytes


class Gradient(NamedTuple):
    """A dense gradient, as far as a strategy looks at it."""

    name: str
    bytes: int
    dtype: str
    path: str = ""  # of the parameter in its model, where that is not the name

    @property
    def layer(self) -> str:
        """The owner of the parameter, as names tell it: ``layer1.0.conv1`` of its ``weight``."""
        path = self.path or self.name
        head, _, _ = path.replace("/", ".").rpartition(".")
        return head or path


class Strategy(Protocol):
    """Cuts gradients into segments."""

    in_ready_order: ClassVar[bool]
    """Whether gradients are given as they become ready; otherwise in the order of the model."""

    def __hash__(self) -> int:
        """Equal strategies are the same."""

    @property
    def text(self) -> str:
        """What a user can give to have this strategy."""

    def ends(self, gradients: Sequence[Gradient]) -> list[int]:
        """The last index of each segment, ascending; the last is that of the last gradient.

        Raises `ValueError` where it cannot be followed with these gradients.
        """


@dataclass(frozen=True)
class Threshold:
    """A tensor with which a segment would exceed `bytes` opens the next one.

    Without `bytes` nothing is planned: what is ready travels, fused up to the job's threshold.
    """

    bytes: int | None = None
    in_ready_order: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """See `Strategy.text`."""
        return "threshold" if self.bytes is None else f"threshold:{self.bytes / MIB:g}"

    def ends(self, gradients: Sequence[Gradient]) -> list[int]:
        """See `Strategy.ends`."""
        limit = JOB_THRESHOLD_BYTES if self.bytes is None else self.bytes
        ends: list[int] = []
        filled = 0
        for index, gradient in enumerate(gradients):
            if index and filled + gradient.bytes > limit:
                ends.append(index - 1)
                filled = 0
            filled += gradient.bytes
        return _closed(ends, gradients)


@dataclass(frozen=True)
class Size:
    """Segments that hold, as nearly as whole gradients can, these percentages of all bytes.

    Where it is not `strict`, there may be fewer gradients than percentages.
    """

    percentages: tuple[float, ...] = HCCL_DEFAULT
    strict: bool = True
    in_ready_order: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """See `Strategy.text`."""
        return "size:" + ",".join(f"{each:g}" for each in self.percentages)

    def ends(self, gradients: Sequence[Gradient]) -> list[int]:
        """See `Strategy.ends`."""
        if (
            self.strict and self.percentages != HCCL_DEFAULT
        ):  # which makes one segment of one gradient
            _check_number(self.text, len(self.percentages), gradients)
        sums = list(accumulate(gradient.bytes for gradient in gradients))
        ends: list[int] = []
        for share in accumulate(self.percentages[:-1]):
            goal = sums[-1] * share / 100 if sums else 0
            first = ends[-1] + 1 if ends else 0
            nearest = min(range(len(sums)), key=lambda index: abs(sums[index] - goal), default=0)
            ends.append(max(nearest, first))
            if ends[-1] >= len(gradients) - 1:
                break
        return _closed(ends, gradients)


@dataclass(frozen=True)
class Index:
    """Segments that end with the gradients of these numbers.

    Where it is not `strict`, numbers beyond the last gradient are left out, and what follows the
    last number is one more segment.
    """

    last: tuple[int, ...]
    strict: bool = True
    in_ready_order: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """See `Strategy.text`."""
        return "index:" + ",".join(map(str, self.last))

    def ends(self, gradients: Sequence[Gradient]) -> list[int]:
        """See `Strategy.ends`."""
        if self.strict:
            _check_number(self.text, len(self.last), gradients)
            if self.last[-1] != len(gradients) - 1:
                raise ValueError(
                    f"{self.text}: the last index must be {len(gradients) - 1}, that of the last "
                    f"of {len(gradients)} gradients, not {self.last[-1]}"
                )
        return _closed([end for end in self.last if end < len(gradients)], gradients)


@dataclass(frozen=True)
class Megabytes:
    """Whole layers, until there are `size` MiB or more than `count` tensors in a segment.

    A layer is never split, so a segment may hold more. `size` 0: one segment; below 0: one for
    each layer. `count` 1 or less sets no limit.
    """

    size: float = 32
    count: int = 50
    in_ready_order: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """See `Strategy.text`."""
        return f"mb:{self.size:g},{self.count}"

    def ends(self, gradients: Sequence[Gradient]) -> list[int]:
        """See `Strategy.ends`."""
        if self.size == 0:
            return _closed([], gradients)
        limit = max(self.size, 0) * MIB
        return _by_layer(gradients, limit, self.count)


@dataclass(frozen=True)
class Count:
    """Whole layers, until there are more than `count` tensors in a segment."""

    count: int
    in_ready_order: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """See `Strategy.text`."""
        return f"count:{self.count}"

    def ends(self, gradients: Sequence[Gradient]) -> list[int]:
        """See `Strategy.ends`."""
        return _by_layer(gradients, float("inf"), self.count)


@dataclass(frozen=True)
class Auto:
    """Learned from what iterations measure: `Size` as HCCL's default before anything is known.

    `file` holds what was learned: it is read if it is there, and written when tuning ends.
    """

    file: str = ""
    in_ready_order: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """See `Strategy.text`."""
        return f"auto:{self.file}" if self.file else "auto"

    def ends(self, gradients: Sequence[Gradient]) -> list[int]:
        """See `Strategy.ends`."""
        return Size().ends(gradients)


def segments_of(strategy: Strategy, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """The gradients, cut by the strategy, and each segment once more by dtype.

    Raises `ValueError` as `Strategy.ends` does.
    """
    return [list(segment) for segment in _pieces(strategy, gradients)]


def _pieces(strategy: Strategy, gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
    if not gradients:
        return
    for before, end in pairwise([-1, *strategy.ends(gradients)]):
        by_dtype: dict[str, list[Gradient]] = {}
        for gradient in gradients[before + 1 : end + 1]:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        yield from by_dtype.values()


def _by_layer(gradients: Sequence[Gradient], limit_bytes: float, limit_count: int) -> list[int]:
    ends: list[int] = []
    tensors = filled = last = 0
    for _, layer in groupby(gradients, key=lambda gradient: gradient.layer):
        for gradient in layer:
            tensors, filled, last = tensors + 1, filled + gradient.bytes, last + 1
        if (limit_count > 1 and tensors > limit_count) or filled >= limit_bytes:
            ends.append(last - 1)
            tensors = filled = 0
    return _closed(ends, gradients)


def _closed(ends: list[int], gradients: Sequence[Gradient]) -> list[int]:
    """`ends`, the last of which is that of the last gradient."""
    last = len(gradients) - 1
    return ends if last < 0 or (ends and ends[-1] == last) else [*ends, last]


def _check_number(text: str, segments: int, gradients: Sequence[Gradient]) -> None:
    if segments > len(gradients):
        raise ValueError(f"{text}: {segments} segments of {len(gradients)} gradients")
