"""`DistributedGradientTape`: a tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.arguments import explain_arguments
from hvdlite.common.gradients.buckets import ReductionConfig, resolve_groups, scaling
from hvdlite.common.gradients.weights_check import VariablesCheck
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.segmentation.parsing import resolve
from hvdlite.common.segmentation.strategies import Strategy
from hvdlite.common.tensors.compression import Compressor, FeedbackCompressor
from hvdlite.tf.compression import Compression
from hvdlite.tf.errors import unconverted
from hvdlite.tf.optimizer.gradient_exchange import Gradient, Reducer, wrap
from hvdlite.tf.variables import compare_variables

_NO_GRADIENT = tf.UnconnectedGradients.NONE
Pairs = list[tuple[Any, Gradient]]


class _DistributedMixin(tf.GradientTape):
    """Comes before the class of the wrapped tape, and shares all that the wrapped tape records."""

    __slots__ = ("_reducer", "_wrapped")

    _reducer: Reducer
    _wrapped: tf.GradientTape

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = _NO_GRADIENT,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients of `target`, reduced over all ranks, in the structure of `sources`.

        Every rank gives the same sources in the same order, and for each of them a gradient or
        None as the others do. Gradients are named after their variables; only numbered where
        `use_generic_names` is true. Those of local sources stay on this rank.

        The other arguments are those of `tf.GradientTape.gradient`. Raises `tf.errors.OpError` when
        a reduction fails.
        """
        gradients = self._wrapped.gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        names = [f"grad_{index}" for index in range(len(flat))] if use_generic_names else None
        # Those that the step before has made: a tape knows no optimizer.
        VariablesCheck(self._reducer, compare_variables, of_tape=True).step(flat)
        reduced = self._reducer.reduce(tf.nest.flatten(gradients), flat, names)
        return tf.nest.pack_sequence_as(sources, reduced)

    @unconverted
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[Pairs, Pairs]:
        """As `gradient`: ``(source, gradient)`` of the local sources, and of all others."""
        gradients = self.gradient(
            target, sources, output_gradients, use_generic_names=use_generic_names
        )
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, tf.nest.flatten(gradients), strict=True))
        is_local = self._reducer.local.pick(flat)
        local = [pair for pair, own in zip(pairs, is_local, strict=True) if own]
        return local, [pair for pair, own in zip(pairs, is_local, strict=True) if not own]

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of this variable or tensor from now on."""
        self._reducer.local.add(source)

    @unconverted
    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.GradientTape.jacobian`, of this rank alone: nothing is reduced."""
        return self._wrapped.jacobian(*args, **kwargs)

    @unconverted
    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As `tf.GradientTape.batch_jacobian`, of this rank alone: nothing is reduced."""
        return self._wrapped.batch_jacobian(*args, **kwargs)


@unconverted
@explain_arguments
def DistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[tf.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    segmentation: str | Strategy | None = None,
    **fusion: Any,
) -> Any:
    """Return a tape of the same class whose ``gradient()`` reduces over all ranks.

    - `gradtape`: the tape to wrap. Both are one tape: what one records, the other has recorded.
    - `sparse_as_dense`: sparse gradients (`tf.IndexedSlices`) are sent as dense ones, otherwise by
      their rows.
    - `op`: Average, Sum, Min, Max, Product or Adasum.
    (what hvdlite.common.gradients.arguments tells of all others)

    `device_dense` and `device_sparse` have no effect. Raises `ValueError` for arguments that
    contradict each other.
    """
    if isinstance(gradtape, _DistributedMixin):
        raise ValueError("this tape is a DistributedGradientTape already: wrap it once")
    reduction = ReductionConfig(
        compression,
        scaling(op, gradient_predivide_factor),
        sparse_as_dense,
        process_set,
        resolve(segmentation, **fusion),
    )
    if isinstance(compression, FeedbackCompressor):
        raise ValueError(
            f"Compression.{compression} remembers what it has not sent, and a tape lives for one "
            "step: give it to a DistributedOptimizer"
        )
    chosen = resolve_groups(num_groups, groups)
    tape = wrap(_DistributedMixin, gradtape)
    tape._reducer = Reducer("DistributedGradientTape", reduction, chosen, scale_local_gradients)
    return tape


@unconverted
def PartialDistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[tf.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    segmentation: str | Strategy | None = None,
    **fusion: Any,
) -> Any:
    """As `DistributedGradientTape`; the weights of `local_layers` are local sources.

    `local_layers` is a Keras layer, or a list of them; they need not be built yet. Raises
    `ValueError` for anything else.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        segmentation,
        **fusion,
    )
    if local_layers is not None:
        tape._reducer.local.add_layers(local_layers)
    return tape


__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]
