"""What a distributed optimizer needs of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.gradients import reducer
from hvdlite.common.gradients.buckets import buckets_of
from hvdlite.common.gradients.variables import Sources
from hvdlite.common.segmentation.strategies import Gradient
from hvdlite.torch import mpi_ops
from hvdlite.torch.autograd import untraced
from hvdlite.torch.dtypes import DTYPE_NAMES
from hvdlite.torch.sparsity import Layouts

__all__ = ["Accumulator", "Reducer", "untraced"]

Gradients = Mapping[str, Any]
Wait = Callable[[], Gradients]


class Reducer(reducer.Reducer):
    """Gradients of this rank in, new tensors with those of all ranks out."""

    sources = Sources(torch.Tensor)
    variable = "keras.Variable"
    _layouts: Layouts | None = None

    @torch.no_grad()
    def send(
        self, gradients: Gradients, sources: Gradients, groups: Sequence[Sequence[str]]
    ) -> Gradients:
        """Zeros stand in for what only other ranks have. Raises `HorovodInternalError`."""
        if self._layouts is None:
            self._layouts = Layouts(self.terms.process_set, next(iter(gradients), ""))
        travelling = {}
        for name in self._layouts.agree(gradients):
            gradient = gradients[name]
            if gradient is None:
                gradient = self._layouts.zeros(name, self.sources.plain(sources[name]))
            if gradient.is_sparse and self.terms.sparse_as_dense:
                gradient = gradient.to_dense()
            travelling[name] = gradient
        return {**dict.fromkeys(gradients), **_land(self._start(travelling, groups))}

    def _start(self, gradients: Gradients, groups: Sequence[Sequence[str]]) -> list[Wait]:
        dense = [name for name, each in gradients.items() if not each.is_sparse]
        known = set(dense)
        buckets = buckets_of(dense, [[name for name in group if name in known] for group in groups])
        waits = [
            self._start_dense({name: gradients[name] for name in bucket}) for bucket in buckets
        ]
        sparse = [(name, each) for name, each in gradients.items() if each.is_sparse]
        return waits + [self._start_sparse(name, each) for name, each in sparse]

    def _start_dense(self, bucket: Gradients) -> Wait:
        compression = self.terms.compression
        packed = [compression.compress(each.detach()) for each in bucket.values()]
        names = list(bucket)
        handle = mpi_ops.forms.start_group(
            [tensor for tensor, _ in packed], names[0], self.segments.options(names)
        )

        def wait() -> Gradients:
            results = mpi_ops.synchronize(handle)
            contexts = [context for _, context in packed]
            return dict(zip(bucket, map(compression.decompress, results, contexts), strict=True))

        return wait

    def _start_sparse(self, name: str, gradient: torch.Tensor) -> Wait:
        terms = self.terms
        wait = mpi_ops.sparse_allreduce_async(gradient, name, terms.scaling.op, terms.process_set)
        return lambda: {name: wait()}

    def describe(self, name: str, gradient: Any, source: Any) -> Gradient | None:
        """See `reducer.Reducer.describe`. What this rank has not, others may have."""
        if gradient is None:
            gradient = self.sources.plain(source)
        if gradient.is_sparse and not self.terms.sparse_as_dense:
            return None
        size_bytes = gradient.numel() * gradient.element_size()
        path = self.sources.path_of(source)
        return Gradient(name, size_bytes, DTYPE_NAMES[gradient.dtype], path)

    def divide(self, gradient: torch.Tensor, divisor: int) -> torch.Tensor:
        """The gradient divided by a number."""
        return gradient / divisor


def _land(waits: Sequence[Wait]) -> dict[str, Any]:
    """What has arrived, when all has ended. Raises the first error."""
    arrived: dict[str, Any] = {}
    errors = []
    for wait in waits:
        try:
            arrived.update(wait())
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return arrived


class Accumulator:
    """Adds up the gradients of several passes."""

    def __init__(self, backward_passes_per_step: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = backward_passes_per_step
        self._divisor = backward_passes_per_step if average else 1
        self._count = 0
        self._sums: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        due: Callable[[list[Any]], Any],
        skip: Callable[[list[Any]], Any],
    ) -> Any:
        """``due(sums)`` in the last pass of a step, and ``skip(sums)`` in all others."""
        keys = [Reducer.sources.key_of(each) for each in variables]
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                before = self._sums.get(key)
                self._sums[key] = gradient.clone() if before is None else before + gradient
        sums = [self._sums.get(key) for key in keys]
        self._count += 1
        if self._count < self._passes:
            return skip(sums)
        self._count = 0
        self._sums.clear()
        return due([None if each is None else each / self._divisor for each in sums])
