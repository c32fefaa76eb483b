"""Start and end this rank's membership in a job: init, shutdown, and the end of the process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.report_failure import report_uncaught
from hvdlite.common.plain.config import Config
from hvdlite.common.plain.logs import set_up_log
from hvdlite.common.plain.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.connect import connect, leave_mpi_alone
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set, is_communicator
from hvdlite.common.runtime.runtime import DYNAMIC, Runtime
from hvdlite.common.runtime.state import current, not_initialized, this_process


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start hvdlite on this rank; blocks until all ranks have called it.

    `comm` is None (all ranks of the job), a list of world ranks, or an ``mpi4py.MPI.Comm``. Every
    rank that is in it must call. `process_sets` is a list of `ProcessSet` to register, alike on all
    ranks, or ``"dynamic"``, which has no effect: sets can always be added later. A second call
    does not restart anything and registers process sets that are new.

    Raises `ValueError` for wrong arguments, `ConfigError` (a `ValueError`) for settings with
    wrong values, `HorovodVersionMismatchError`, `OSError` for a timeline that cannot be written,
    `BuildError` where ``HVDLITE_NATIVE=on`` and compiled code cannot be had, and
    `HorovodInternalError` when a rank is lost or has other settings.
    """
    sets = _checked_sets(process_sets, comm)
    if this_process.forked_from is not None:
        raise HorovodInternalError(not_initialized())
    if this_process.runtime is None:
        config = Config.from_environ()
        set_up_log(config)
        report_uncaught()
        job = connect(comm, config)
        this_process.runtime = Runtime(job.transport, config, job.mpi_group)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        global_process_set._bind(GLOBAL_ID, range(this_process.runtime.topology.size))
        global_process_set.mpi_comm = comm if is_communicator(comm) else None
        try:
            this_process.runtime.agree([each for each in sets if each.mpi_comm is None])
        except HorovodInternalError:
            shutdown()
            raise
    _register(this_process.runtime, sets)


def _checked_sets(process_sets: Sequence[ProcessSet] | str | None, comm: Any) -> list[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != DYNAMIC:
            raise ValueError(f"process_sets={process_sets!r}: a list of ProcessSet, or 'dynamic'")
        return []
    for each in process_sets:
        if not isinstance(each, ProcessSet):
            raise ValueError(f"process_sets: {each!r} is not a ProcessSet")
    return list(process_sets)


def _register(runtime: Runtime, sets: Sequence[ProcessSet]) -> None:
    """Register what init was given, in the same order on all ranks."""
    for number, each in enumerate(sets):
        runtime.find_ranks(each)
        known = runtime.engine.process_sets.all()
        if each.ranks in known.values() and (
            each.process_set_id is None or known.get(each.process_set_id) != each.ranks
        ):
            raise ValueError(f"process_sets entry number {number} is a duplicate: {each}")
        if each.process_set_id is None:
            runtime.add_process_set(each)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set while training runs; every rank of the job must call it alike.

    A set made from a communicator is that of the caller's own part: ``comm.Split()`` gives each
    rank another one, and all of them are registered at once.

    Returns the set (a new `ProcessSet` when ranks were given). Raises `ValueError` for a duplicate
    of a registered set, for ranks that do not exist, and before `init`.
    """
    runtime = current()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    runtime.find_ranks(process_set)
    runtime.add_process_set(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; every rank of the job must call it alike.

    False for the global set, and for one that is not registered. What is pending in the set fails.
    """
    runtime = current()
    number = process_set.process_set_id
    if number is None or number == GLOBAL_ID:
        return False
    if runtime.engine.process_sets.find(number) is None:
        return False
    runtime.remove_process_set(process_set)
    process_set._invalidate()
    return True


def shutdown() -> None:
    """Leave the job. Pending collectives fail; `init` may be called again afterwards.

    Other ranks may go on among themselves: what needs this rank fails there, with its number.
    """
    runtime, this_process.runtime = this_process.runtime, None
    if runtime is None:
        return
    runtime.shutdown()
    global_process_set.ranks = None
    this_process.ending.append(runtime.engine)


def _at_exit() -> None:
    shutdown()
    for engine in this_process.ending:
        engine.join()
        if engine.failed:
            leave_mpi_alone()


def _after_fork_in_child() -> None:
    """The child is no rank: it must not keep the parent's connections open."""
    runtime, this_process.runtime = this_process.runtime, None
    if runtime is None:
        return
    this_process.forked_from = runtime.rank
    runtime.transport.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
