"""Buckets: gradients that an optimizer hands over together, the same for every framework.

Parameters are identified by a key, which can be anything hashable. This module never sends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.lists import split_list
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.base.warn import warn_user
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.basics import size
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.segmentation.strategies import Strategy, Threshold
from hvdlite.common.tensors.compression import AnyCompressor, FeedbackCompressor, label_of

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Scaling:
    """The reduce op of gradients, and the factors before and after the reduction."""

    op: ReduceOp = ReduceOp.AVERAGE
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0


def scaling(op: int, gradient_predivide_factor: float) -> Scaling:
    """Return the scaling of `op`; with a factor f, Average divides by f before the sum.

    The rest of the division by the number of ranks follows after the sum. Raises `ValueError` for a
    factor with another op, and for one that is not positive.
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
    """The reduction of one optimizer's gradients, as the user has configured it."""

    compression: AnyCompressor
    scaling: Scaling
    sparse_as_dense: bool
    process_set: ProcessSet
    # None: the strategy that was chosen for the process set, by calls or by settings.
    segmentation: Strategy | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.compression, "compress") and callable(self.compression):
            name = getattr(self.compression, "__name__", self.compression)
            raise ValueError(
                f"compression=Compression.{name} makes compressors: give one, such as "
                f"Compression.{name}({'4' if name == 'powersgd' else ''})"
            )
        strategy = self.segmentation
        if strategy is not None and strategy != Threshold() and not self.fusable:
            raise ValueError(
                f"segmentation {strategy.spec}: only Average and Sum can be reduced in segments, "
                f"not {self.scaling.op.name.capitalize()}"
            )
        if isinstance(self.compression, FeedbackCompressor) and not self.fusable:
            raise ValueError(
                f"Compression.{self.compression}: op must be Average or Sum, not "
                f"{self.scaling.op.name.capitalize()}"
            )

    @property
    def compression_label(self) -> str:
        """The compressor in words, which all ranks must have alike."""
        return f"compression={label_of(self.compression)}"

    @property
    def fusable(self) -> bool:
        """Whether the op allows gradients to be reduced in segments."""
        return self.scaling.op in (ReduceOp.AVERAGE, ReduceOp.SUM)

    @property
    def options(self) -> CallOptions:
        """The options of each gradient's allreduce."""
        return CallOptions(
            self.process_set,
            self.scaling.op,
            prescale_factor=self.scaling.prescale_factor,
            postscale_factor=self.scaling.postscale_factor,
        )

    @property
    def active(self) -> bool:
        """Whether gradients are reduced with other ranks. Raises `ValueError` before `init`.

        They are so in an elastic job of one rank, too: what is traced or hooked now has to reduce
        when other ranks have come.
        """
        return (size() > 1 or worlds.elastic()) and bool(self.process_set.included())


def check_passes(backward_passes_per_step: int) -> int:
    """Return the number. Raises `ValueError` unless it is whole and positive."""
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {backward_passes_per_step}")
    if backward_passes_per_step % 1:
        raise ValueError(
            f"backward_passes_per_step must be a whole number, not {backward_passes_per_step}"
        )
    return int(backward_passes_per_step)


def check_names(names: Sequence[str]) -> None:
    """Raise `ValueError` for names that occur twice."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(duplicates)}"
        )


def resolve_groups(num_groups: int, groups: Any) -> Any:
    """Return `groups`, or the deprecated `num_groups` in its place."""
    if num_groups == 0:
        return groups
    warn_user("num_groups is deprecated; use groups", DeprecationWarning)
    return num_groups if groups is None else groups


def check_groups(groups: object, is_tensor: Callable[[Any], bool], tensor: str) -> None:
    """Raise `ValueError` unless it is None, a positive number, or a list of lists of tensors.

    `is_tensor` recognizes a tensor of the framework, whose word for it is `tensor`.
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
    """Split as `split_list` does, and leave out empty lists."""
    return [chunk for chunk in split_list(keys, parts) if chunk]


