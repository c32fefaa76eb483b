"""Raw access: tensors that are pushed to servers, and pulled from them, by names.

What is pushed is added to what lies there. In a server each of these calls serves, and its
process ends with the job; they are for workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.requests.handles import Handle, HandleTable
from hvdlite.ps import context
from hvdlite.ps.connections.client import Plan
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.context import PREFIX, serve
from hvdlite.ps.layouts.blocks import Array, TensorSpec, dtype_of
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import ASYNC
from hvdlite.ps.tables.row_store import NORMAL, RowsSpec
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.worker import Worker

ROWS_CALLS = "{!r} is a tensor of rows: call push_rows and pull_rows"

# A table of one tensor, as a worker pushes to it and pulls from it by its name.


class RawTable(RemoteTable):
    """A table whose pushes and pulls are begun in their order, and waited for later."""

    def push_async(self, array: Array) -> Handle:
        """Push a flat array as a step. Raises `PsRolledBack`."""
        self.raise_if_rolled_back()
        return self._push_parts(lambda n: [self._cut([array], each) for each in range(n)], {})

    def pull_async(self) -> Handle:
        """Return a handle of the tensor, which has all that was pushed here before."""
        self.raise_if_rolled_back()
        return self._pull_parts(self._plan_pull)

    def _plan_pull(self) -> Plan:
        # A table that moves has its blocks first, then its shards, then fails the old ones.
        shards = self._shards
        every = self._blocks

        def finish(answers: list[Message]) -> Array:
            (spec,) = self.specs
            found = np.empty(spec.size, dtype_of(spec.dtype))
            for blocks, answer in zip(every, answers, strict=True):
                for block, data in zip(blocks, answer.payloads, strict=True):
                    is_whole = len(block.parts) == 1 and block.size == spec.size
                    if is_whole and type(data) is bytes:  # See `Block.small_copy`.
                        return block.view(bytearray(data)).reshape(spec.shape)
                    block.scatter(block.view(data), [found], self._first_key)
            return found.reshape(spec.shape)

        return [self._pull_of(shard, ()) for shard in shards], finish

    def refresh(self) -> None:
        """See `TableShards`. Should a server be lost, what was pulled last is offered to it."""
        self.pull_async().wait()


class FoundTable(RawTable):
    """A table that another worker begins."""

    first_version = -2


class RawCalls:
    """The calls for one framework. `array` makes an array of a tensor, and `tensor` the reverse."""

    def __init__(self, array: Callable[[Any], Array], tensor: Callable[[Array], Any]) -> None:
        self._array, self._tensor = array, tensor
        self._handles = HandleTable()

    def start(
        self,
        name: str | Mapping[str, Any],
        array: Any = None,
        mode: str = ASYNC,
        staleness: int | None = None,
        op: int = ReduceOp.SUM,
        scale: str | None = None,
    ) -> None:
        """Begin a tensor with the values of the first worker that calls it; others take part.

        A mapping of names to arrays begins many in less time than one by one. A `push` of a name
        that was not started begins it with zeros. `mode`, `staleness` and
        `scale` are those of `DistributedOptimizer`: with "1/W", async and ssp divide each push by
        the number of workers that take part. In sync, `op` is Sum or Average of what all push.

        Raises ValueError for integers that would be divided by the number of workers, and where
        this worker knows the tensor as another one or with other options.
        """
        if isinstance(name, Mapping) != (array is None):
            raise TypeError("start takes a name and an array, or a mapping of names to arrays")
        worker, options = _worker(), TableOptions.of(mode, staleness, op, scale)
        if not isinstance(name, Mapping):
            _start(worker, name, self._native(name, array), options)
            return
        values = {each: self._native(each, value) for each, value in name.items()}
        specs = {_key(each): [_spec_of(each, value)] for each, value in values.items()}
        new = sorted(specs.keys() - worker.named.keys())
        worker.announce({each: specs[each] for each in new}, options)
        for each, value in values.items():
            _start(worker, each, value, options)

    def _native(self, name: str, tensor: Any) -> Array:
        """Return an array whose bytes are in the order of this machine."""
        value = self._array(tensor)
        if value.dtype.hasobject:  # As numpy takes what it knows nothing of.
            raise TypeError(
                f"{name!r} is given as {type(tensor).__name__}, which is no array of numbers: give "
                "a dense one, or some of its rows to push_rows(name, ids, rows)"
            )
        native = value.dtype.isnative
        return value if native else value.astype(value.dtype.newbyteorder("="))

    def start_rows(
        self, name: str, count: int, length: int, dtype: str = "float32", seed: int = 0,
        initializer: str = NORMAL, scale: float = 1.0, mode: str = ASYNC,
        staleness: int | None = None, op: int = ReduceOp.SUM,
    ) -> None:  # fmt: skip
        """Begin a tensor of shape (count, length) whose rows servers make when they are asked for.

        What a row begins with depends on `seed`, `name` and its number: `initializer` is "normal"
        (`scale` is the standard deviation), "uniform" (from -`scale` to `scale`) or "zeros".
        Raises ValueError where this worker knows the tensor as another one or with other options.
        """
        worker = _worker()
        rows = RowsSpec(count, length, str(np.dtype(dtype_of(dtype))), seed, initializer, scale)
        options = TableOptions.of(mode, staleness, op)._replace(rows=rows.fields)
        known = worker.named.get(_key(name))
        spec = TensorSpec(_key(name), rows.dtype, (count, length))
        if known is None:
            worker.declare_rows(spec, options)
        else:
            _check_same(name, known, spec, options)

    def push_async(self, name: str, array: Any) -> int:
        """Begin to add an array to the tensor `name`; return a handle.

        The array may be changed when this returns. Raises TypeError for what is no array, such as
        `tf.IndexedSlices`, ValueError for another dtype or shape than that of the tensor, and
        `HorovodInternalError` where another worker has begun it so.
        """
        worker, value = _worker(), self._native(name, array)
        table = worker.named.get(_key(name))
        if table is None:
            known = _find(worker, name)
            options = known[1] if known else TableOptions.of(ASYNC, None, ReduceOp.SUM)
            table = _start(worker, name, np.zeros_like(value), options)
        table = _dense(table, name)
        (spec,) = table.specs
        if value.dtype != dtype_of(spec.dtype) or value.shape != spec.shape:
            raise ValueError(
                f"{name!r} is {spec.dtype} of shape {spec.shape} on the servers, and "
                f"{value.dtype} of shape {value.shape} was pushed"
            )
        return self._handles.add(table.push_async(value.reshape(-1)))

    def push(self, name: str, array: Any) -> None:
        """Add an array to the tensor `name`; see `push_async`. Returns when servers have it."""
        self.synchronize(self.push_async(name, array))

    def pull_async(self, name: str) -> int:
        """Begin to pull the tensor `name`; return a handle of an array.

        It has all that this worker has pushed. Raises `HorovodInternalError` where nobody has
        begun it.
        """
        worker = _worker()
        table = worker.named.get(_key(name))
        if table is None:
            known = _find(worker, name)
            if known is None:
                raise HorovodInternalError(
                    f"no worker has begun {name!r}: push it, or call start, before it is pulled",
                    job_goes_on=True,
                )
            (spec,), options = known
            table = worker.declare(PREFIX + name, [spec], options, list, FoundTable)
        return self._handles.add(_dense(table, name).pull_async())

    def pull(self, name: str) -> Any:
        """Return the tensor `name`; see `pull_async`."""
        return self.synchronize(self.pull_async(name))

    def push_rows_async(self, name: str, ids: Any, rows: Any) -> int:
        """Begin to add `rows`, of shape (len(ids), length), to those of a tensor; return a handle.

        `name` is one of `start_rows`, or the parameter of an embedding that lies on servers: the
        push is then a gradient, and counts as a step. Rows of an id that is repeated are added up
        in their order. Raises TypeError for ids that are no integers, ValueError for ids that the
        tensor does not have and for rows of another dtype or shape, and `HorovodInternalError` for
        an unknown name.
        """
        return self._handles.add(_rows(name).push(self._array(ids), self._array(rows)))

    def push_rows(self, name: str, ids: Any, rows: Any) -> None:
        """Add rows to those of a tensor; see `push_rows_async`. Returns when servers have them."""
        self.synchronize(self.push_rows_async(name, ids, rows))

    def pull_rows_async(self, name: str, ids: Any) -> int:
        """Begin to pull rows; return a handle of an array of shape (len(ids), length).

        Raises as `push_rows_async` does.
        """
        return self._handles.add(_rows(name).pull(self._array(ids)))

    def pull_rows(self, name: str, ids: Any) -> Any:
        """Return rows, of shape (len(ids), length); see `pull_rows_async`."""
        return self.synchronize(self.pull_rows_async(name, ids))

    def poll(self, handle: int) -> bool:
        """Return whether `synchronize` would return at once."""
        return bool(self._handles.get(handle).poll())

    def synchronize(self, handle: int) -> Any:
        """Wait for an operation and return its result. Raises ValueError for an unknown handle.

        Raises `HorovodInternalError` where a server is lost for good, and `PsRolledBack`.
        """
        operation: Handle = self._handles.get(handle)
        try:
            result = operation.wait()
        finally:
            self._handles.take(handle)
        return result if result is None else self._tensor(result)


def _worker() -> Worker:
    if context.role() == "server":
        serve()
    return context.worker()


def _key(name: str) -> str:
    """Return the name of the table of a tensor."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is a text, not {name!r}")
    return PREFIX + name


