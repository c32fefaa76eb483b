"""The exchange of ``shard_state=True`` around a transformation of optax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hvdlite.common.base.lists import split_by_bytes
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import ENOUGH_BYTES, ReductionConfig
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.jax import mpi_ops
from hvdlite.jax.compression import Compression
from hvdlite.jax.sharded_state import elementwise
from hvdlite.jax.sharded_state.shards import Cut, Shard, is_shard

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
CutOf: TypeAlias = Callable[[tuple[int, ...]], Cut]
_NEED = (
    "shard_state=True updates a part of each parameter, so that it needs a transformation that "
    "treats each element on its own, as sgd, adam and adamw do; those that look at norms, shapes "
    "or several elements (clip_by_global_norm, lamb, lars, adafactor, a mask by ndim ...) do not. "
    "Leave shard_state out"
)
_SHAPES = {"kernel": (3, 4), "bias": (5,), "scale": (2, 2, 2)}
_MEMBERS = 2  # among whom a trial cuts


def sharded(optimizer: Optimizer, reduction: ReductionConfig) -> Optimizer:
    """Return the optimizer with a state of which each rank has a part.

    Raises `ValueError` where its update, or the reduction, cannot be cut.
    """
    _check_reduction(reduction)
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in _SHAPES.items()}
    try:
        differs = _differs(optimizer, shapes)
    except Exception:
        differs = False  # It may be for parameters of other names: `init` knows these.
    if differs:
        raise ValueError(f"an update of parts gives other values than one of the whole: {_NEED}")

    cut_of = partial(Cut.of, process_set=reduction.process_set)

    def init(params: Any) -> Any:
        if not reduction.active:
            return optimizer.init(params)
        _check_elementwise(optimizer, params, cut_of)
        return optimizer.init(_cut(params, cut_of))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not reduction.active:
            stepped: tuple[Any, Any] = optimizer.update(updates, state, params, **extra)
            return stepped
        _check_state(optimizer, state, updates, cut_of)
        own = None if params is None else _cut(params, cut_of)
        shards = _reduced(updates, reduction)
        changes, following = optimizer.update(shards, state, own, **extra)
        return _gathered(changes, reduction.process_set), following

    return Optimizer(init, update)


def _cut(tree: Any, cut_of: CutOf) -> Any:
    """Return a rank's parts of the arrays of a pytree, as `cut_of` cuts their shapes."""

    def one(leaf: Any) -> Shard:
        array = jnp.asarray(leaf)
        cut = cut_of(array.shape)
        return Shard(cut.own(array), cut)

    return jax.tree_util.tree_map(one, tree)


# -- the exchange


def _in_groups(
    leaves: Sequence[tuple[Any, Any]],
    collective: Callable[[Sequence[Any], str], Sequence[Any]],
    what: str,
) -> list[Any]:
    """Return what a collective makes of arrays, which have their paths, in groups of some MiB.

    Groups are the same on all ranks. The last gradients are the first that backward computes.
    """
    found: list[Any] = []
    for group in split_by_bytes(
        leaves[::-1], lambda leaf: int(leaf[1].size) * int(leaf[1].dtype.itemsize), ENOUGH_BYTES
    ):
        path = jax.tree_util.keystr(group[0][0])
        name = f"DistributedOptimizer.{what}.{path}"
        found += collective([array for _, array in group], name)
    return found[::-1]


def _reduced(gradients: Any, reduction: ReductionConfig) -> Any:
    """Return this rank's parts of the reduced gradients."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
    arrays = [(path, jnp.asarray(leaf)) for path, leaf in leaves]
    cuts = [Cut.of(array.shape, reduction.process_set) for _, array in arrays]
    rows = [(path, cut.in_a_row(each)) for (path, each), cut in zip(arrays, cuts, strict=True)]

    def reducescatter(group: Sequence[Any], name: str) -> Sequence[Any]:
        scaling = reduction.scaling
        return mpi_ops.grouped_reducescatter(
            group, name, reduction.compression, scaling.op, reduction.process_set,  # type: ignore[arg-type]
            scaling.prescale_factor, scaling.postscale_factor,
        )  # fmt: skip

    parts = _in_groups(rows, reducescatter, "gradients")
    return structure.unflatten([*map(Shard, parts, cuts)])


def _gathered(updates: Any, process_set: ProcessSet) -> Any:
    """Return the whole updates from the parts of all ranks."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_shard)

    def allgather(group: Sequence[Any], name: str) -> Sequence[Any]:
        return mpi_ops.grouped_allgather(group, name, process_set)

    rows = _in_groups([(path, leaf.values) for path, leaf in leaves], allgather, "updates")
    return structure.unflatten(
        [leaf.cut.whole(row) for (_, leaf), row in zip(leaves, rows, strict=True)]
    )


