"""Distributed optimizers of optax, and functions that return reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import optax

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.arguments import explain_arguments
from hvdlite.common.gradients.buckets import ReductionConfig, resolve_groups, scaling
from hvdlite.common.plain.compression import AnyCompressor, FeedbackCompressor
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.segmentation.parsing import resolve
from hvdlite.common.segmentation.strategies import Strategy
from hvdlite.jax.compression import Compression
from hvdlite.jax.gradients import Reducer


class Transformation(optax.GradientTransformationExtraArgs):
    """A transformation that reduces gradients, with what their compression has not sent."""

    _reducer: Reducer

    @classmethod
    def of(cls, inner: Any, reducer: Reducer) -> Transformation:
        """Return the transformation `inner`, whose gradients `reducer` reduces."""
        made = cls(inner.init, inner.update)
        made._reducer = reducer
        return made

    def compression_state(self) -> dict[str, Any]:
        """Return what compression remembers, when all programs have ended that were started.

        It has numpy arrays, and is empty where the compression remembers nothing.
        """
        jax.effects_barrier()
        return self._reducer.compression_state()

    def load_compression_state(self, saved: Mapping[str, Any]) -> None:
        """Take what `compression_state` has returned on this rank of as many, or elsewhere.

        From another rank, or of another number of ranks, only what all ranks share is taken. A
        state of another compressor is ignored with a warning.
        """
        jax.effects_barrier()
        self._reducer.load_compression_state(saved)


@explain_arguments
def DistributedOptimizer(  # noqa: N802
    optimizer: optax.GradientTransformation,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[str]] | None = None,
    process_set: ProcessSet = global_process_set,
    segmentation: str | Strategy | None = None,
    **fusion: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer behind a reduction of the gradients over all ranks.

    ``update`` reduces them, in one exchange in which each starts as soon as it is computed, and
    hands them to `optimizer`. It can be compiled: every rank calls it as often as the others, with
    gradients of the same shapes and dtypes. They are known by their paths in the pytree.

    - `optimizer`: any transformation of optax.
    - `backward_passes_per_step`: so many updates add up their gradients, of which the last reduces
      them; the others change nothing. With `average_aggregated_gradients` their mean is reduced.
    - `op`: Average, Sum, Min, Max, Product or Adasum.
    - `groups`: how many groups, or lists of paths as `jax.tree_util.keystr` spells them: gradients
      that are reduced together.
    (what hvdlite.common.gradients.arguments tells of all others)

    Raises `ValueError` for arguments that contradict each other.
    """
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}"
        )
    reduction = ReductionConfig(
        compression, scaling(op, gradient_predivide_factor), False, process_set,
        resolve(segmentation, **fusion),
    )  # fmt: skip
    reducer = Reducer("DistributedOptimizer", reduction, resolve_groups(0, groups))
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        stepped: tuple[Any, Any] = inner.update(
            reducer.reduce_tree(updates), state, params, **extra
        )
        return stepped

    distributed = Transformation.of(
        optax.GradientTransformationExtraArgs(inner.init, update), reducer
    )
    if backward_passes_per_step == 1:
        return distributed
    passes = optax.MultiSteps(
        distributed, backward_passes_per_step, use_grad_mean=average_aggregated_gradients
    )
    return Transformation.of(passes, reducer)


@explain_arguments
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    compression: AnyCompressor = Compression.none,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[str]] | None = None,
    process_set: ProcessSet = global_process_set,
    segmentation: str | Strategy | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function as `jax.value_and_grad` does, whose gradients are those of all ranks.

    The value is this rank's. `options` are further ones of `jax.value_and_grad`.

    - `op`: Average, Sum, Min, Max, Product or Adasum.
    - `groups`: as of `DistributedOptimizer`.
    (what hvdlite.common.gradients.arguments tells of all others)

    Raises `ValueError` for arguments that contradict each other, and for compression that remembers
    what it has not sent: that belongs to an optimizer.
    """
    if isinstance(compression, FeedbackCompressor):
        raise ValueError(
            f"Compression.{compression} remembers what it has not sent: give it to a "
            "DistributedOptimizer"
        )
    reduction = ReductionConfig(
        compression, scaling(op, gradient_predivide_factor), False, process_set,
        resolve(segmentation),
    )  # fmt: skip
    reducer = Reducer("grad", reduction, resolve_groups(0, groups))
    computed = jax.value_and_grad(fun, argnums, has_aux, **options)

    @wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = computed(*args, **kwargs)
        return value, reducer.reduce_tree(gradients)

    return reduced


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function as `jax.grad` does, whose gradients are those of all ranks.

    `options` are those of `value_and_grad`, and raise what it raises.
    """
    computed = value_and_grad(fun, argnums, has_aux, **options)

    @wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, gradients = computed(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return reduced
