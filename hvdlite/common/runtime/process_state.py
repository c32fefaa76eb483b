"""Which job this process, or the calling thread, is a rank of.

It stands below runtimes and does not know what one is: `hvdlite.common.runtime.current` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from hvdlite.common.base.errors import NOT_INITIALIZED
from hvdlite.common.base.report_failure import report_uncaught

R = TypeVar("R")  # The runtime of a rank.
W = TypeVar("W")  # A worker of an elastic job.


class _OfThread(threading.local, Generic[R]):
    """What a thread has of its own: None is found much sooner than nothing."""

    runtime: R | None = None


class ProcessState(Generic[R, W]):
    """The runtime of this process, or of the calling thread where ranks are threads."""

    def __init__(self) -> None:
        # Set by init, None again from the start of shutdown on.
        self.runtime: R | None = None
        # The argument of that init, so that a second call with another one can be warned of.
        self.comm: Any = None
        # Its attribute `runtime` is set within `use`, where ranks are threads of one process.
        self.thread: _OfThread[R] = _OfThread()
        # Runtimes that were shut down, whose engines other ranks may still need.
        self.shut_down: list[R] = []
        # What the trainers of the last runtime leave to that of another init; None before one.
        self.earlier: Any = None
        # In a forked child of a rank: the number of that rank.
        self.forked_from: int | None = None
        # Why this process is no rank and cannot be one; empty: it may be.
        self.no_rank = ""
        # Set by the first init of a worker of an elastic job, for the life of the process.
        self.worker: W | None = None
        # Returns what the worker of a parameter server in this process counts, by public names.
        self.server_counts: Callable[[], dict[str, float]] = dict
        # Whether init has looked for misspelt variables.
        self.warned = False
        # Held by the thread that is in init. Reentrant, because a signal handler may call init.
        self.initializing = threading.RLock()


this_process: ProcessState[Any, Any] = ProcessState()


def rank_of_caller() -> int:
    """Return the number of the calling rank. Raises `ValueError` before `init`."""
    runtime = this_process.thread.runtime or this_process.runtime
    if runtime is None:
        raise ValueError(not_initialized())
    rank: int = runtime.rank
    return rank


def not_initialized() -> str:
    """Return why the caller is no rank, and the remedy."""
    if this_process.forked_from is None:
        report_uncaught()  # Else `init` does: a forgotten one takes a line of its own.
        return this_process.no_rank or NOT_INITIALIZED
    return (
        f"this process was forked from rank {this_process.forked_from} after init() and is no rank "
        "itself: call collectives in the parent, or start the child with spawn"
    )
