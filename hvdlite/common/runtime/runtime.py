"""One rank's membership in one job: its engine, its process sets, its settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hvdlite.common.base.topology import Topology
from hvdlite.common.engine.engine import Engine
from hvdlite.common.plain.config import Config
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.handles import HandleTable
from hvdlite.common.plain.messages import Request
from hvdlite.common.plain.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.trainers import Trainers
from hvdlite.common.segmentation.user_choice import UserChoice
from hvdlite.common.timeline.recorder import Timeline, path_of_rank
from hvdlite.common.transport.base import Transport

DYNAMIC = "dynamic"


class Runtime:
    """One rank's membership in one job, from init to shutdown."""

    def __init__(self, transport: Transport, config: Config, mpi_group: Any = None) -> None:
        self.config = config
        self.mpi_group = mpi_group  # the ranks of the job as MPI knows them; None without MPI
        self.transport = transport
        self.rank = transport.rank
        self.topology: Topology = transport.topology
        self.handles = HandleTable()
        self.trainers = Trainers()
        # What was checked, by the name of a tensor or group: specs, options, and the request or
        # requests that they make.
        self.requests: dict[str, tuple[Any, Any, Request | tuple[Request, ...]]] = {}
        self.choices: dict[int, UserChoice] = {}  # by process set: how gradients are split
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
        self.trainers.close()
        self.engine.shutdown()
        self.timeline.close()
        for number in list(self.known_sets):
            self._forget_set(number)
