"""The membership of this rank in a job: init, shutdown, exit and fork of the process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.report_failure import reason_of_end, reason_of_shutdown, report_uncaught
from hvdlite.common.driver_link.frames import Newcomer, World
from hvdlite.common.meeting import launch as launches
from hvdlite.common.meeting.launch import SINGLE, Launch
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.connect import Connected, check_without_mpi, connect, find_launch
from hvdlite.common.runtime.current import current, this_process
from hvdlite.common.runtime.elastic_worker import ElasticWorker
from hvdlite.common.runtime.mpi_process import call_before_mpi_ends, skip_mpi_finalize
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set, is_communicator
from hvdlite.common.runtime.process_state import not_initialized
from hvdlite.common.runtime.recording import DYNAMIC, Lasting
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.settings.config import Config, misspelt
from hvdlite.common.settings.logs import set_up_log
from hvdlite.common.tensors.result_memory import result_memory

# Which process is the rank: a child process inherits the variables of its launcher, too.
RANK_PROCESS = "HVDLITE_RANK_PROCESS"  # "<process id> <rank> <job>" of the process that is the rank


def claim_rank(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make this process the rank that it was launched as, for all processes that it starts.

    A child process inherits the launcher's variables, and would be a second copy of the rank.
    Raises `HorovodInternalError` in such a child. A job that is started inside a rank has other
    variables, and is a job of its own.
    """
    if launch.source == SINGLE:
        return
    process, _, rest = environ.get(RANK_PROCESS, "").partition(" ")
    rank, _, job = rest.partition(" ")
    # Where a launcher gives its jobs no name, only a direct child is known to be of the same job.
    same_job = job == launch.job and (job or process == str(os.getppid()))
    if same_job and rank == str(launch.rank) and process != str(os.getpid()):
        raise HorovodInternalError(
            f"process {os.getpid()} was started by rank {rank} (process {process}) and is no rank "
            "itself: it must not call init(). Where the child imports the script again (the "
            'methods "spawn" and "forkserver" of multiprocessing, as in a DataLoader), put init() '
            'and the training under: if __name__ == "__main__". To run a job of its own in the '
            "child, start it with hvdlite-run or hvdlite.run",
            int(rank),
        )
    environ[RANK_PROCESS] = f"{os.getpid()} {launch.rank} {launch.job}"


log = logging.getLogger("hvdlite")


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
    sets = _checked_sets(process_sets)
    if this_process.forked_from is not None or this_process.no_rank:
        raise HorovodInternalError(not_initialized())
    with this_process.initializing:
        if this_process.runtime is None:
            _start(comm, sets)
        else:
            if comm is not None and comm != this_process.comm:
                log.warning(
                    "init(comm=%s) has no effect after init(comm=%s): call shutdown() before it",
                    comm, this_process.comm,
                )  # fmt: skip
            this_process.runtime.begin(sets, first=False)


def _start(comm: Any, sets: Sequence[ProcessSet]) -> None:
    """Join a job. After an error, this process is what it was before."""
    launch = find_launch()
    claim_rank(launch)
    config = Config.from_environ()
    set_up_log(config)
    result_memory.keep(config.result_memory_bytes)
    if launch.rank == 0 and not this_process.warned:  # It speaks for the job.
        for sentence in misspelt(os.environ):
            log.warning("%s", sentence)
    this_process.warned = True
    report_uncaught()
    _forget_finished()
    if launch.source == launches.ELASTIC:
        _enter_a_world(comm, sets, launch, config)
    else:
        _begin(connect(comm, launch, config), comm, sets, config)


def _begin(connected: Connected, comm: Any, sets: Sequence[ProcessSet], config: Config) -> None:
    """Start the runtime of this process. After an error, there is none."""
    transport, mpi_group, kept_sets = connected
    lasting = None if this_process.worker is None else this_process.worker.lasting
    this_process.runtime = runtime = Runtime(
        transport, config, mpi_group, sets=kept_sets, lasting=lasting
    )
    if lasting is None and this_process.earlier is not None:
        runtime.trainers.take_over(this_process.earlier)
    try:
        this_process.comm = comm
        if mpi_group is not None:
            call_before_mpi_ends(_at_exit)
        atexit.unregister(_at_exit)  # it must be called before what MPI has registered since
        atexit.register(_at_exit)
        global_process_set._bind(GLOBAL_ID, range(runtime.topology.size))
        global_process_set.mpi_comm = comm if is_communicator(comm) else None
        worker = this_process.worker
        if worker is not None:
            worker.follow(runtime.engine)
            if worker.world is not None:
                runtime.trainers.enter(runtime)
            runtime.known_sets |= worker.sets.bind(runtime.engine.process_sets.all())
        if not is_waiting():
            runtime.begin(sets, first=True)
    except BaseException:
        shutdown()
        raise


# -- elastic jobs


