"""What optimizers and tapes of TensorFlow share: the reduction of gradients, and the class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from hvdlite.common.api.options import CallOptions
from hvdlite.common.gradients import reducer
from hvdlite.common.gradients.buckets import ReductionConfig, batches_of
from hvdlite.common.runtime.current import find
from hvdlite.common.segmentation import strategies as segmentation
from hvdlite.common.tensors.compression import AnyCompressor
from hvdlite.tf.calls.bucket_call import BucketCall, CompressedCall
from hvdlite.tf.calls.collective_call import Call, TensorCall
from hvdlite.tf.calls.runner import TensorFlowRunner, name_in_graph, run_calls
from hvdlite.tf.sparse import averaged, dense, gathering
from hvdlite.tf.variables import SOURCES

Gradient = Any  # tf.Tensor | tf.IndexedSlices | None
Outputs = list[list[tf.Tensor]]

_RUNNER = TensorFlowRunner()


class _Part(NamedTuple):
    """Gradients that are reduced together, by their names."""

    names: Sequence[str]
    calls: Sequence[Call]
    receive: Callable[[Outputs], Sequence[Gradient]]  # makes them of what the calls return


def _dense_bucket(
    gradients: Mapping[str, tf.Tensor],
    compression: AnyCompressor,
    options: Callable[[Sequence[str]], CallOptions],
) -> _Part:
    packed = [compression.compress(gradient) for gradient in gradients.values()]
    keys = [_name(name) for name in gradients]

    def receive(outputs: Outputs) -> list[Gradient]:
        return [
            compression.decompress(tensor, context)
            for tensor, (_, context) in zip(outputs[0], packed, strict=True)
        ]

    call = BucketCall([tensor for tensor, _ in packed], keys, options(keys))
    return _Part(list(gradients), [call], receive)


def _slices(name: str, gradient: tf.IndexedSlices, reduction: ReductionConfig) -> _Part:
    """Return a gradient that is `tf.IndexedSlices`: the rows of all ranks are gathered."""
    options = gathering(gradient, CallOptions(reduction.process_set, reduction.scaling.op))
    calls = [
        TensorCall("allgather", [tensor], _name(f"{name}.{part}"), options)
        for tensor, part in ((gradient.values, "values"), (gradient.indices, "indices"))
    ]

    def receive(outputs: Outputs) -> list[Gradient]:
        (values, _), (indices, _) = outputs
        return [tf.IndexedSlices(averaged(values, options), indices, gradient.dense_shape)]

    return _Part([name], calls, receive)


def _reduce(
    reducer: Reducer,
    gradients: Sequence[Gradient],
    names: Sequence[str],
    groups: Sequence[Sequence[str]],
) -> list[Gradient]:
    """Reduce the gradients over all ranks; None stays None.

    `names` identify them across ranks. Those of one of the `groups` (of names) are reduced
    together. All reductions run at the same time: in a graph those of some MiB
    start as soon as their inputs are computed. Raises `tf.errors.OpError` when a reduction fails,
    `NotImplementedError` for `tf.IndexedSlices` with an op other than Average and Sum, and
    `ValueError` for a gradient that is ragged or a `tf.SparseTensor`.
    """
    reduction = reducer.reduction
    if not reduction.active:
        return list(gradients)
    wanted = {
        name: gradient
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None
    }
    slices = [
        _slices(name, gradient, reduction)
        for name, gradient in wanted.items()
        if isinstance(gradient, tf.IndexedSlices) and not reduction.sparse_as_dense
    ]
    apart = {name for gradient in slices for name in gradient.names}
    whole = {
        name: dense(wanted[name], f"the gradient '{name}'") for name in wanted if name not in apart
    }
    results: dict[str, Gradient] = {}

    def forward(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        gradients = dict(zip(whole, tensors, strict=True))
        results.update(_run([*_buckets(reducer, gradients, groups), *slices]))
        return [results[name] for name in whole]

    def adjoint(upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        names = [f"{name}.gradient" for name in whole]
        back = [[f"{name}.gradient" for name in group] for group in groups]
        return _reduce(reducer, upstream, names, back)

    # For gradients of gradients. Those of slices end here, as TensorFlow's own often do.
    recorded = _RUNNER.record(list(whole.values()), forward, adjoint) or forward([])
    results.update(zip(whole, recorded, strict=True))
    return [results.get(name) for name in names]


def _buckets(
    reducer: Reducer, gradients: Mapping[str, tf.Tensor], groups: Sequence[Sequence[str]]
) -> list[_Part]:
    compression, feedback = reducer.reduction.compression, reducer.feedback
    planned = reducer.planned(gradients, groups, partial(_batches, gradients))
    if feedback is None:
        return [
            _dense_bucket({name: gradients[name] for name in names}, compression, options)
            for names, options in planned
        ]
    if not gradients:
        return []
    keys = {name: _name(name) for name in gradients}
    name, tensor = next(iter(gradients.items()))
    shape = tuple(tensor.shape) if tensor.shape.is_fully_defined() else ()
    first = (keys[name], shape, tensor.dtype.name)
    parts = []
    for names, _ in planned:
        tensors, of_bucket = [gradients[name] for name in names], [keys[name] for name in names]
        call = CompressedCall(tensors, of_bucket, feedback, first)
        parts.append(_Part(names, [call], lambda outputs: outputs[0]))
    return parts


def _batches(gradients: Mapping[str, tf.Tensor], names: Sequence[str]) -> list[list[str]]:
    """Divide gradients that are reduced on their own into those that are handed over together."""
    runtime = find()
    if tf.executing_eagerly() or runtime is None:
        return [[*names]] if names else []
    sizes = {
        name: (gradients[name].shape.num_elements() or 0) * gradients[name].dtype.size
        for name in names
    }
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    # Backward computes the gradients of the last layer first.
    return batches_of([*names][::-1], sizes, runtime.topology, threads)


def _run(parts: Sequence[_Part]) -> Iterator[tuple[str, Gradient]]:
    """Run all reductions at the same time, and yield the reduced gradients by their names."""
    calls = [call for part in parts for call in part.calls]
    if len(calls) == 1 and isinstance(calls[0], BucketCall):
        calls[0].alone = True
    outputs = iter(run_calls(calls))
    for part in parts:
        received = part.receive([next(outputs) for _ in part.calls])
        yield from zip(part.names, received, strict=True)


def _name(name: str) -> str:
    # Name scopes tell no gradients apart, and hold numbers that Keras counts per process.
    return name if tf.executing_eagerly() else name_in_graph(name, ignore_name_scope=True)


class Reducer(reducer.Reducer):
    """Reduces gradients of this rank, eagerly and in graphs."""

    sources = SOURCES
    variable = "tf.Variable"

    def send(
        self,
        gradients: Mapping[str, Gradient],
        sources: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
    ) -> Mapping[str, Gradient]:
        """Reduce the gradients. Raises `tf.errors.OpError` when a reduction fails."""
        reduced = _reduce(self, list(gradients.values()), list(gradients), groups)
        return dict(zip(gradients, reduced, strict=True))

    def describe(self, name: str, gradient: Gradient, source: Any) -> segmentation.Gradient | None:
        sparse = isinstance(gradient, tf.IndexedSlices) and not self.reduction.sparse_as_dense
        if gradient is None or sparse:
            return None
        elements = SOURCES.plain(source).shape.num_elements() or 0  # 0: of no known shape
        dtype = gradient.dtype
        path = SOURCES.path_of(source)
        return segmentation.Gradient(name, elements * dtype.size, dtype.name, path)

    def divide_by_size(self, gradient: Gradient) -> Gradient:
        options = CallOptions(self.reduction.process_set)
        if isinstance(gradient, tf.IndexedSlices):
            values = averaged(gradient.values, options)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return averaged(tf.convert_to_tensor(gradient), options)


def wrap(mixin: type, wrapped: Any) -> Any:
    """Return the object as an instance of a new class, derived from `mixin` and its own class.

    Both objects share all attributes. `mixin` has ``__slots__`` for those that the wrapped object
    shall not have, ``_wrapped`` among them.
    """
    base = type(wrapped)
    same = {"__doc__": base.__doc__, "__module__": base.__module__}
    cls: Any = type(base.__name__, (mixin, base), same)
    distributed = object.__new__(cls)
    distributed.__dict__ = wrapped.__dict__
    distributed._wrapped = wrapped
    return distributed
