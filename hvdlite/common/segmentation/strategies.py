"""Segmentation strategies: each maps ordered gradients to the last index of each segment.

`segments_of` guarantees that every gradient is in exactly one segment, that each segment holds one
dtype, and that segments keep the order of the gradients. This module never sends, sleeps or reads
a clock.

The rules are those of Huawei HCCL's gradient split (`Size`, `Index`), of PaddlePaddle Fleet's
communication fusion (`Megabytes`, `Count`), and of MindSpore's ``comm_fusion`` (`Threshold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import ClassVar, NamedTuple, Protocol

MIB = 1 << 20
JOB_THRESHOLD_BYTES = 128 * MIB  # the default of the job's threshold
MOST_SEGMENTS = 8  # the most segments of a split by percentages or indices, as in HCCL
HCCL_DEFAULT = (96.54, 3.46)  # HCCL splits so, in percent of the bytes, when nothing is set
MOST_DIGITS = 9  # after the point; the sum has to be 100 within 1e-6


class Gradient(NamedTuple):
    """The properties of a dense gradient that strategies use."""

    name: str
    bytes: int
    dtype: str
    path: str = ""  # path of the parameter in its model; empty where the name is the path

    @property
    def layer(self) -> str:
        """The layer that owns the parameter: ``layer1.0.conv1`` for ``layer1.0.conv1.weight``."""
        path = self.path or self.name
        head, _, _ = path.replace("/", ".").rpartition(".")
        return head or path


def _spelled(number: float) -> str:
    """Return what reads as exactly this number, with as few digits as possible."""
    return repr(float(number)).removesuffix(".0")


class Strategy(Protocol):
    """Cuts gradients into segments."""

    in_ready_order: ClassVar[bool]
    """Whether the strategy expects gradients in ready order; otherwise in the model's order."""

    def __hash__(self) -> int:
        """Return the same hash for equal strategies, so that plans can be cached by strategy."""

    @property
    def spec(self) -> str:
        """The spelling of this strategy that the user can give as ``segmentation``."""

    def last_indices(self, gradients: Sequence[Gradient]) -> list[int]:
        """Return the last index of each segment, ascending; the final one is the last gradient's.

        Raises `ValueError` where the strategy does not fit these gradients.
        """


@dataclass(frozen=True)
class Threshold:
    """Segments of at most `bytes`: a tensor that would overflow a segment opens the next one.

    Without `bytes` nothing is planned: gradients are reduced as they become ready, fused up to the
    job's threshold. MindSpore's ``comm_fusion`` counts the opening tensor in the same way.
    """

    bytes: int | None = None
    in_ready_order: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return "threshold" if self.bytes is None else f"threshold:{_spelled(self.bytes / MIB)}"

    def last_indices(self, gradients: Sequence[Gradient]) -> list[int]:
        limit = JOB_THRESHOLD_BYTES if self.bytes is None else self.bytes
        last_indices: list[int] = []
        filled_bytes = 0
        for index, gradient in enumerate(gradients):
            if index and filled_bytes + gradient.bytes > limit:
                last_indices.append(index - 1)
                filled_bytes = 0
            filled_bytes += gradient.bytes
        return _closed(last_indices, len(gradients))


@dataclass(frozen=True)
class Size:
    """Segments that hold, as nearly as whole gradients can, these percentages of all bytes.

    With `strict`, fewer gradients than percentages are an error.
    """

    percentages: tuple[float, ...] = HCCL_DEFAULT
    strict: bool = True
    in_ready_order: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return "size:" + ",".join(map(_spelled, self.percentages))

    def last_indices(self, gradients: Sequence[Gradient]) -> list[int]:
        # HCCL's default is exempt: it yields one segment for a single gradient.
        if self.strict and self.percentages != HCCL_DEFAULT:
            _check_count(self.spec, len(self.percentages), gradients)
        return nearest_indices(
            list(accumulate(gradient.bytes for gradient in gradients)), self.percentages
        )


@dataclass(frozen=True)
class Index:
    """Segments that end with the gradients at these indices.

    With `strict`, the final index must be that of the last gradient. Otherwise indices past the
    last gradient are ignored, and the gradients after the final index form one more segment.
    """

    indices: tuple[int, ...]
    strict: bool = True
    in_ready_order: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return "index:" + ",".join(map(str, self.indices))

    def last_indices(self, gradients: Sequence[Gradient]) -> list[int]:
        if self.strict:
            _check_count(self.spec, len(self.indices), gradients)
            if self.indices[-1] != len(gradients) - 1:
                raise ValueError(
                    f"{self.spec}: the last index must be {len(gradients) - 1}, that of the last "
                    f"of {len(gradients)} gradients, not {self.indices[-1]}"
                )
        return _closed([index for index in self.indices if index < len(gradients)], len(gradients))


