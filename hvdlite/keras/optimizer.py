"""`DistributedOptimizer` for the optimizers of Keras 3 and of Keras 2."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.arguments import explain_arguments
from hvdlite.common.gradients.buckets import ReductionConfig, check_passes, resolve_groups, scaling
from hvdlite.common.runtime.basics import size
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.segmentation.parsing import resolve
from hvdlite.common.segmentation.strategies import Strategy
from hvdlite.common.tensors.compression import AnyCompressor, NoneCompressor
from hvdlite.keras.framework import backend_of, keras
from hvdlite.keras.gradient_exchange import Settings
from hvdlite.keras.keras_patches import patch_keras
from hvdlite.keras.optimizer_families import check_shardable, kind_of, parts_of
from hvdlite.keras.subclass import Distributed, check_local, distribute, make_exchange


@explain_arguments
def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    segmentation: str | Strategy | None = None,
    shard_state: bool = False,
    **fusion: Any,
) -> Any:
    """Make the optimizer reduce gradients over all ranks before it applies them, and return it.

    It is the same object, with its variables and its state; only its class is another one, derived
    from its own. Wrap an optimizer before ``model.compile()``. Gradients are clipped, accumulated
    by Keras and checked for overflow after the reduction, hence alike on all ranks. What Keras
    saves of it names the original class: a saved model can be loaded without hvdlite, and has a
    plain optimizer then; `load_model` wraps it again.

    - `optimizer`: an optimizer of Keras 3 (with JAX, TensorFlow or PyTorch as backend) or of Keras
      2. A LossScaleOptimizer may be around it, inside it, or come from ``compile()``.
    - `name`: begins the names of all its reductions.
    - `sparse_as_dense`: sparse gradients are sent as dense ones, otherwise by their rows; with JAX
      they are a `TypeError` then.
    - `op`: Average or Sum.
    - `backward_passes_per_step`: how many backward passes accumulate, as a sum, before gradients
      are sent; `average_aggregated_gradients` divides the sum by that number. ``iterations`` counts
      passes.
    - `shard_state`: each rank has a part of the optimizer's state, and steps over it: Keras 3, with
      an optimizer that treats each element on its own, and is not built yet. It gets the methods
      ``consolidate()`` and ``adopt(plain)``.
    (what hvdlite.common.gradients.arguments tells of all others)

    `device_dense` and `device_sparse` have no effect. Raises `ValueError` for arguments that
    contradict each other and before `init`, and `NotImplementedError` for another backend of Keras.
    """
    return PartialDistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        resolve_groups(num_groups, groups),
        process_set,
        None,
        scale_local_gradients,
        resolve(segmentation, **fusion),
        shard_state,
    )


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    segmentation: str | Strategy | None = None,
    shard_state: bool = False,
    **fusion: Any,
) -> Any:
    """Wrap as `DistributedOptimizer` does, with weights of `local_layers` that each rank has alone.

    `local_layers` is a Keras layer, or a list of them; they need not be built yet. Raises
    `ValueError` for anything else, and for an optimizer that clips by a norm of all gradients.
    """
    kind = kind_of(optimizer)
    _check(optimizer, op, backward_passes_per_step)
    if local_layers is not None:
        check_local(optimizer)
    settings = Settings(
        backend_of(kind.module),
        name or f"Distributed{type(optimizer).__name__}",
        ReductionConfig(
            compression,
            scaling(op, gradient_predivide_factor),
            sparse_as_dense,
            process_set,
            resolve(segmentation, **fusion),
        ),
        groups,
        backward_passes_per_step,
        average_aggregated_gradients,
        scale_local_gradients,
        local_layers,
        shard_state,
    )
    size()  # Raises ValueError before init.
    if shard_state:
        check_shardable(optimizer, kind, settings)
    exchange = make_exchange(settings)
    patch_keras(kind)
    distribute(optimizer, kind, exchange)
    return optimizer


def _check(optimizer: Any, op: int, passes: int) -> None:
    for part in parts_of(optimizer):
        if isinstance(part, Distributed):
            raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
        if passes > 1 and getattr(part, "gradient_accumulation_steps", None):
            raise ValueError(
                "backward_passes_per_step and gradient_accumulation_steps of Keras both accumulate "
                "gradients: use one of them"
            )
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError("op of a Keras optimizer must be Average or Sum")
    check_passes(passes)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: AnyCompressor = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that was saved with ``model.save()``, ready to go on training on all ranks.

    Its optimizer gets the state that was saved with it, and is distributed; with `compression`,
    and otherwise as `DistributedOptimizer` makes it. A model that was saved without an optimizer
    has none.

    - `filepath`: in any format that Keras loads; every rank reads it.
    - `custom_optimizers`: classes of optimizers that are not part of Keras.
    - `custom_objects`: other classes and functions that the model was made with, by name.

    `legacy_opts` has no effect: optimizers of all kinds are wrapped. Raises as Keras does for what
    it cannot load.
    """
    classes = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not any(
        isinstance(part, Distributed) for part in parts_of(optimizer)
    ):
        DistributedOptimizer(optimizer, compression=compression)
    return model