def _find(worker: Worker, name: str) -> tuple[list[TensorSpec], TableOptions] | None:
    """Return what other workers have begun. Raises ValueError for a tensor of rows."""
    known = worker.find(_key(name))
    if known is not None and known[1].rows is not None:
        raise ValueError(ROWS_CALLS.format(name))
    return known


def _check_same(
    name: str, known: RemoteTable | RemoteRows, spec: TensorSpec, options: TableOptions
) -> None:
    """Raise ValueError where a table is another one than is asked for."""
    (before,) = known.specs
    has, wants = _words(before, known.options), _words(spec, options)
    if has != wants:
        raise ValueError(
            f"{name!r} has begun here as {has}, and would begin again as {wants}: a tensor keeps "
            "what it has begun with"
        )


def _words(spec: TensorSpec, options: TableOptions) -> str:
    """Say all that belongs to a table."""
    op = "Average" if options.average else "Sum"
    words = {"mode": options.mode, "staleness": options.staleness, "scale": options.scale}
    rows = "" if options.rows is None else f" {RowsSpec(*options.rows)}"
    more = "".join(f", {key}={value!r}" for key, value in words.items() if value is not None)
    return f"{spec.dtype} of shape {spec.shape}{rows}, op={op}{more}"


def _start(worker: Worker, name: str, value: Array, options: TableOptions) -> RawTable:
    known, spec = worker.named.get(_key(name)), _spec_of(name, value)
    if options.scale is not None and value.dtype.kind in "iu":
        raise ValueError(
            f"scale={options.scale!r} divides what is pushed to {name!r} by the number of workers, "
            f"and it is {value.dtype}: give floats"
        )
    if known is not None:
        begun = _dense(known, name)
        _check_same(name, begun, spec, options)
        return begun
    flat, specs = value.reshape(-1).copy(), [spec]
    table = worker.declare(PREFIX + name, specs, options, lambda: [flat], RawTable)
    assert isinstance(table, RawTable)
    return table


def _spec_of(name: str, value: Array) -> TensorSpec:
    spec = TensorSpec(PREFIX + name, value.dtype.name, value.shape)
    dtype_of(spec.dtype)
    return spec


def _dense(table: Any, name: str) -> RawTable:
    if not isinstance(table, RawTable):
        raise ValueError(ROWS_CALLS.format(name))
    return table


def _rows(name: str) -> RemoteRows:
    worker = _worker()
    for known in (name, _key(name)):
        table = worker.named.get(known)
        if isinstance(table, RemoteRows):
            return table
        if table is not None:
            raise ValueError(f"{name!r} is no tensor of rows: call push and pull")
    found = worker.find(PREFIX + name)
    if found is None or found[1].rows is None:
        raise HorovodInternalError(
            f"no worker has begun rows {name!r}: call start_rows, or make the DistributedOptimizer "
            "of an embedding with this parameter",
            job_goes_on=True,
        )
    (spec,), options = found
    return worker.declare_rows(spec, options)
