"""init, shutdown, rank, size: the one place with state of the whole process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.report_failure import report_uncaught
from hvdlite.common.base.topology import Topology
from hvdlite.common.engine.engine import Engine
from hvdlite.common.plain.config import Config
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.handles import HandleTable
from hvdlite.common.plain.logs import set_up_log
from hvdlite.common.plain.messages import Request
from hvdlite.common.plain.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.connect import connect, leave_mpi_alone
from hvdlite.common.runtime.process_sets import (
    ProcessSet,
    _ask_for_rank,
    global_process_set,
    is_communicator,
)
from hvdlite.common.runtime.trainers import Iterations
from hvdlite.common.segmentation.user_choice import Choice
from hvdlite.common.timeline.recorder import Timeline, path_of_rank
from hvdlite.common.transport.base import Transport

DYNAMIC = "dynamic"
_NOT_INITIALIZED = "hvdlite has not been initialized; use hvd.init()"


class Runtime:
    """One rank's membership in one job, from init to shutdown."""

    def __init__(self, transport: Transport, config: Config, mpi_group: Any = None) -> None:
        self.config = config
        self.mpi_group = mpi_group  # the ranks of the job as MPI knows them; None without MPI
        self.transport = transport
        self.rank = transport.rank
        self.topology: Topology = transport.topology
        self.handles = HandleTable()
        self.iterations = Iterations()
        # What was checked, by the name of a tensor or group: specs, options, and the request or
        # requests that they make.
        self.requests: dict[str, tuple[Any, Any, Request | tuple[Request, ...]]] = {}
        self.choices: dict[int, Choice] = {}  # by process set: how gradients are split
        self._unnamed: dict[int | None, int] = {}  # by process set: calls without a name
        self._eras: dict[int | None, object] = {}  # by process set
        self._unnamed_lock = threading.Lock()  # guards it
        self.timeline = Timeline(self.rank)
        try:
            self._record_from_the_start()
            self.engine = Engine(transport, config, self.timeline)
        except BaseException:
            self.timeline.close()
            transport.close()
            raise
        self.known_sets: dict[int, ProcessSet] = {}
        self.engine.start()

    def _record_from_the_start(self) -> None:
        path = self.config.timeline
        if path and path.upper() != DYNAMIC.upper():
            self.record_timeline(path, self.config.timeline_mark_cycles)

    def record_timeline(self, path: str, mark_cycles: bool) -> None:
        """Start to record, on rank 0 or on every rank as the settings say."""
        if self.config.timeline_all_ranks:
            path = path_of_rank(path, self.rank)
        elif self.rank != 0:
            return
        self.timeline.record_to(path, mark_cycles)

    def named(self, name: str | None, process_set: ProcessSet) -> AbstractContextManager[str]:
        """`name`, or the next number of this set, which is used up unless the call is refused."""
        return self._numbered(process_set) if name is None else nullcontext(name)

    @contextmanager
    def _numbered(self, process_set: ProcessSet) -> Iterator[str]:
        key = process_set.process_set_id
        with self._unnamed_lock:
            number = self._unnamed.get(key, 0)
            yield f"noname.{number}"
            self._unnamed[key] = number + 1

    def restart(self, process_set: ProcessSet) -> None:
        """All ranks of the set are at the same point, after different numbers of calls.

        Its unnamed calls are numbered from 0 again, and a new era begins.
        """
        self._unnamed.pop(process_set.process_set_id, None)
        self._eras.pop(process_set.process_set_id, None)

    def era(self, process_set: ProcessSet) -> object:
        """Stands for the time in which all ranks of the set make the same calls."""
        return self._eras.setdefault(process_set.process_set_id, object())

    def call(self, request: Request) -> Any:
        """Enqueue something without a tensor, and wait for its answer."""
        entry = Entry(request)
        self.engine.enqueue([entry])
        return entry.handle.wait()

    def agree(self, sets: Sequence[ProcessSet]) -> None:
        """Check that all ranks run with settings that work together; ends when all are here."""
        config = self.config
        settings = {
            "HVDLITE_ALLREDUCE": config.allreduce,
            "HVDLITE_DATA_PLANE": config.data_plane,
            "process_sets": [each.ranks for each in sets],
        }
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        self.call(Request(GLOBAL_ID, "init", "init", settings=text))

    def find_ranks(self, process_set: ProcessSet) -> None:
        """Translate the communicator of a set, where it is made from one, to global ranks."""
        if process_set.mpi_comm is None:
            return
        if self.mpi_group is None:
            raise ValueError(f"{process_set} is made from an MPI communicator; this job has no MPI")
        theirs = process_set.mpi_comm.Get_group()
        process_set.ranks = sorted(
            theirs.Translate_ranks(list(range(theirs.Get_size())), self.mpi_group)
        )
        theirs.Free()

    def add_process_set(self, process_set: ProcessSet) -> None:
        """Register a set on all ranks; blocks until every rank has called it."""
        members = self.engine.process_sets.check(process_set.ranks or ())
        collective = "add_process_set" if process_set.mpi_comm is None else "split_process_set"
        number = self.call(Request(GLOBAL_ID, collective, collective, shape=members))
        process_set._bind(number, members)
        self.restart(process_set)  # the number may have been another set's
        self.known_sets[number] = process_set

    def remove_process_set(self, process_set: ProcessSet) -> None:
        """Unregister a set on all ranks; blocks until every rank has called it."""
        number = process_set.process_set_id
        assert number is not None  # the caller has looked
        split = process_set.mpi_comm is not None
        collective = "unsplit_process_set" if split else "remove_process_set"
        self.call(Request(GLOBAL_ID, collective, collective, root_rank=number))
        self._forget_set(number)

    def _forget_set(self, number: int) -> None:
        self.requests.clear()
        self.choices.pop(number, None)
        process_set = self.known_sets.pop(number, None)
        if process_set is not None:
            process_set._invalidate()

    def shutdown(self) -> None:
        """Leave the job; the engine thread may go on for ranks that need it."""
        self.iterations.close()
        self.engine.shutdown()
        self.timeline.close()
        for number in list(self.known_sets):
            self._forget_set(number)


