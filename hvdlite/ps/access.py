"""Raw access: arrays of numpy that are pushed to servers, and pulled from them, by names.

What is pushed is added to what lies there. In a server each of these functions serves, and its
process ends with the job; they are for workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.plain.handles import Handle, HandleTable
from hvdlite.ps import context
from hvdlite.ps.blocks import Array, TensorSpec, dtype_of
from hvdlite.ps.clocks import ASYNC, Mode
from hvdlite.ps.raw import PREFIX
from hvdlite.ps.raw_tables import FoundTable, RawTable
from hvdlite.ps.registry import TableOptions
from hvdlite.ps.remote_rows import RemoteRows
from hvdlite.ps.row_store import NORMAL, RowsSpec
from hvdlite.ps.serving import serve
from hvdlite.ps.worker import Worker

_handles = HandleTable()


def _worker() -> Worker:
    if context.role() == "server":
        serve()
    return context.worker()


def _options(mode: str, staleness: int | None, op: int) -> TableOptions:
    Mode(mode, staleness)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op is {op!r}: a server averages what is pushed, or adds it up")
    return TableOptions(mode, staleness, op == ReduceOp.AVERAGE)


def start(
    name: str, array: Any, mode: str = ASYNC, staleness: int | None = None, op: int = ReduceOp.SUM
) -> None:
    """Begin a tensor with the values of the first worker that calls it; others take part.

    A `push` of a name that was not started begins it with zeros. `mode` and `staleness` are those
    of `DistributedOptimizer`; in sync, `op` is Sum or Average of what all workers push.
    """
    worker, value = _worker(), np.asarray(array)
    _start(worker, name, value, _options(mode, staleness, op))


def start_rows(
    name: str, count: int, length: int, dtype: str = "float32", seed: int = 0,
    initializer: str = NORMAL, scale: float = 1.0, mode: str = ASYNC,
    staleness: int | None = None, op: int = ReduceOp.SUM,
) -> None:  # fmt: skip
    """Begin a tensor of shape (count, length) whose rows servers make when they are asked for.

    What a row begins with depends on `seed`, `name` and its number: `initializer` is "normal"
    (`scale` is the standard deviation), "uniform" (from -`scale` to `scale`) or "zeros".
    """
    worker = _worker()
    rows = RowsSpec(count, length, str(np.dtype(dtype_of(dtype))), seed, initializer, scale)
    options = _options(mode, staleness, op)._replace(rows=rows.fields)
    if PREFIX + name not in worker.named:
        worker.declare_rows(TensorSpec(PREFIX + name, rows.dtype, (count, length)), options)


def push_async(name: str, array: Any) -> int:
    """Begin to add an array to the tensor `name`; return a handle.

    The array may be changed when this returns. Raises ValueError for another dtype or shape than
    that of the tensor, and `HorovodInternalError` where another worker has begun it so.
    """
    worker, value = _worker(), np.asarray(array)
    table = worker.named.get(PREFIX + name)
    if table is None:
        options = _options(ASYNC, None, ReduceOp.SUM)
        known = worker.find(PREFIX + name)
        zeros = np.zeros_like(value)
        table = _start(worker, name, zeros, known[1] if known else options)
    table = _dense(table, name)
    (spec,) = table.specs
    if (value.dtype.name, value.shape) != (spec.dtype, spec.shape):
        raise ValueError(
            f"{name!r} is {spec.dtype} of shape {spec.shape} on the servers, and {value.dtype} of "
            f"shape {value.shape} was pushed"
        )
    return _handles.add(table.push_async(value.reshape(-1)))


def push(name: str, array: Any) -> None:
    """Add an array to the tensor `name`; see `push_async`. Returns when servers have it."""
    synchronize(push_async(name, array))


def pull_async(name: str) -> int:
    """Begin to pull the tensor `name`; return a handle of an array.

    It has all that this worker has pushed. Raises `HorovodInternalError` where nobody has begun it.
    """
    worker = _worker()
    table = worker.named.get(PREFIX + name)
    if table is None:
        known = worker.find(PREFIX + name)
        if known is None:
            raise HorovodInternalError(
                f"no worker has begun {name!r}: push it, or call start, before it is pulled",
                job_goes_on=True,
            )
        (spec,), options = known
        table = worker.declare(PREFIX + name, [spec], options, list, FoundTable)
    return _handles.add(_dense(table, name).pull_async())


def pull(name: str) -> Array:
    """Return the tensor `name`; see `pull_async`."""
    found: Array = synchronize(pull_async(name))
    return found


def push_rows_async(name: str, ids: Any, rows: Any) -> int:
    """Begin to add `rows`, of shape (len(ids), length), to those of a tensor; return a handle.

    `name` is one of `start_rows`, or the parameter of an embedding that lies on servers: the push
    is then a gradient, and counts as a step. Rows of an id that is repeated are added up in their
    order. Raises TypeError for ids that are no integers, ValueError for ids that the tensor does
    not have and for rows of another dtype or shape, and `HorovodInternalError` for an unknown name.
    """
    return _handles.add(_rows(name).push(ids, rows))


def push_rows(name: str, ids: Any, rows: Any) -> None:
    """Add rows to those of a tensor; see `push_rows_async`. Returns when servers have them."""
    synchronize(push_rows_async(name, ids, rows))


def pull_rows_async(name: str, ids: Any) -> int:
    """Begin to pull rows; return a handle of an array of shape (len(ids), length).

    Raises as `push_rows_async` does.
    """
    return _handles.add(_rows(name).pull(ids))


def pull_rows(name: str, ids: Any) -> Array:
    """Return rows, of shape (len(ids), length); see `pull_rows_async`."""
    found: Array = synchronize(pull_rows_async(name, ids))
    return found


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once."""
    return bool(_handles.get(handle).poll())


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result. Raises ValueError for an unknown handle.

    Raises `HorovodInternalError` where a server is lost for good, and `PsRolledBack`.
    """
    operation: Handle = _handles.get(handle)
    try:
        return operation.wait()
    finally:
        _handles.take(handle)


def converted(handle: int, convert: Callable[[Array], Any]) -> int:
    """Return a handle of what `convert` makes of the array of another one, which it replaces."""
    return _handles.add(_Converted(_handles.take(handle), convert))


class _Converted:
    def __init__(self, handle: Handle, convert: Callable[[Array], Any]) -> None:
        self.poll, self._handle, self._convert = handle.poll, handle, convert

    def wait(self) -> Any:
        """Wait for the array, and convert it."""
        return self._convert(self._handle.wait())


def _start(worker: Worker, name: str, value: Array, options: TableOptions) -> RawTable:
    known = worker.named.get(PREFIX + name)
    if known is not None:
        return _dense(known, name)
    spec = TensorSpec(PREFIX + name, value.dtype.name, value.shape)
    dtype_of(spec.dtype)
    flat = value.reshape(-1).copy()
    table = worker.declare(PREFIX + name, [spec], options, lambda: [flat], RawTable)
    assert isinstance(table, RawTable)
    return table


def _dense(table: Any, name: str) -> RawTable:
    if not isinstance(table, RawTable):
        raise ValueError(f"{name!r} is a tensor of rows: call push_rows and pull_rows")
    return table


def _rows(name: str) -> RemoteRows:
    worker = _worker()
    for known in (name, PREFIX + name):
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
