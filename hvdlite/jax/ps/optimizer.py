"""`ps.DistributedOptimizer`: gradients are pushed to servers, and weights pulled from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.jax.ps.arrays import check_untraced, stay_on_cpus
from hvdlite.jax.ps.pieces import check_pieces
from hvdlite.jax.ps.updater import OptaxRows, OptaxUpdater, first_state, named, with_numbers
from hvdlite.jax.trees import to_host
from hvdlite.ps import context
from hvdlite.ps.context import new_store, serve
from hvdlite.ps.layouts.blocks import Array, TensorSpec, dtype_of
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import NORMAL, RowsSpec
from hvdlite.ps.tables.updater import Updater
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.table_shards import TableShards, step_together

TABLE = "optimizer"
_REMEDIES = {
    "element": (
        "servers step over flat pieces of many arrays, and need one that treats each element on "
        "its own, as sgd, adam and adamw do. Clip gradients by their norm before step(), leave out "
        "labels and masks, or give partition='tensor', which keeps arrays whole"
    ),
    "tensor": (
        "servers step over each array on its own. Clip gradients by their norm before step(), and "
        "leave out what knows the pytree, as masks and labels do"
    ),
}


def DistributedOptimizer(  # noqa: N802
    optimizer: optax.GradientTransformation,
    params: Any,
    mode: str = "sync",
    staleness: int | None = None,
    partition: str = "element",
    op: int = ReduceOp.AVERAGE,
    scale: str | None = None,
) -> ServedOptimizer:
    """Return an optimizer whose steps are made by the servers.

    A server does not return from here: it serves, and its process ends with the job.

    - `optimizer`: a transformation of optax; its state, and so its schedules, are on the servers.
    - `params`: a pytree of floating-point arrays. Servers begin with those of the first worker,
      which ``optimizer.pull()`` returns in all of them.
    - `mode`: "sync": a step is made of the gradients of all workers; "async": of those of one;
      "ssp": the same, and no worker is more than `staleness` + 1 steps ahead of another.
    - `partition`: "element": arrays are cut; "tensor": they stay whole, for optimizers that look
      at more than one element of an array at a time.
    - `op`: of sync: Average or Sum.
    - `scale`: of async and ssp: "1/W" divides each push by the number of workers that take part.

    Raises `ValueError` for arguments that contradict each other, for an optimizer that needs more
    than the servers have, for arrays that are not floating-point, and inside `jax.jit`.
    """
    options = TableOptions.of(mode, staleness, op, scale, partition)
    leaves = named(params)
    check_untraced(*leaves.values())
    arrays = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {array.dtype}: servers step over floating-point arrays. Give a pytree "
                "of those alone"
            )
    check_pieces(optimizer, params, _REMEDIES[partition], whole=partition == "tensor")
    if context.role() == "server":
        stay_on_cpus()
        serve(lambda described: updater_for(optimizer, described, whole=partition == "tensor"))
    return ServedOptimizer(optimizer, params, arrays, options)


def updater_for(
    optimizer: optax.GradientTransformation, described: TableDescription, *, whole: bool
) -> Updater:
    """Return what a server steps with."""
    if described.rows is not None:
        return OptaxRows(new_store(described), optimizer)
    return OptaxUpdater(optimizer, described, whole=whole)


class ServedOptimizer:
    """The optimizer of a worker: a step pushes gradients, and pulls what servers make of them."""

    def __init__(
        self, optimizer: optax.GradientTransformation, params: Any, arrays: Mapping[str, Any],
        options: TableOptions,
    ) -> None:  # fmt: skip
        context.worker().begin_optimizer()
        self._optimizer, self._options = optimizer, options
        self._structure = jax.tree_util.tree_structure(params)
        self._shardings = [array.sharding for array in arrays.values()]
        self._specs = [
            TensorSpec(name, array.dtype.name, array.shape) for name, array in arrays.items()
        ]
        self._numbers: dict[str, float] = {}
        first = [np.array(to_host(array)).reshape(-1) for array in arrays.values()]
        self._table = context.worker().declare(TABLE, self._specs, options, lambda: first)
        self._table.on_load = self._take_loaded
        self._tables: list[TableShards] = [self._table]
        self._is_current = False  # Whether the user has the weights that lie on the servers.

    def _take_loaded(self) -> None:
        self.pull()
        self._is_current = False

    @property
    def finished_steps(self) -> int:
        """The number of steps that this worker has finished; not 0 for one that has returned."""
        return min(table.clock for table in self._tables)

    def pull(self) -> Any:
        """Return the weights that the next step needs: a pytree as the one that was given.

        To be called before the first step, and after `ps.load` and `PsRolledBack`. Arrays are on
        the devices on which the given ones were. Raises `ValueError` inside `jax.jit`,
        `PsRolledBack`, and `HorovodInternalError` where a server is lost for good.
        """
        check_untraced()
        found = [np.empty(spec.shape, dtype_of(spec.dtype)) for spec in self._specs]
        self._table.pull([array.reshape(-1) for array in found])
        leaves = [*map(jax.device_put, found, self._shardings)]
        self._is_current = True
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def step(self, gradients: Any, hyperparameters: Mapping[str, float] | None = None) -> Any:
        """Push gradients, and return the weights that the next step needs.

        `gradients` is a pytree as the one that was given. `hyperparameters` are numbers of
        `optax.inject_hyperparams`, which the servers keep until others come. Raises `ValueError`
        for gradients and numbers that do not fit, `PsRolledBack` where the servers have lost
        steps, and `HorovodInternalError` where one is lost for good.
        """
        arrays = self._flat(gradients)
        if not self._is_current:
            raise ValueError(
                "gradients of other weights than those on the servers: call params = "
                "optimizer.pull() before the first step, and after ps.load and PsRolledBack"
            )
        body: dict[str, Any] = {}
        if hyperparameters is not None:
            self._numbers = self._numbers | self._checked(hyperparameters)
            body["numbers"] = [self._numbers]
            self._tell_rows()
        try:
            self._table.push(arrays, body)
            return self.pull()
        except PsRolledBack:
            self._table.forget_rollback()
            self._is_current = False
            raise

    def _tell_rows(self) -> None:
        """Let what is pushed to rows from now on be stepped over with the present numbers."""
        for table in self._tables:
            if self._numbers and isinstance(table, RemoteRows):
                table.numbers = [self._numbers]

    def _flat(self, gradients: Any) -> list[Array]:
        leaves, structure = jax.tree_util.tree_flatten(gradients)
        check_untraced(*leaves)
        if structure != self._structure:
            raise ValueError(
                f"gradients have the structure {structure}, and the weights on the servers "
                f"{self._structure}"
            )
        for spec, leaf in zip(self._specs, leaves, strict=True):
            if np.shape(leaf) != spec.shape:
                raise ValueError(
                    f"the gradient of {spec.name} has the shape {np.shape(leaf)}, and the weights "
                    f"on the servers {spec.shape}"
                )
        return [
            to_host(leaf).astype(dtype_of(spec.dtype), copy=False).reshape(-1)
            for spec, leaf in zip(self._specs, leaves, strict=True)
        ]

    def _checked(self, hyperparameters: Mapping[str, float]) -> dict[str, float]:
        numbers = {name: float(number) for name, number in hyperparameters.items()}
        try:
            with_numbers(first_state(self._optimizer, jnp.zeros(1)), numbers)
        except KeyError as error:
            raise ValueError(
                f"the optimizer has no number {error} that stays until another one comes: make it "
                "by optax.inject_hyperparams, without a schedule"
            ) from None
        return numbers

    def start_rows(
        self, name: str, count: int, length: int, dtype: str = "float32", seed: int = 0,
        initializer: str = NORMAL, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Begin an embedding of shape (count, length) whose rows lie on the servers alone.

        ``ps.pull_rows(name, ids)`` returns rows, and ``ps.push_rows(name, ids, gradients)`` is a
        step with this optimizer over those that are pushed, once for each `step`, with the
        hyperparameters of the last one. What a row begins
        with is as in `ps.start_rows`. Raises `ValueError` for an optimizer whose state begins with
        the weights.
        """
        rows = RowsSpec(count, length, str(np.dtype(dtype_of(dtype))), seed, initializer, scale)
        states = [first_state(self._optimizer, jnp.full(2, value)) for value in (0.0, 1.0)]
        one, other = ([*map(to_host, jax.tree_util.tree_leaves(each))] for each in states)
        if not all(map(np.array_equal, one, other)):
            raise ValueError(
                f"{name!r}: the state of this optimizer begins with the weights, and rows begin on "
                "the servers: take another optimizer for them"
            )
        spec = TensorSpec(name, rows.dtype, (count, length))
        options = self._options._replace(rows=rows.fields)
        self._tables.append(context.worker().declare_rows(spec, options))
        self._tell_rows()
        step_together(self._tables)