class _State:
    """The runtime of this process, or of the calling thread where ranks are threads."""

    def __init__(self) -> None:
        self.process: Runtime | None = None
        self.thread = threading.local()
        self.ending: list[Engine] = []  # shut down, and still needed by other ranks
        self.forked_from: int | None = None


_state = _State()


def find() -> Runtime | None:
    """The runtime of the caller, or None before `init`."""
    return getattr(_state.thread, "runtime", None) or _state.process


def finder() -> Callable[[], Runtime]:
    """What finds the caller's runtime later, in whatever thread it is asked."""
    bound: Runtime | None = getattr(_state.thread, "runtime", None)
    return for_collective if bound is None else lambda: bound


def current() -> Runtime:
    """The runtime of the caller. Raises `ValueError` before `init`."""
    runtime = find()
    if runtime is None:
        raise ValueError(_not_initialized())
    return runtime


_ask_for_rank(lambda: current().rank)


def for_collective() -> Runtime:
    """The runtime of the caller. Raises `HorovodInternalError` before `init`."""
    try:
        return current()
    except ValueError as error:
        raise HorovodInternalError(str(error)) from None


def _not_initialized() -> str:
    if _state.forked_from is None:
        return _NOT_INITIALIZED
    return (
        f"this process was forked from rank {_state.forked_from} after init() and is no rank "
        "itself: call collectives in the parent, or start the child with spawn"
    )


@contextmanager
def use(runtime: Runtime) -> Iterator[Runtime]:
    """Within this, `runtime` is the calling thread's: ranks can be threads of one process."""
    before: Runtime | None = getattr(_state.thread, "runtime", None)
    _state.thread.runtime = runtime
    try:
        yield runtime
    finally:
        _state.thread.runtime = before


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
    if _state.forked_from is not None:
        raise HorovodInternalError(_not_initialized())
    if _state.process is None:
        config = Config.from_environ()
        set_up_log(config)
        report_uncaught()
        job = connect(comm, config)
        _state.process = Runtime(job.transport, config, job.mpi_group)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        global_process_set._bind(GLOBAL_ID, range(_state.process.topology.size))
        global_process_set.mpi_comm = comm if is_communicator(comm) else None
        try:
            _state.process.agree([each for each in sets if each.mpi_comm is None])
        except HorovodInternalError:
            shutdown()
            raise
    _register(_state.process, sets)


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
    runtime, _state.process = _state.process, None
    if runtime is None:
        return
    runtime.shutdown()
    global_process_set.ranks = None
    _state.ending.append(runtime.engine)


def _at_exit() -> None:
    shutdown()
    for engine in _state.ending:
        engine.join()
        if engine.failed:
            leave_mpi_alone()


def _after_fork_in_child() -> None:
    """The child is no rank: it must not keep the parent's connections open."""
    runtime, _state.process = _state.process, None
    if runtime is None:
        return
    _state.forked_from = runtime.rank
    runtime.transport.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
