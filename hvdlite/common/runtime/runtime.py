"""One rank's membership in one job: its engine, its process sets, its settings."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.table import INIT_FAILED
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.handles import HandleTable
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID, FormedSet
from hvdlite.common.runtime.mpi_process import members_of_communicator, mpi_runs
from hvdlite.common.runtime.process_sets import FormedSets, ProcessSet
from hvdlite.common.runtime.recording import Lasting
from hvdlite.common.segmentation.parsing import UserChoice, read_strategy
from hvdlite.common.segmentation.strategies import Auto
from hvdlite.common.settings.config import Config
from hvdlite.common.settings.setting import check_output_file
from hvdlite.common.transport.base import Transport, do_nothing

log = logging.getLogger("hvdlite")


class Runtime:
    """One rank's membership in one job, from init to shutdown."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        mpi_group: Any = None,
        *,
        sets: Iterable[tuple[int, ...]] = (),
        lasting: Lasting | None = None,
    ) -> None:
        """Begin with process `sets`, the same on all ranks.

        What is `lasting` goes on after the shutdown, in the next world of an elastic job.
        """
        self.config = config
        # The ranks of the job as MPI knows them, until shutdown; None without MPI. A process set
        # that is made from a communicator is translated by it.
        self.mpi_group = mpi_group
        self.transport = transport
        self.rank = transport.rank
        self.topology: Topology = transport.topology
        # The operations that users hold handles of; they stay until synchronize() asks for them.
        self.handles = HandleTable()
        self._lasts = lasting is not None
        # The timeline, which records nothing until a file is named, by the settings or by
        # start_timeline(); and the optimizers and other trainers of this rank, announced when they
        # are made.
        self.recording, self.trainers = lasting or Lasting.new(config, self.rank)
        self.timeline = self.recording.timeline
        # Checked calls by the name of a tensor or group: specs, options, and the resulting request
        # or requests. Steps after the first find theirs here.
        self.requests: dict[str, Any] = {}
        # By name: calls on one tensor in place that have ended, for the next call under the name.
        self.repeated: dict[str, Any] = {}
        # Prepared buckets by the names of their tensors: steps after the first use them again.
        self.buckets: dict[Any, Any] = {}
        # By process set id: how the user has asked for gradients to be split.
        self.choices: dict[int, UserChoice] = {}
        # By process set id: how many calls without a name this era has seen, and the token of the
        # era. See [Note: eras and join] at `restart`.
        self._unnamed: dict[int | None, int] = {}
        self._eras: dict[int | None, object] = {}
        self._unnamed_lock = threading.RLock()  # Guards _unnamed, also against a signal handler.
        # By id: the sets that users hold, so that a set that is removed can be told so.
        self.known_sets: dict[int, ProcessSet] = {}
        # The sets that only their members have made, which end with this world.
        self.formed_sets = FormedSets()
        try:
            # A program that is no rank needs none of it.
            from hvdlite.common.engine.engine import Engine

            if self._lasts and config.device_completion == "auto":
                # A rank may die at any time: no step may use what a device has not computed.
                config = self.config = replace(config, device_completion="host")
            self.engine = Engine(transport, config, self.timeline, sets=sets)
            self.engine.start()
        except BaseException:
            transport.close()
            self._free_mpi_group()
            raise
        log.debug(
            "rank %d of %d runs on host %d of %d (%s), with ranks %s, over %s",
            self.rank, self.topology.size,
            self.topology.host_of[self.rank],
            len(self.topology.hosts), socket.gethostname(),
            ", ".join(map(str, self.topology.peers(self.rank))), type(transport).__name__,
        )  # fmt: skip

    def follow_settings(self) -> None:
        """Follow the settings that can only be right or wrong where this rank runs.

        They are the core of the engine and files; the timeline is started. Raises `OSError` where
        that cannot be, and `ConfigError` for the others, but in a later world of an elastic job,
        which goes on.
        """
        try:
            self.engine.pin()
            self._check_files()
        except ConfigError as error:
            if not self.recording.follows:
                raise
            log.error("%s", error)
        self.recording.begin()

    def _check_files(self) -> None:
        """Raise `ConfigError` for a file that is written later, and cannot be."""
        trace, strategy = self.trainers.path_by_setting(self.config), None
        if trace:
            trace = self.recording.new_file(trace, of_rank=True)
        if self.rank == 0:
            strategy = read_strategy(self.config.segmentation)
        learned = strategy.file if isinstance(strategy, Auto) else ""
        for variable, file in (("TRACE_ITERATIONS", trace), ("SEGMENTATION", learned)):
            try:
                check_output_file(file)
            except ValueError as error:
                raise ConfigError(f"HVDLITE_{variable}: rank {self.rank}: {file} {error}") from None

    def named(self, name: str | None, process_set: ProcessSet) -> AbstractContextManager[str]:
        """Return a context with `name`, or with the next generated name of this process set.

        The generated name is used up when the context is left without an error: a refused call
        must not change the count, as other ranks may have made no such call.
        """
        return self._numbered(process_set) if name is None else nullcontext(name)

    @contextmanager
    def _numbered(self, process_set: ProcessSet) -> Iterator[str]:
        key = process_set.process_set_id
        with self._unnamed_lock:
            number = self._unnamed.get(key, 0)
            self._unnamed[key] = number + 1
            try:
                yield f"noname.{number}"
            except BaseException:
                if self._unnamed.get(key) == number + 1:  # Else a signal handler has called, too.
                    self._unnamed[key] = number
                raise

    def restart(self, process_set: ProcessSet) -> None:
        """Begin a new era of a process set: its unnamed calls are numbered from 0 again.

        [Note: eras and join]
        Ranks match tensors by name. A call without a name gets the next number of its process set,
        which is the same on all ranks because they make the same calls in the same order. A join
        breaks that rule: a joined rank makes no calls while the others go on, so afterwards the
        counts differ, and a call would wait forever for a rank that uses another number.

        An era is the time in which all members make the same calls. The end of a join is a point
        that all members pass together, so there every rank counts from 0 again. A new process set
        begins an era too, since its id may have been another set's. Everything else that is agreed
        by counting calls stores the token of `era` with its count, and starts anew when the token
        changes: the numbers of barriers, and the steps between two checks of a frozen segmentation.

        Within a join the coordinator solves the matching problem of its own: see section 5 of the
        theory of operation in coordinator.py.
        """
        self._unnamed.pop(process_set.process_set_id, None)
        self._eras.pop(process_set.process_set_id, None)

    def era(self, process_set: ProcessSet) -> object:
        """Return the token of the current era of a set. See [Note: eras and join] at `restart`."""
        return self._eras.setdefault(process_set.process_set_id, object())

    def call(self, request: Request) -> Any:
        """Enqueue something without a tensor, and wait for its answer."""
        entry = Entry(request)
        self.engine.enqueue([entry])
        return entry.handle.wait()

    def begin(self, sets: Sequence[ProcessSet], *, first: bool) -> None:
        """Do the work of one call of `init`: register new process sets, agree on the settings.

        The `first` call also starts the timeline of the settings. If one rank fails, no set is
        registered: that rank raises its own error, and the others `HorovodInternalError` with its
        text. Returns when all ranks have called, unless there is nothing to agree on.
        """
        new: list[ProcessSet] = []
        failure: Exception | None = None
        try:
            if first:
                self.follow_settings()
            new = self._new_sets(sets)
        except Exception as error:
            failure = error
        try:
            if first or new or failure is not None:
                self._agree(sets, failure)
        except HorovodInternalError as error:
            raise failure or error from None
        if failure is not None:
            raise failure
        for process_set in new:
            self.add_process_set(process_set)
        if first:
            for begin in self.trainers.on_begin:
                begin(self)

    def _new_sets(self, sets: Sequence[ProcessSet]) -> list[ProcessSet]:
        """Return those of `sets` that are to be registered; all of them can be.

        Raises `ValueError` for a duplicate, and for ranks that do not exist.
        """
        table = self.engine.process_sets
        registered = table.all()
        used = [ranks for key, ranks in registered.items() if table.is_added(key)]
        new = []
        for position, process_set in enumerate(sets):
            ranks, process_set_id = self.ranks_of(process_set), process_set.process_set_id
            if process_set_id is not None and registered.get(process_set_id) == ranks:
                continue  # An earlier call has registered it.
            if ranks in used:
                raise ValueError(
                    f"process_sets entry number {position} is a duplicate: {process_set}"
                )
            table.check(ranks)
            used.append(ranks)
            new.append(process_set)
        return new

    def _agree(self, sets: Sequence[ProcessSet], failure: Exception | None) -> None:
        """Raise `HorovodInternalError` unless all ranks give the same settings, sets and failure.

        Returns when all ranks have called it.
        """
        settings: dict[str, object] = {
            "HVDLITE_ALLREDUCE": self.config.allreduce,
            "HVDLITE_DATA_PLANE": self.config.data_plane,
            "HVDLITE_CHECK_WEIGHTS": self.config.check_weights,
            "process_sets": [s.ranks if s.mpi_comm is None else "comm" for s in sets],
        }
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        if failure is not None:
            text = f"{INIT_FAILED}{type(failure).__name__}: {failure}"
        self.call(Request(GLOBAL_ID, "init", "init", settings=text))

    def ranks_of(self, process_set: ProcessSet) -> list[int]:
        """Return the global ranks of a set, ascending, also of one made from a communicator.

        Raises `ValueError` where it has a communicator and the job has no MPI, or other ranks.
        """
        if process_set.mpi_comm is None:
            return sorted(process_set.ranks or ())
        if self.mpi_group is None:
            raise ValueError(
                f"{process_set} is made from an MPI communicator, and this job was not started by "
                "MPI: make it from a list of ranks, or start the job with hvdlite-run --launcher "
                "mpirun"
            )
        return members_of_communicator(process_set.mpi_comm, self.mpi_group)

    def add_process_set(self, process_set: ProcessSet) -> None:
        """Register a set on all ranks; blocks until every rank has called it."""
        members = self.engine.process_sets.check(self.ranks_of(process_set))
        collective = "add_process_set" if process_set.mpi_comm is None else "split_process_set"
        added: FormedSet = self.call(Request(GLOBAL_ID, collective, collective, shape=members))
        process_set_id = added.process_set_id
        process_set._bind(process_set_id, members)
        if added.is_new:
            self.begin_set(process_set)
        self.known_sets[process_set_id] = process_set

    def begin_set(self, process_set: ProcessSet) -> None:
        """Forget what was counted and chosen for another set that had the id of a new one."""
        self.choices.pop(process_set.process_set_id or 0, None)
        self.restart(process_set)

    def remove_process_set(self, process_set: ProcessSet) -> None:
        """Unregister a set on all ranks; blocks until every rank has called it."""
        process_set_id = process_set.process_set_id
        assert process_set_id is not None  # The caller has checked that.
        split = process_set.mpi_comm is not None
        collective = "unsplit_process_set" if split else "remove_process_set"
        self.call(Request(GLOBAL_ID, collective, collective, root_rank=process_set_id))
        self._forget_set(process_set_id)

    def _forget_set(self, process_set_id: int) -> None:
        self.forget_calls()
        self.choices.pop(process_set_id, None)
        process_set = self.known_sets.pop(process_set_id, None)
        if process_set is not None:
            process_set._invalidate()

    def forget_calls(self) -> None:
        """Check all calls anew from now on."""
        self.requests.clear()
        self.repeated = {}  # Calls under way come back to the old one.
        self.buckets.clear()

    def shutdown(self, reason: str = "") -> None:
        """Depart from the job; the engine thread may go on for ranks that need it.

        Errors of ranks that need this one say the `reason`.

        All steps are done even if one raises, such as `KeyboardInterrupt` during a wait.
        """
        with ExitStack() as steps:  # The last callback is called first.
            steps.callback(self._free_mpi_group)
            for process_set_id in list(self.known_sets):
                steps.callback(self._forget_set, process_set_id)
            steps.callback(self.formed_sets.close)
            steps.callback(self.recording.leave if self._lasts else self.timeline.close)
            steps.callback(self.engine.shutdown, reason)
            if not self._lasts:
                steps.callback(self.trainers.close)

    def release(self) -> None:
        """Release the engine, which has finished: its memory is unmapped with the last view.

        Transport and engine refer to each other, so without this both would stay until the next
        garbage collection.
        """
        self.transport.call_while_waiting(do_nothing)

    def _free_mpi_group(self) -> None:
        group, self.mpi_group = self.mpi_group, None
        if group is not None and mpi_runs():  # Else the user has ended MPI.
            group.Free()
