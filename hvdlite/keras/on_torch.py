"""The parts of a distributed Keras optimizer that know PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_bucket import ReducedCopies, send_announced
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.elastic.run import is_loss
from hvdlite.common.gradients import reducer
from hvdlite.common.gradients.background_exchange import BackgroundExchange
from hvdlite.common.gradients.buckets import single_and_grouped
from hvdlite.common.gradients.compressed_bucket import Part
from hvdlite.common.gradients.variables import Sources, is_overwritten
from hvdlite.common.gradients.weights_check import WeightsCheck
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.segmentation.strategies import Gradient
from hvdlite.common.tensors.compression import COMPLEX
from hvdlite.torch import mpi_ops
from hvdlite.torch.autograd import untraced
from hvdlite.torch.dtypes import DTYPE_NAMES
from hvdlite.torch.optimizer.sparsity import Layouts
from hvdlite.torch.weights import of_tensor

__all__ = ["Accumulator", "Reducer", "compare_variables", "is_loss", "untraced"]

Gradients = Mapping[str, Any]
Wait = Callable[[], Gradients]


class Reducer(reducer.Reducer):
    """Reduces gradients of this rank to new tensors."""

    sources = Sources(torch.Tensor)
    variable = "keras.Variable"
    _layouts: Layouts | None = None
    # The era of the ranks that have agreed on layouts.
    _era: object = None

    @torch.no_grad()
    def send(
        self, gradients: Gradients, sources: Gradients, groups: Sequence[Sequence[str]]
    ) -> Gradients:
        """Reduce; a gradient that only other ranks have counts as zeros here.

        Raises `HorovodInternalError`.
        """
        if self._layouts is None:
            self._layouts = Layouts(self.reduction, next(iter(gradients), ""))
        era = for_collective().era(self.reduction.process_set)
        if era is not self._era:
            self._layouts.ask_again()  # A newcomer of an elastic job knows no layout yet.
            self._era = era
        to_reduce = {}
        for name in self._layouts.agree(gradients):
            gradient = gradients[name]
            if gradient is None:
                gradient = self._layouts.zeros(name, self.sources.plain(sources[name]))
            if gradient.is_sparse and self.reduction.sparse_as_dense:
                gradient = gradient.to_dense()
            to_reduce[name] = gradient
        try:
            return {**dict.fromkeys(gradients), **_wait_for_all(self._start(to_reduce, groups))}
        except BaseException:  # A KeyboardInterrupt: the other ranks need what was started.
            send_announced(for_collective())
            raise

    def _start(self, gradients: Gradients, groups: Sequence[Sequence[str]]) -> list[Wait]:
        dense = [name for name, gradient in gradients.items() if not gradient.is_sparse]
        sparse = [(name, gradient) for name, gradient in gradients.items() if gradient.is_sparse]
        segments, feedback = self.segments, self.feedback
        if feedback is not None:
            _, buckets = single_and_grouped(dense, groups, segmented=True)
            started = [
                self._start_compressed({name: gradients[name] for name in names}, feedback)
                for names in buckets
            ]
            return started + [self._start_sparse(name, gradient) for name, gradient in sparse]
        single, buckets = single_and_grouped(dense, groups, segmented=segments.strategy is not None)
        parts = [(bucket, segments.options(bucket)) for bucket in buckets]
        if single:
            parts.append((single, segments.options(single[:1])))
        alone = len(parts) == 1 and not sparse
        waits = [
            self._start_dense({name: gradients[name] for name in names}, options, alone)
            for names, options in parts
        ]
        return waits + [self._start_sparse(name, gradient) for name, gradient in sparse]

    def _start_compressed(self, bucket: Gradients, feedback: BackgroundExchange) -> Wait:
        if any(each.is_complex() for each in bucket.values()):
            raise ValueError(COMPLEX)
        copies = [
            each.detach().to("cpu", torch.float32, copy=True).contiguous()
            for each in bucket.values()
        ]
        parts = [
            Part(name, copy.view(-1).numpy(), tuple(copy.shape))
            for name, copy in zip(bucket, copies, strict=True)
        ]
        # Layouts have asked already which compressor the others have.
        first = f"compression.{parts[0].name}", (), "float32"
        handle = feedback.submit(parts, for_collective(), first)

        def wait() -> Gradients:
            handle.wait()
            return {
                name: copy.to(gradient.device, gradient.dtype)
                for (name, gradient), copy in zip(bucket.items(), copies, strict=True)
            }

        return wait

    def _start_dense(self, bucket: Gradients, options: CallOptions, alone: bool) -> Wait:
        compression = self.reduction.compression
        packed = [compression.compress(gradient.detach()) for gradient in bucket.values()]
        tensors = [tensor for tensor, _ in packed]
        reduction = ReducedCopies(
            for_collective(), mpi_ops.runner.adapter, list(bucket), tensors, options,
            lambda reduced: [tensor.clone() for tensor in reduced],
            nbytes=sum(tensor.nbytes for tensor in tensors), alone=alone,
        )  # fmt: skip

        def wait() -> Gradients:
            results = reduction.wait()
            contexts = [context for _, context in packed]
            return dict(zip(bucket, map(compression.decompress, results, contexts), strict=True))

        return wait

    def _start_sparse(self, name: str, gradient: torch.Tensor) -> Wait:
        reduction = self.reduction
        wait = mpi_ops.sparse_allreduce_async(
            gradient, name, reduction.scaling.op, reduction.process_set
        )
        return lambda: {name: wait()}

    def describe(self, name: str, gradient: Any, source: Any) -> Gradient | None:
        """Describe a gradient, also one that only other ranks have."""
        if gradient is None:
            gradient = self.sources.plain(source)
        if gradient.is_sparse and not self.reduction.sparse_as_dense:
            return None
        size_bytes = gradient.numel() * gradient.element_size()
        path = self.sources.path_of(source)
        return Gradient(name, size_bytes, DTYPE_NAMES[gradient.dtype], path)


def compare_variables(check: WeightsCheck, names: Sequence[str], variables: Sequence[Any]) -> None:
    """Count a step, and compare the variables where it is time to; raises `RuntimeError`."""
    check.step(
        lambda: [
            of_tensor(name, Reducer.sources.plain(variable))
            for name, variable in zip(names, variables, strict=True)
        ]
    )


def _wait_for_all(waits: Sequence[Wait]) -> dict[str, Any]:
    """Return all reduced gradients when all reductions have ended. Raises the first error."""
    reduced: dict[str, Any] = {}
    errors = []
    for wait in waits:
        try:
            reduced.update(wait())
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return reduced


class Accumulator:
    """Sums of the gradients of several passes, or the largest for variables to overwrite."""

    def __init__(self, backward_passes_per_step: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = backward_passes_per_step
        self._divisor = backward_passes_per_step if average else 1
        self._count = 0
        self._sums: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """Begin a step anew."""
        self._count = 0
        self._sums.clear()

    @torch.no_grad()
    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        due: Callable[[list[Any]], Any],
        skip: Callable[[list[Any]], Any],
    ) -> Any:
        """Return ``due(sums)`` in the last pass of a step, and ``skip(sums)`` in all others."""
        keys = [Reducer.sources.key_of(variable) for variable in variables]
        overwritten = [is_overwritten(variable) for variable in variables]
        for key, gradient, largest in zip(keys, gradients, overwritten, strict=True):
            if gradient is not None:
                before = self._sums.get(key)
                if before is None:
                    self._sums[key] = gradient.clone()
                else:
                    add = torch.maximum if largest else torch.add
                    self._sums[key] = add(before, gradient)
        sums = [self._sums.get(key) for key in keys]
        self._count += 1
        if self._count < self._passes:
            return skip(sums)
        self.forget()
        return due(
            [
                total if total is None or largest else total / self._divisor
                for total, largest in zip(sums, overwritten, strict=True)
            ]
        )
