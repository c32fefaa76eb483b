"""Which gradients travel when, and together with which: the same for every framework's optimizer.

Parameters are known here by a key, which can be anything hashable; nothing here sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvdlite.common.api.options import Options
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.warn import warn_user
from hvdlite.common.plain.compression import Compressor
from hvdlite.common.plain.lists import split_list
from hvdlite.common.runtime.basics import size
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.segmentation.strategies import Strategy, Threshold

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Scaling:
    """How gradients are reduced: the operation, and what is multiplied before and after it."""

    op: ReduceOp = ReduceOp.AVERAGE
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0


def scaling(op: int, gradient_predivide_factor: float) -> Scaling:
    """Average, of which one part of the division by the number of ranks can come before the sum.

    Raises `ValueError` for a factor with another operation, and for one that is not positive.
    """
    factor = gradient_predivide_factor
    if factor == 1:
        return Scaling(ReduceOp(op))
    if op != ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not factor > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, not {factor}")
    return Scaling(ReduceOp.AVERAGE, 1 / factor, factor)


@dataclass(frozen=True)
class ReductionConfig:
    """How the gradients of one optimizer are reduced."""

    compression: type[Compressor]
    scaling: Scaling
    sparse_as_dense: bool
    process_set: ProcessSet
    segmentation: Strategy | None = None  # None: what was chosen for the process set

    def __post_init__(self) -> None:
        found = self.segmentation
        if found is not None and found != Threshold() and not self.fusable:
            raise ValueError(
                f"segmentation {found.spec}: only Average and Sum travel in segments, "
                f"not {self.scaling.op.name.capitalize()}"
            )

    @property
    def fusable(self) -> bool:
        """Whether the operation lets gradients travel in segments."""
        return self.scaling.op in (ReduceOp.AVERAGE, ReduceOp.SUM)

    @property
    def options(self) -> Options:
        """What every reduction of a gradient says."""
        return Options(
            self.process_set,
            self.scaling.op,
            prescale_factor=self.scaling.prescale_factor,
            postscale_factor=self.scaling.postscale_factor,
        )

    @property
    def active(self) -> bool:
        """Whether there are other ranks to exchange with. Raises `ValueError` before `init`."""
        return size() > 1 and bool(self.process_set.included())


def check_passes(backward_passes_per_step: int) -> int:
    """Raises `ValueError` unless it is a positive number."""
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {backward_passes_per_step}")
    return backward_passes_per_step


def check_names(names: Sequence[str]) -> None:
    """Raises `ValueError` for a name that comes twice."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(duplicates)}"
        )


def resolve_groups(num_groups: int, groups: Any) -> Any:
    """`groups`, or the deprecated `num_groups` in its place."""
    if num_groups == 0:
        return groups
    warn_user("num_groups is deprecated; use groups", DeprecationWarning)
    return num_groups if groups is None else groups


def check_groups(groups: object, is_tensor: Callable[[Any], bool], tensor: str) -> None:
    """Raises `ValueError` unless it is None, a positive number, or a list of lists of tensors.

    `is_tensor` knows a tensor of the framework, which calls it `tensor`.
    """
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list):
        raise ValueError(
            f"groups should be a positive number or a list of lists of {tensor}, not {groups!r}"
        )
    for group in groups:
        if not isinstance(group, (list, tuple)) or not all(map(is_tensor, group)):
            raise ValueError(f"groups must consist of lists of {tensor}")


def split_evenly(keys: Sequence[K], parts: int) -> list[list[K]]:
    """As `split_list`, without the empty lists."""
    return [chunk for chunk in split_list(keys, parts) if chunk]


def buckets_of(keys: Iterable[K], groups: Sequence[Sequence[K]]) -> list[list[K]]:
    """`groups`, and every key that is in none of them alone, in the order of `keys`.

    Raises `ValueError` for a key that is in two groups, or twice in one.
    """
    bucket_of: dict[K, list[K]] = {}
    for group in groups:
        bucket = list(group)
        for key in bucket:
            if key in bucket_of or bucket.count(key) > 1:
                raise ValueError(f"the parameter {key} appears more than once in groups")
            bucket_of[key] = bucket
    buckets = [bucket_of.get(key, [key]) for key in keys]
    return list({id(bucket): bucket for bucket in buckets}.values())


class BucketSchedule(Generic[K]):
    """Counts backward passes: a bucket is due when each of its gradients is complete.

    Every key is in one of the `buckets`, which all ranks have alike and in the same order.
    """

    def __init__(self, buckets: Iterable[Sequence[K]], passes: int) -> None:
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {key: bucket for bucket in self._buckets for key in bucket}
        self.passes = passes  # backward passes between two steps
        self._done: dict[K, int] = {}  # passes since the last step
        self._sent: set[K] = set()

    def rearrange(self, buckets: Iterable[Sequence[K]]) -> None:
        """Between two steps: gradients travel in `buckets` from now on; all others as before."""
        moved = [list(bucket) for bucket in buckets]
        taken = {key for bucket in moved for key in bucket}
        alone = [[key] for key in self._bucket_of if key not in taken]
        self._buckets = moved + alone
        self._bucket_of = {key: bucket for bucket in self._buckets for key in bucket}

    def add(self, key: K) -> None:
        """One more parameter, alone in its bucket."""
        self._bucket_of[key] = [key]
        self._buckets.append(self._bucket_of[key])

    def count(self, key: K) -> Sequence[K]:
        """A backward pass has added to the gradient of `key`; the bucket that is now due, or ().

        Raises `AssertionError` when there were more passes than were announced.
        """
        done = self._done.get(key, 0) + 1
        if done > self.passes or key in self._sent:
            raise AssertionError(
                f"Gradients of {key} were computed more than backward_passes_per_step "
                f"({self.passes}) times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally"
            )
        self._done[key] = done
        bucket = self._bucket_of[key]
        if any(self._done.get(each, 0) < self.passes for each in bucket):
            return ()
        self._sent.update(bucket)
        return bucket

    def rest(self, keys: Collection[K]) -> list[list[K]]:
        """What is still to be sent of `keys`, bucket by bucket; counts as sent from now on."""
        wanted = set(keys) - self._sent
        self._sent |= wanted
        rest = [[key for key in bucket if key in wanted] for bucket in self._buckets]
        return [bucket for bucket in rest if bucket]

    def reset(self, passes: int | None = None) -> None:
        """A step was made: count from the beginning, from now on up to `passes`."""
        self._done.clear()
        self._sent.clear()
        self.passes = self.passes if passes is None else passes