def buckets_of(keys: Iterable[K], groups: Sequence[Sequence[K]]) -> list[list[K]]:
    """Return `groups`, and one bucket for each other key, in the order of `keys`.

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
    """The counts of backward passes: a bucket is due when each of its gradients is complete.

    Every key is in one of the `buckets`, which are the same on all ranks, in the same order.
    """

    def __init__(self, buckets: Iterable[Sequence[K]], passes: int) -> None:
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {key: bucket for bucket in self._buckets for key in bucket}
        self.passes = passes  # the backward passes between two steps
        self._passes_of: dict[K, int] = {}  # the passes of each gradient since the last step
        self._sent: set[K] = set()  # the gradients whose buckets were due since the last step

    def rearrange(self, buckets: Iterable[Sequence[K]]) -> None:
        """Use these buckets from now on, and one for each other key. Call it between two steps."""
        new_buckets = [list(bucket) for bucket in buckets]
        keys = {key for bucket in new_buckets for key in bucket}
        alone = [[key] for key in self._bucket_of if key not in keys]
        self._buckets = new_buckets + alone
        self._bucket_of = {key: bucket for bucket in self._buckets for key in bucket}

    def add(self, key: K) -> None:
        self._bucket_of[key] = [key]
        self._buckets.append(self._bucket_of[key])

    def count(self, key: K) -> Sequence[K]:
        """Count a pass that has added to the gradient of `key`; return the due bucket, or ().

        Raises `AssertionError` for more passes than `passes` before a step.
        """
        passes = self._passes_of.get(key, 0) + 1
        if passes > self.passes or key in self._sent:
            raise AssertionError(
                f"Gradients of {key} were computed more than backward_passes_per_step "
                f"({self.passes}) times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally; those that are to be "
                "thrown away, as of a GAN's other network, are best not computed"
            )
        self._passes_of[key] = passes
        bucket = self._bucket_of[key]
        if passes < self.passes:
            return ()
        if len(bucket) > 1 and any(self._passes_of.get(k, 0) < self.passes for k in bucket):
            return ()
        self._sent.update(bucket)
        return bucket

    def is_last(self, keys: int) -> bool:
        """Return whether all buckets were due since the last step, which hold so many keys."""
        return len(self._sent) == keys

    def rest(self, keys: Collection[K]) -> list[list[K]]:
        """Return those of `keys` that are not sent yet, by buckets, and count them as sent."""
        if self._sent.issuperset(keys):
            return []
        unsent = set(keys) - self._sent
        self._sent |= unsent
        rest = [[key for key in bucket if key in unsent] for bucket in self._buckets]
        return [bucket for bucket in rest if bucket]

    def reset(self, passes: int | None = None) -> None:
        """Count from the beginning, since a step was made; with `passes`, up to this number."""
        self._passes_of.clear()
        self._sent.clear()
        self.passes = self.passes if passes is None else passes


# Batches: gradients that are reduced on their own, and handed to the engine together.


# See [Note: why gradients gather twice] in torch/optimizer/gradient_exchange.py.
ENOUGH_BYTES = 4 << 20
CROWDED = 4  # times as much where the ranks of a host leave no core to the engine
# Each call of an accelerator's library has to be launched, and to find all ranks, which takes what
# some MiB take. DistributedDataParallel of PyTorch has buckets of this size, too.
ENOUGH_BYTES_ON_DEVICES = 25 << 20


def enough_bytes(topology: Topology, threads: int, cores: int, *, on_device: bool = False) -> int:
    """Return how many bytes of gradients are sent together, at least, before backward ends.

    Each rank computes with `threads`, on a host of `cores`; gradients lie in host memory, or
    `on_device`. Ranks need not agree on it.
    """
    if on_device:
        return ENOUGH_BYTES_ON_DEVICES
    return CROWDED * ENOUGH_BYTES if topology.fills(cores, threads) else ENOUGH_BYTES


def single_and_grouped(
    names: Sequence[str], groups: Sequence[Sequence[str]], *, segmented: bool
) -> tuple[list[str], list[list[str]]]:
    """Return the gradients that are reduced on their own, and the buckets of the others.

    `groups` may name gradients that this step does not have. Where the gradients are `segmented`
    each of those that are in no segment is a bucket too, which is sent as soon as it is ready.
    """
    known = set(names)
    present = [[name for name in group if name in known] for group in groups]
    buckets = buckets_of(names, present)
    if segmented:
        return [], buckets
    grouped = {name for group in present for name in group}
    single = [name for name in names if name not in grouped]
    return single, [bucket for bucket in buckets if bucket[0] in grouped]


def batches_of(
    names: Sequence[str], sizes: Mapping[str, int], topology: Topology, threads: int
) -> list[list[str]]:
    """Divide gradients, in the order in which they become ready, where enough bytes are together.

    `sizes` are in bytes. Each rank computes with so many `threads`; 0 is one for each core.
    """
    cores = len(os.sched_getaffinity(0))
    enough = enough_bytes(topology, threads or cores, cores)
    batches: list[list[str]] = []
    gathered = enough
    for name in names:
        if gathered >= enough:
            batches.append([])
            gathered = 0
        batches[-1].append(name)
        gathered += sizes[name]
    return batches
