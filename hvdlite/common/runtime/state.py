"""The one module-level state: which job this process, or the calling thread, is a rank of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hvdlite.common.base.errors import NOT_INITIALIZED, HorovodInternalError
from hvdlite.common.base.report_failure import report_uncaught

if TYPE_CHECKING:
    from hvdlite.common.runtime.elastic_worker import ElasticWorker
    from hvdlite.common.runtime.runtime import Runtime


class _OfThread(threading.local):
    """What a thread has of its own: None is found much sooner than nothing."""

    runtime: Runtime | None = None


class ProcessState:
    """The runtime of this process, or of the calling thread where ranks are threads."""

    def __init__(self) -> None:
        # Set by init, None again from the start of shutdown on.
        self.runtime: Runtime | None = None
        # The argument of that init, so that a second call with another one can be warned of.
        self.comm: Any = None
        # Its attribute `runtime` is set within `use`, where ranks are threads of one process.
        self.thread = _OfThread()
        # Runtimes that were shut down, whose engines other ranks may still need.
        self.shut_down: list[Runtime] = []
        # In a forked child of a rank: the number of that rank.
        self.forked_from: int | None = None
        # Why this process is no rank and cannot be one; empty: it may be.
        self.no_rank = ""
        # Set by the first init of a worker of an elastic job, for the life of the process.
        self.worker: ElasticWorker | None = None
        # Whether init has looked for misspelt variables.
        self.warned = False
        # Held by the thread that is in init. Reentrant, because a signal handler may call init.
        self.initializing = threading.RLock()


this_process = ProcessState()


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


def not_initialized() -> str:
    """Return why the caller is no rank, and the remedy."""
    if this_process.forked_from is None:
        report_uncaught()  # Else `init` does: a forgotten one takes a line of its own.
        return this_process.no_rank or NOT_INITIALIZED
    return (
        f"this process was forked from rank {this_process.forked_from} after init() and is no rank "
        "itself: call collectives in the parent, or start the child with spawn"
    )


@contextmanager
def use(runtime: Runtime) -> Iterator[Runtime]:
    """Make `runtime` the calling thread's within this context: ranks can be threads."""
    before = this_process.thread.runtime
    this_process.thread.runtime = runtime
    try:
        yield runtime
    finally:
        this_process.thread.runtime = before