# -- what is refused


def _check_reduction(reduction: ReductionConfig) -> None:
    op, compression = reduction.scaling.op, reduction.compression
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"shard_state=True: op must be Average or Sum, not {op.name.capitalize()}")
    if compression not in (Compression.none, Compression.fp16, Compression.bf16):
        raise ValueError(
            f"shard_state=True: {compression} compresses gradient by gradient, and each rank gets "
            "a part of them: use Compression.none, fp16 or bf16"
        )
    if reduction.segmentation is not None:
        raise ValueError("shard_state=True: a segmentation has no place where gradients are cut")


def _check_state(optimizer: Optimizer, state: Any, gradients: Any, cut_of: CutOf) -> None:
    """Raise `RuntimeError` for a state of other ranks, and `ValueError` for one that is whole."""
    for leaf in jax.tree_util.tree_leaves(state, is_leaf=is_shard):
        if is_shard(leaf):
            leaf.cut.check()
            return
    own = jax.eval_shape(lambda each: optimizer.init(_cut(each, cut_of)), gradients)
    if any(map(is_shard, jax.tree_util.tree_leaves(own, is_leaf=is_shard))):
        raise ValueError(
            "shard_state=True: the state is whole, and each rank needs its part: take that of this "
            "optimizer's init(params), or adopt(state, params)"
        )


def _check_elementwise(optimizer: Optimizer, params: Any, cut_of: CutOf) -> None:
    """Raise `ValueError` if parts of the state cannot make up the state of these parameters.

    Shapes are compared, and the values of a few updates of small parameters of the same names.
    """
    outlines = jax.tree_util.tree_map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params
    )
    whole = jax.eval_shape(optimizer.init, outlines)
    parts = jax.eval_shape(lambda each: optimizer.init(_cut(each, cut_of)), outlines)
    shapes = jax.tree_util.tree_map(_shape_of_whole, parts, is_leaf=is_shard)
    wanted = jax.tree_util.tree_map(lambda leaf: str((leaf.shape, leaf.dtype)), whole)
    if jax.tree_util.tree_flatten(shapes) != jax.tree_util.tree_flatten(wanted):
        raise ValueError(f"the state has arrays that do not follow the parameters: {_NEED}")
    try:
        with jax.ensure_compile_time_eval():
            differs = _differs(optimizer, outlines)
    except Exception as error:
        raise ValueError(
            f"an update of parts raises {type(error).__name__}: {error}: {_NEED}"
        ) from error
    if differs:
        raise ValueError(f"an update of parts gives other values than one of the whole: {_NEED}")


def _shape_of_whole(leaf: Any) -> str:
    if not is_shard(leaf):
        return str((leaf.shape, leaf.dtype))
    return str((leaf.cut.shape if leaf.is_cut else leaf.values.shape, leaf.values.dtype))


def _differs(optimizer: Optimizer, outlines: Any) -> bool:
    """Return whether two ranks, with a part each, come to something else than one does alone."""

    def cut(tree: Any) -> list[Any]:
        cut_of = partial(Cut, members=_MEMBERS, process_set=global_process_set)
        return [_cut(tree, partial(cut_of, position=rank)) for rank in range(_MEMBERS)]

    small = jax.tree_util.tree_map(
        lambda each: jax.ShapeDtypeStruct(
            tuple(min(length, 3) for length in each.shape), each.dtype
        ),
        outlines,
    )
    return elementwise.differs(
        optimizer, elementwise.sample(small, np.random.default_rng(2)), cut, _joined
    )


def _joined(parts: Sequence[Any]) -> list[Any]:
    """Return the arrays of which each rank has a part."""
    of_ranks = [jax.tree_util.tree_leaves(each, is_leaf=is_shard) for each in parts]
    return [
        leaves[0].cut.whole(jnp.concatenate([leaf.values for leaf in leaves]))
        for leaves in zip(*of_ranks, strict=True)
    ]