@dataclass(frozen=True)
class Megabytes:
    """Whole layers, until a segment holds `size` MiB or more than `count` tensors.

    A segment may overshoot, since a layer is never split. A `size` of 0 makes one segment, a
    negative one a segment for each layer. A `count` of 1 or less sets no limit.
    """

    size: float = 32
    count: int = 50
    in_ready_order: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return f"mb:{_spelled(self.size)},{self.count}"

    def last_indices(self, gradients: Sequence[Gradient]) -> list[int]:
        if self.size == 0:
            return _closed([], len(gradients))
        limit = max(self.size, 0) * MIB
        return _by_layer(gradients, limit, self.count)


@dataclass(frozen=True)
class Count:
    """Whole layers, until a segment holds more than `count` tensors."""

    count: int
    in_ready_order: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return f"count:{self.count}"

    def last_indices(self, gradients: Sequence[Gradient]) -> list[int]:
        return _by_layer(gradients, float("inf"), self.count)


@dataclass(frozen=True)
class Auto:
    """Tuned from measured iterations; HCCL's default until the first measurements exist.

    `file` keeps the tuned segmentation: it is read if it exists, and written when tuning ends.
    """

    file: str = ""
    in_ready_order: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return f"auto:{self.file}" if self.file else "auto"

    def last_indices(self, gradients: Sequence[Gradient]) -> list[int]:
        return Size().last_indices(gradients)


def nearest_indices(sums: Sequence[float], percentages: Sequence[float]) -> list[int]:
    """Return the last indices of segments that hold these percentages of the bytes most nearly.

    `sums` are the cumulative bytes of the gradients. Of two indices that are equally near the goal
    the earlier one ends the segment, as in HCCL.
    """
    last_indices: list[int] = []
    for share in accumulate(percentages[:-1]):
        goal = sums[-1] * share / 100 if sums else 0
        first = last_indices[-1] + 1 if last_indices else 0
        nearest = min(range(len(sums)), key=lambda index: abs(sums[index] - goal), default=0)
        last_indices.append(max(nearest, first))
        if last_indices[-1] >= len(sums) - 1:
            break
    return _closed(last_indices, len(sums))


def segments_of(strategy: Strategy, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """Return the gradients of each segment; segments of several dtypes are divided by dtype.

    Raises `ValueError` as `Strategy.last_indices` does.
    """
    segments: list[list[Gradient]] = []
    if not gradients:
        return segments
    for previous_last, last in pairwise([-1, *strategy.last_indices(gradients)]):
        by_dtype: dict[str, list[Gradient]] = {}
        for gradient in gradients[previous_last + 1 : last + 1]:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        segments += by_dtype.values()
    return segments


def _by_layer(gradients: Sequence[Gradient], limit_bytes: float, limit_count: int) -> list[int]:
    last_indices: list[int] = []
    tensors = filled_bytes = seen = 0
    for _, layer in groupby(gradients, key=lambda gradient: gradient.layer):
        for gradient in layer:
            tensors, filled_bytes, seen = tensors + 1, filled_bytes + gradient.bytes, seen + 1
        # Fleet compares the count with ">" and the bytes with ">=".
        if (limit_count > 1 and tensors > limit_count) or filled_bytes >= limit_bytes:
            last_indices.append(seen - 1)
            tensors = filled_bytes = 0
    return _closed(last_indices, len(gradients))


def _closed(last_indices: list[int], count: int) -> list[int]:
    """Return `last_indices`, completed so that the final segment ends with the last gradient."""
    last = count - 1
    complete = last < 0 or (last_indices and last_indices[-1] == last)
    return last_indices if complete else [*last_indices, last]


def _check_count(spec: str, segments: int, gradients: Sequence[Gradient]) -> None:
    if segments > len(gradients):
        raise ValueError(f"{spec}: {segments} segments of {len(gradients)} gradients")


# The last indices of segments: their validation, and the user's call that yields them.


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
    spelled = (f"{share:.{MOST_DIGITS}f}".rstrip("0").rstrip(".") for share in shares)
    return f"hvd.set_split_strategy_by_size([{', '.join(spelled)}])"