def _enter_a_world(comm: Any, sets: Sequence[ProcessSet], launch: Launch, config: Config) -> None:
    """Join the next world of an elastic job, or wait outside of it as a newcomer."""
    if comm is not None:
        raise ValueError(
            f"comm={comm}: the driver of an elastic job decides which ranks it has: call init() "
            "without comm, and make process sets for parts of the ranks"
        )
    check_without_mpi(launch, config)
    if this_process.worker is None:
        this_process.worker = ElasticWorker(Lasting.new(config, launch.rank, in_world=False))
        this_process.worker.sets.note_init(sets)
    worker = this_process.worker

    def join(offer: World | Newcomer) -> None:
        for runtime in this_process.shut_down:  # All ranks of their worlds have left, or are lost.
            runtime.engine.abandon(HorovodInternalError("the world of this engine is over"))
        connected = worker.connect(offer, config)
        recording, settings = worker.lasting.recording, config
        if isinstance(offer, World):
            recording.enter(offer, worker.sets.follows)
        new = [] if worker.sets.follows else sets
        if config.autotune_log:  # Each world has a file of its own.
            file = recording.new_file(config.autotune_log, of_rank=False)
            settings = replace(config, autotune_log=file)
        _begin(connected, comm, new, settings)
        _forget_finished()

    worker.enter(join, config.peer_timeout_seconds)


def is_waiting() -> bool:
    """Return whether this process is a worker of an elastic job that is in no world yet."""
    return this_process.worker is not None and this_process.worker.world is None


def restart() -> None:
    """Shut down, and start again with the same arguments: in the next world of an elastic job.

    A world that no check has interrupted is broken, or this rank must leave it alone: then the
    other ranks learn that it is lost, and nobody waits for anybody.
    """
    worker, runtime, comm = this_process.worker, this_process.runtime, this_process.comm
    if worker is not None and runtime is not None and not worker.interrupted:
        text = f"rank {runtime.rank} has left world {worker.epoch}"
        runtime.engine.abandon(HorovodInternalError(text, rank=runtime.rank))
    if worker is not None and worker.world is not None and runtime is not None:
        table = runtime.engine.process_sets
        sets = {key: ranks for key, ranks in table.all().items() if table.is_added(key)}
        worker.sets.note_world(worker.world, sets, runtime.known_sets)
    ranks = global_process_set.ranks
    _depart()
    global_process_set.ranks = ranks  # `init` changes the list in place.
    init(comm)


def _checked_sets(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != DYNAMIC:
            raise ValueError(f"process_sets={process_sets!r}: a list of ProcessSet, or 'dynamic'")
        return []
    for process_set in process_sets:
        if not isinstance(process_set, ProcessSet):
            raise ValueError(
                f"process_sets: {process_set!r} is not a ProcessSet; give a list of them, such as "
                "[ProcessSet([0, 1])]"
            )
    return list(process_sets)


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
    runtime.add_process_set(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; every rank of the job must call it alike.

    Returns False for the global set and for a set that is not registered. Collectives that are
    pending in the set fail, unless its members have formed it as well.
    """
    runtime = current()
    process_set_id = process_set.process_set_id
    if process_set_id is None or process_set_id == GLOBAL_ID:
        return False
    if not runtime.engine.process_sets.is_added(process_set_id):
        return False
    runtime.remove_process_set(process_set)
    process_set._invalidate()
    return True


def shutdown() -> None:
    """Depart from the job. Pending collectives fail; `init` may be called again afterwards.

    Other ranks may go on among themselves: collectives that need this rank fail and name it, and
    the exception that is being handled here, if there is one.
    """
    _depart(reason_of_shutdown())


def _depart(reason: str = "") -> None:
    runtime, this_process.runtime = this_process.runtime, None
    if runtime is None:
        return
    try:
        runtime.shutdown(reason)
    finally:
        global_process_set.ranks = global_process_set.mpi_comm = this_process.comm = None
        this_process.shut_down.append(runtime)
        this_process.earlier = runtime.trainers.left()
        result_memory.keep(0)
        _forget_finished()


def _forget_finished() -> None:
    """Release the runtimes whose engines no other rank needs any more, with their memory."""
    for runtime in [r for r in this_process.shut_down if r.engine.finished]:
        this_process.shut_down.remove(runtime)
        runtime.release()
        if runtime.engine.failed and this_process.worker is None:
            skip_mpi_finalize()


def _at_exit() -> None:
    """Depart from the job, and wait for the ranks that still need this one."""
    _depart(reason_of_end())
    for runtime in this_process.shut_down:
        runtime.engine.join()
    _forget_finished()
    if this_process.worker is not None:
        this_process.worker.lasting.close()
        this_process.worker.link.close()


def _after_fork_in_child() -> None:
    """Close the connections of the parent: the child is no rank, and must not hide its death."""
    # A thread that does not exist in the child may hold the lock.
    this_process.initializing = threading.RLock()
    this_process.worker = None
    runtime, this_process.runtime = this_process.runtime, None
    if runtime is not None:
        this_process.forked_from = runtime.rank
        this_process.shut_down.append(runtime)
    for inherited in this_process.shut_down:
        inherited.transport.after_fork_in_child()
    this_process.shut_down.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
