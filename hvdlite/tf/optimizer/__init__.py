"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.arguments import explain_arguments
from hvdlite.common.gradients.buckets import ReductionConfig, check_passes, resolve_groups, scaling
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.segmentation.parsing import resolve
from hvdlite.common.segmentation.strategies import Strategy
from hvdlite.common.tensors.compression import AnyCompressor
from hvdlite.tf.compression import Compression
from hvdlite.tf.optimizer.gradient_exchange import Reducer
from hvdlite.tf.optimizer.v1_optimizer import distributed


@explain_arguments
def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[tf.Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    segmentation: str | Strategy | None = None,
    **fusion: Any,
) -> Any:
    """Return an optimizer of the same class that reduces gradients over all ranks before each step.

    - `optimizer`: one of Keras, for which `hvdlite.keras.DistributedOptimizer` does the work, or of
      `tf.compat.v1.train`; do not use it yourself afterwards. The latter reduces in
      ``compute_gradients()``, and ``apply_gradients()`` refuses gradients that were not reduced.
    - `name`: begins the names of the gradients.
    - `sparse_as_dense`: sparse gradients (`tf.IndexedSlices`) are sent as dense ones, otherwise by
      their rows.
    - `backward_passes_per_step`: how many backward passes accumulate, as a sum, before gradients
      are sent; `average_aggregated_gradients` divides the sum by that number. The sums are in local
      variables, which a session initializes with ``tf.compat.v1.local_variables_initializer()``.
    - `op`: Average, Sum, Min, Max, Product, or Adasum, which combines the steps that the ranks
      would make on their own instead of the gradients. With Keras, Average or Sum.
    (what hvdlite.common.gradients.arguments tells of all others)

    `use_locking`, `device_dense` and `device_sparse` have no effect. Raises `ValueError` for
    arguments that contradict each other.
    """
    chosen = resolve_groups(num_groups, groups)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        # Upwards, and only when asked: who trains without Keras never imports it.
        from hvdlite.keras.optimizer import DistributedOptimizer as KerasDistributedOptimizer

        return KerasDistributedOptimizer(
            optimizer,
            name=name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=chosen,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
            segmentation=segmentation,
            **fusion,
        )
    reduction = ReductionConfig(
        compression,
        scaling(op, gradient_predivide_factor),
        sparse_as_dense,
        process_set,
        resolve(segmentation, **fusion),
    )
    reducer = Reducer(
        name or f"Distributed{type(optimizer).__name__}", reduction, chosen, scale_local_gradients
    )
    passes = check_passes(backward_passes_per_step)
    return distributed(optimizer, reducer, passes, average_aggregated_gradients)


__all__ = ["DistributedOptimizer"]
