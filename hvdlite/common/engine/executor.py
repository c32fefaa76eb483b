"""The executor: runs one negotiated segment on this rank, and completes the handles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.backend_choice import Backends, choose
from hvdlite.common.collectives.base import Backend, Members, Operand
from hvdlite.common.collectives.between_hosts.carried import may_be_carried
from hvdlite.common.collectives.kernels import neutral_value
from hvdlite.common.collectives.multi_host.backends import HostsBackend
from hvdlite.common.collectives.table import SPECS, CollectiveRun, neutral_shape, reduction_of
from hvdlite.common.decisions.fusion import size_bytes
from hvdlite.common.devices.data_plane import DevicePlane, Span
from hvdlite.common.requests.entries import Entry, Observer, SegmentRun
from hvdlite.common.requests.messages import Request, Response
from hvdlite.common.requests.process_set_table import ProcessSetTable
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.timeline.recorder import Timeline

Array = NDArray[Any]
T = TypeVar("T")
log = logging.getLogger("hvdlite")


class JoinedOperand:
    """The operand of a joined rank for a tensor that it does not have: neutral data."""

    splits: tuple[int, ...] = ()
    received_splits: tuple[int, ...] = ()
    address: int | None = None
    count = 0

    def __init__(self, response: Response, members: int) -> None:
        self.response = response
        self.splits = (0,) * members

    @property
    def input(self) -> Array:
        """The neutral element of the reduction, flat."""
        request = self.response.request
        shape, value = neutral_shape(request), neutral_value(request)
        return np.full(shape, value, numpy_dtype(request.dtype)).reshape(-1)

    def output(self, shape: tuple[int, ...]) -> Array:
        """Return memory that nobody reads."""
        return np.empty(shape, numpy_dtype(self.response.request.dtype)).reshape(-1)


class Executor:
    """Runs segments by the backends of one rank, shown in the timeline and to observers."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        backends: Backends,
        timeline: Timeline,
        devices: DevicePlane | None = None,
        *,
        shows_at_launch: bool = False,
    ) -> None:
        """Run what is on devices by `devices`.

        Observers see that when the devices have done it, in another thread; with `shows_at_launch`
        when it is queued.
        """
        self._devices, self._shows_at_launch, self._rank = devices, shows_at_launch, rank
        self._topology, self._backends, self._timeline = topology, backends, timeline
        self._members: dict[tuple[int, ...], Members] = {}
        # By collective, dtype, reduce op and ranks: the backend, until settings change.
        self._chosen: dict[tuple[str, str, int, tuple[int, ...]], Backend] = {}
        # What the log has named already: (collective, dtype, backend, ranks).
        self._logged: set[tuple[str, str, str, tuple[int, ...]]] = set()
        # Called with each segment that has run, before its handles complete: on the engine thread,
        # or on one that waits and has made a short call.
        # Replaced as a whole by other threads, so that a loop over it never sees a change.
        self.observers: tuple[Observer, ...] = ()

    def members_of(self, ranks: tuple[int, ...]) -> Members:
        """Return the members with these global ranks, as this rank sees them. Any thread."""
        members = self._members.get(ranks)
        if members is None:
            topology = self._topology.restrict(ranks)
            members = self._members[ranks] = Members(ranks, ranks.index(self._rank), topology)
        return members

    def backend(self, request: Request, members: Members) -> Backend:
        """Return the backend that runs a request. Raises as `choose`. Any thread."""
        reduce_op = reduction_of(request, members.size).reduce_op
        dtype, backend_of = numpy_dtype(request.dtype), SPECS[request.collective].backend_of
        return choose(self._backends, backend_of, dtype, reduce_op, members)

    def carried_data(self, process_sets: ProcessSetTable, entry: Entry) -> bytes | None:
        """Return the data of an entry that go with its request, or None.

        That are those whose sum is the same wherever it is added up: see [Note: data inside
        requests].
        """
        request = entry.request
        ranks = process_sets.find(request.process_set_id)
        if ranks is None or self._rank not in ranks:
            return None
        members = self.members_of(ranks)
        if not may_be_carried(request, entry.size_bytes, members.topology):
            return None
        try:
            backend = self.backend(request, members)
        except (ConfigError, HorovodInternalError):  # The call fails when it runs, on all ranks.
            return None
        if not isinstance(backend, HostsBackend) or not backend.doubles(members, entry.size_bytes):
            return None
        return entry.input.tobytes()

    def run(
        self,
        ranks: tuple[int, ...],
        responses: Sequence[Response],
        entries: Sequence[Entry | None],
        result: bytes = b"",
    ) -> bool:
        """Run a segment among `ranks`. An entry is None where this rank has joined.

        Of one tensor the `result` may be there already: see [Note: data inside requests].

        Returns whether a device does it, so that the entries have not ended yet. Raises
        `HorovodInternalError` when the job cannot go on.
        """
        members = self.members_of(ranks)
        request = responses[0].request
        spec = SPECS[request.collective]
        present = [entry for entry in entries if entry is not None]
        if self._launch(members, responses, entries):
            return True
        operands: Sequence[Operand] = present
        if len(present) < len(entries):
            operands = [
                JoinedOperand(response, members.size) if entry is None else entry
                for response, entry in zip(responses, entries, strict=True)
            ]
        try:
            key = request.collective, request.dtype, request.reduce_op, members.ranks
            backend = self._chosen.get(key)
            if backend is None:
                backend = self._chosen[key] = self.backend(request, members)
        except (ConfigError, HorovodInternalError) as error:  # All ranks fail alike: they go on.
            for entry in present:
                entry.handle.fail(HorovodInternalError(str(error), job_goes_on=True))
            return False
        names: list[str] = []  # Only who watches needs them.
        if self._timeline.enabled:
            names = [response.request.name for response in responses]
        if log.isEnabledFor(logging.DEBUG):
            self._log_backend(spec.name, request.dtype, backend, ranks)
        start = time.monotonic()
        with _Recorded(self._timeline, names, responses):
            for entry in present:
                entry.wait()
            if result:
                output = operands[0].output(request.shape)
                np.copyto(output, np.frombuffer(result, output.dtype))
            else:
                run = CollectiveRun(
                    backend, members, operands, partial(self._timeline.activity, names)
                )
                self._run(request, run)
        if self.observers:
            self._show_run(members, responses, present, start)
        # A thread that waits for the first handle finds all others complete when it wakes.
        for entry in reversed(present):
            entry.complete()
        return False

    def _launch(
        self, members: Members, responses: Sequence[Response], entries: Sequence[Entry | None]
    ) -> bool:
        """Queue a segment on a device; return whether one runs it. Raises as `run`."""
        devices = self._devices
        if devices is None or responses[0].request.device not in devices.agreement.kinds:
            return False
        present = [entry for entry in entries if entry is not None]
        names: list[str] = []
        if self._timeline.enabled:
            names = [response.request.name for response in responses]
        start = time.monotonic()

        def end(error: HorovodInternalError | None, span: Span | None) -> None:
            if span is not None:
                request = responses[0].request
                self._timeline.device_span(request.device, request.collective, names, *span)
            if self.observers and error is None and not self._shows_at_launch:
                self._show_run(members, responses, present, start, span)

        with _Recorded(self._timeline, names, responses):
            timed = self._timeline.enabled or bool(self.observers)
            launched = self._blaming(
                responses[0].request,
                lambda: devices.run(members, responses, entries, end, timed=timed),
            )
        if launched and self.observers and self._shows_at_launch:
            self._show_run(members, responses, present, start)
        return launched

    def _show_run(
        self,
        members: Members,
        responses: Sequence[Response],
        present: Sequence[Entry],
        start: float,
        span: Span | None = None,
    ) -> None:
        """Show observers a segment that began at `start` and ends now, or has the times `span`."""
        nbytes = sum(entry.size_bytes for entry in present)
        ready = max((entry.enqueued for entry in present), default=0.0)
        names = tuple(response.request.name for response in responses)
        collective = responses[0].request.collective
        times = span or (start, time.monotonic())
        self.show(SegmentRun(names, collective, nbytes, *times, members.ranks, ready))

    def show(self, run: SegmentRun) -> None:
        for observe in self.observers:
            observe(run)

    def retune(self, allreduce: str, piece_bytes: int) -> None:
        """Change the backends of this rank; see `Backends.retune`."""
        self._chosen.clear()
        self._backends.retune(allreduce, piece_bytes)

    def _run(self, request: Request, run: CollectiveRun) -> None:
        """Run a collective. Raises `HorovodInternalError`, which names the rank at fault."""
        run_collective = SPECS[request.collective].run
        assert run_collective is not None  # The engine answers collectives without a `run` itself.
        self._blaming(request, lambda: run_collective(run))

    def _blaming(self, request: Request, work: Callable[[], T]) -> T:
        """Return ``work()``. Raises `HorovodInternalError`, which names the rank at fault."""
        try:
            return work()
        except Exception as error:
            # An error that names a rank has its reason already: a lost peer, or the Abort of
            # another rank, which came while this one waited.
            if isinstance(error, HorovodInternalError) and error.rank is not None:
                raise
            raise HorovodInternalError(
                f"rank {self._rank} could not run {request.collective} "
                f"'{request.name}': {type(error).__name__}: {error}",
                rank=self._rank,
            ) from error

    def _log_backend(
        self, collective: str, dtype: str, backend: Backend, ranks: tuple[int, ...]
    ) -> None:
        fields = (collective, dtype, type(backend).__name__, ranks)
        if fields not in self._logged:
            self._logged.add(fields)
            log.debug("rank %d: %s of %s is run by %s among %s", self._rank, *fields)


class _Recorded:
    """A context manager that shows a segment in the timeline, from its start to its end."""

    def __init__(self, timeline: Timeline, names: list[str], responses: Sequence[Response]) -> None:
        self._timeline, self._names, self._responses = timeline, names, responses

    def __enter__(self) -> None:
        if self._timeline.enabled:
            collective = self._responses[0].request.collective
            nbytes = sum(map(size_bytes, self._responses))
            self._timeline.segment_start(self._names, nbytes, collective)
            for name in self._names:
                self._timeline.start(name, collective)

    def __exit__(self, *exc: object) -> None:
        if self._timeline.enabled:
            for response in self._responses:
                request = response.request
                self._timeline.end(request.name, request.dtype, request.shape)
            self._timeline.segment_end()
