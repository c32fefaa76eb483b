"""Distributed optimizers of optax, and functions that return reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.arguments import explain_arguments
from hvdlite.common.gradients.buckets import ReductionConfig, resolve_groups, scaling
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.segmentation.parsing import resolve
from hvdlite.common.segmentation.strategies import Strategy
from hvdlite.common.tensors.compression import AnyCompressor, FeedbackCompressor
from hvdlite.jax.compression import Compression
from hvdlite.jax.gradients import Reducer
from hvdlite.jax.order import wait_for_programs
from hvdlite.jax.sharded_state.optimizer import sharded
from hvdlite.jax.sharded_state.shards import consolidated, is_shard


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
        wait_for_programs()
        return self._reducer.compression_state()

    def load_compression_state(self, saved: Mapping[str, Any]) -> None:
        """Take what `compression_state` has returned on this rank of as many, or elsewhere.

        From another rank, or of another number of ranks, only what all ranks share is taken. A
        state of another compressor is ignored with a warning.
        """
        wait_for_programs()
        self._reducer.load_compression_state(saved)

    def consolidate(self, state: Any) -> Any:
        """Return a state that is divided among ranks as one process would have it; blocks.

        All ranks call it. It fits optimizers without shards, and `adopt` on any number of ranks.
        Raises `RuntimeError` where the ranks have changed since the state was made.
        """
        wait_for_programs()
        return consolidated(state)

    def adopt(self, state: Any, params: Any) -> Any:
        """Return this rank's part of a whole state, of the optimizer for these parameters.

        Without ``shard_state=True`` that is all of it. Raises `ValueError` for another state.
        """
        places, structure = jax.tree_util.tree_flatten(
            jax.eval_shape(self.init, params), is_leaf=is_shard
        )
        found = [
            place.of_whole(jnp.asarray(part)) if is_shard(place) else part
            for place, part in zip(places, structure.flatten_up_to(state), strict=True)
        ]
        return structure.unflatten(found)


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
    shard_state: bool = False,
    **fusion: Any,
) -> Transformation:
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
    - `shard_state`: each rank has a part of the optimizer's state, and steps over it: for
      optimizers that treat each element on its own. See `Transformation.consolidate`.
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
    if shard_state:
        if groups is not None:
            raise ValueError("shard_state=True: groups have no place where gradients are cut")
        exchanging = sharded(inner, reduction)
    else:
        exchanging = _reducing(inner, reducer)
    if backward_passes_per_step > 1:
        exchanging = _in_passes(exchanging, backward_passes_per_step, average_aggregated_gradients)
    return Transformation.of(exchanging, reducer)


def _reducing(
    inner: optax.GradientTransformationExtraArgs, reducer: Reducer
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer behind a reduction of the gradients."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        stepped: tuple[Any, Any] = inner.update(
            reducer.reduce_tree(updates), state, params, **extra
        )
        return stepped

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _in_passes(
    optimizer: optax.GradientTransformationExtraArgs, passes: int, mean: bool
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer behind the sum, or the mean, of the gradients of so many updates.

    Its state is that of `optax.MultiSteps`. That one computes the optimizer's update each time and
    throws it away, which would exchange gradients each time; here it does not run.
    """

    def init(params: Any) -> optax.MultiStepsState:
        # Two arrays of their own, as a program may get both to overwrite.
        mini_step, gradient_step = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        # Zeros with room for many gradients of a parameter: of float32 at least.
        total = jax.tree_util.tree_map(
            lambda leaf: jnp.zeros(
                jnp.shape(leaf), jnp.promote_types(jnp.result_type(leaf), jnp.float32)
            ),
            params,
        )
        return optax.MultiStepsState(mini_step, gradient_step, optimizer.init(params), total)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        total = jax.tree_util.tree_map(
            lambda acc, each: (acc + each).astype(acc.dtype), state.acc_grads, updates
        )
        step = jnp.asarray(state.mini_step) == passes - 1

        def last() -> tuple[Any, Any]:
            divisor = passes if mean else 1
            gradients = jax.tree_util.tree_map(
                lambda each, like: (each / divisor).astype(like.dtype), total, updates
            )
            stepped, inner = optimizer.update(gradients, state.inner_opt_state, params, **extra)
            stepped = jax.tree_util.tree_map(_as, stepped, updates)
            inner = jax.tree_util.tree_map(_as, inner, state.inner_opt_state)
            following = state._replace(
                mini_step=jnp.zeros_like(state.mini_step),
                gradient_step=state.gradient_step + 1,
                inner_opt_state=inner,
                acc_grads=jax.tree_util.tree_map(jnp.zeros_like, total),
            )
            return stepped, following

        def other() -> tuple[Any, Any]:
            zeros = jax.tree_util.tree_map(jnp.zeros_like, updates)
            return zeros, state._replace(mini_step=state.mini_step + 1, acc_grads=total)

        if isinstance(step, jax.core.Tracer):
            found: tuple[Any, Any] = jax.lax.cond(step, last, other)
            return found
        return last() if step else other()

    return optax.GradientTransformationExtraArgs(init, update)


def _as(new: Any, old: Any) -> Any:
    """Return a leaf in the dtype of another: both ways through an update have the same dtypes."""
    array, dtype = jnp.asarray(new), jnp.asarray(old).dtype
    return array if array.dtype == dtype else array.astype(dtype)


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
