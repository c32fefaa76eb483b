"""The runtime of the caller: found, required, and set for threads that are ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import process_state
from hvdlite.common.runtime.process_state import ProcessState, not_initialized

if TYPE_CHECKING:
    from hvdlite.common.runtime.elastic_worker import ElasticWorker
    from hvdlite.common.runtime.runtime import Runtime

this_process: ProcessState[Runtime, ElasticWorker] = process_state.this_process


def find() -> Runtime | None:
    """Return the runtime of the caller, or None before `init`."""
    return this_process.thread.runtime or this_process.runtime


def finder() -> Callable[[], Runtime]:
    """Return a function that finds the caller's runtime later, called in any thread."""
    bound = this_process.thread.runtime
    return for_collective if bound is None else lambda: bound


def current() -> Runtime:
    """Return the runtime of the caller. Raises `ValueError` before `init`."""
    runtime = find()
    if runtime is None:
        raise ValueError(not_initialized())
    return runtime


def for_collective() -> Runtime:
    """Return the runtime of the caller. Raises `HorovodInternalError` before `init`."""
    try:
        return current()
    except ValueError as error:
        raise HorovodInternalError(str(error)) from None


@contextmanager
def use(runtime: Runtime) -> Iterator[Runtime]:
    """Make `runtime` the calling thread's within this context: ranks can be threads."""
    before = this_process.thread.runtime
    this_process.thread.runtime = runtime
    try:
        yield runtime
    finally:
        this_process.thread.runtime = before
