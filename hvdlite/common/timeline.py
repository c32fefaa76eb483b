"""The timeline: what the engine does with each tensor, as a Chrome trace (Perfetto, chrome://tracing).

    training thread, engine thread            writer thread
    timeline.start(...)  -> queue (bounded) -> _Trace (state of each track) -> _TraceFile (disk)

Recording costs one clock reading and one append; a disabled timeline costs one comparison. The
file is a JSON array that ends with ``]`` after every write, so that it loads whatever happens to
the process. Tensors are "processes" of the trace, with Horovod's event names:

    NEGOTIATE_ALLREDUCE  with a tick for each rank that is ready
    ALLREDUCE            with nested activities; ends with the tensor's dtype and shape
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import stat
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import PurePath
from typing import Any

ENGINE_TRACK = "[engine]"  # what the engine thread does
SEGMENT_TRACK = "[segments]"  # tensors that travel together, and their bytes
HEAD_PID = 0  # carries what is about the whole file
NEGOTIATE_PREFIX = "NEGOTIATE_"

QUEUE_EVENTS = 1 << 18  # what waits for the writer; some 50 MB when full
TRACKS = 1 << 15  # tensor names that are remembered; the one that is longest unused goes first
BATCH_EVENTS = 4096  # formatted at a time: bounds the memory of the writer
FLUSH_SECONDS = 0.1  # how long events gather before they are written
NAMES_SHOWN = 8  # tensors of a segment that are named in the file

log = logging.getLogger("hvdlite")


def path_of_rank(path: str, rank: int) -> str:
    """Where `rank` writes when every rank writes a timeline: ``a.json`` -> ``a.rank3.json``."""
    pure = PurePath(path)
    return str(pure.with_name(f"{pure.stem}.rank{rank}{pure.suffix}"))


class Timeline:
    """The timeline of one rank; it can be switched on, to another file, and off at any time.

    All methods may be called from any thread. While `enabled` is False those that record do
    nothing. In a forked child a timeline is off and leaves the parent's file alone.
    """

    def __init__(self, rank: int, *, queue_events: int = QUEUE_EVENTS) -> None:
        self.rank = rank
        self.enabled = False
        self._bound = queue_events
        self._clock_offset_seconds: float | None = 0.0 if rank == 0 else None
        self._start_idle()
        _timelines.add(self)

    def _start_idle(self) -> None:
        self.enabled = False
        self._mark_cycles = False
        self._queue: deque[tuple[Callable[..., None], int, tuple[Any, ...]]] = deque()
        self._dropped = 0
        self._lock = threading.RLock()  # guards _trace, _writer, _dropped and the draining end
        self._trace: _Trace | None = None
        self._writer: threading.Thread | None = None
        self._wake = threading.Event()  # something is in the queue
        self._stopping = threading.Event()

    # ---- on and off

    @classmethod
    def open(cls, path: str, rank: int, mark_cycles: bool = False) -> Timeline:
        """A timeline that records to `path` from now on; raises as `record_to`."""
        timeline = cls(rank)
        timeline.record_to(path, mark_cycles)
        return timeline

    def record_to(self, path: str, mark_cycles: bool = False) -> None:
        """Record to the file `path`, which is overwritten; the file in use until now is finished.

        Nothing but `mark_cycles` changes when `path` is in use already. Raises `OSError` that
        names the path when it cannot be written; recording then goes on as before.
        """
        with self._lock:
            if self._trace is None or self._trace.file.path != os.path.abspath(path):
                trace = _Trace(path, self.rank, self._clock_offset_seconds)
                self._finish_file()
                self._trace = trace
            self._mark_cycles = mark_cycles
            self._start_writer()
            self.enabled = True

    def close(self) -> None:
        """Write what is recorded and stop recording; nothing happens when it is off."""
        with self._lock:
            self.enabled = False
            writer, self._writer = self._writer, None
            self._stopping.set()
            self._wake.set()
            self._finish_file()
        if writer is not None and writer is not threading.current_thread():
            writer.join()

    def flush(self) -> None:
        """Write what is recorded until now; the writer does so ten times a second by itself."""
        with self._lock:
            if self._trace is not None:
                try:
                    self._drain(self._trace)
                except OSError as error:
                    self._give_up(self._trace.file, error)

    def set_clock_offset(self, seconds: float) -> None:
        """Tell how far ``time.monotonic()`` of rank 0 is ahead of this rank's at one moment.

        It is stored in the file; with it the files of several ranks are put on one clock.
        """
        with self._lock:
            self._clock_offset_seconds = seconds
        if self.enabled:
            self._put(_Trace.clock_offset, seconds)

    # ---- tensors

    def negotiate_start(self, tensor: str, collective: str) -> None:
        """The first rank asks for `collective` (``"allreduce"``); again: nothing."""
        if self.enabled:
            self._put(_Trace.negotiate_start, tensor, collective)

    def rank_ready(self, tensor: str, rank: int) -> None:
        """`rank` is ready for the tensor that is negotiated."""
        if self.enabled:
            self._put(_Trace.rank_ready, tensor, rank)

    def negotiate_end(self, tensor: str) -> None:
        """All ranks are ready."""
        if self.enabled:
            self._put(_Trace.negotiate_end, tensor)

    def start(self, tensor: str, collective: str) -> None:
        """The collective (or ``"error"``) begins for `tensor`."""
        if self.enabled:
            self._put(_Trace.start, tensor, collective)

    def activity_start(self, tensors: Sequence[str], activity: str) -> None:
        """A phase, such as ``MEMCPY_IN_FUSION_BUFFER``, begins for all `tensors`."""
        if self.enabled:
            self._put(_Trace.activity_start, tensors, activity)

    def activity_end(self, tensors: Sequence[str]) -> None:
        """The innermost phase of `tensors` ends."""
        if self.enabled:
            self._put(_Trace.activity_end, tensors)

    def activity(self, tensors: Sequence[str], name: str) -> AbstractContextManager[None]:
        """The block is phase `name` of `tensors`."""
        return self._activity(tensors, name) if self.enabled else nullcontext()

    @contextmanager
    def _activity(self, tensors: Sequence[str], name: str) -> Iterator[None]:
        self.activity_start(tensors, name)
        try:
            yield
        finally:
            self.activity_end(tensors)

    def end(
        self, tensor: str, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> None:
        """The collective of `tensor` has ended; its output has `dtype` and `shape`."""
        if self.enabled:
            self._put(_Trace.end, tensor, dtype, shape)

    # ---- the engine

    def engine(self, state: str | None) -> None:
        """The engine is in `state` (``"WAIT"``) until the next call; None: in no state."""
        if self.enabled:
            self._put(_Trace.engine, state)

    def mark_cycle(self) -> None:
        """The engine woke up; recorded only with ``mark_cycles``."""
        if self.enabled and self._mark_cycles:
            self._put(_Trace.mark_cycle)

    def segment_start(self, names: Sequence[str], nbytes: int, collective: str) -> None:
        """The tensors `names`, `nbytes` in all, begin to travel together."""
        if self.enabled:
            self._put(_Trace.segment_start, names[:NAMES_SHOWN], len(names), nbytes, collective)

    def segment_end(self) -> None:
        """The segment has arrived."""
        if self.enabled:
            self._put(_Trace.segment_end)

    # ---- the queue and its writer

    def _put(self, action: Callable[..., None], *args: Any) -> None:
        if len(self._queue) >= self._bound:
            with self._lock:
                self._dropped += 1
            return
        self._queue.append((action, time.monotonic_ns(), args))
        if not self._wake.is_set():
            self._wake.set()

    def _start_writer(self) -> None:
        if self._writer is not None:
            return
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._writer = threading.Thread(
            target=self._write, args=(self._wake, self._stopping), daemon=True
        )
        self._writer.name = "hvdlite-timeline"
        self._writer.start()

    def _write(self, wake: threading.Event, stopping: threading.Event) -> None:
        while True:
            wake.wait()
            if stopping.wait(FLUSH_SECONDS):  # others gather meanwhile
                return
            wake.clear()
            self.flush()

    def _drain(self, trace: _Trace) -> None:
        """Write what is in the queue now, then how many events found no place in it."""
        dropped, self._dropped = self._dropped, 0
        left = len(self._queue)
        while left:
            for _ in range(min(left, BATCH_EVENTS)):
                action, now, args = self._queue.popleft()
                action(trace, now, *args)
                left -= 1
            trace.write()
        if dropped:
            trace.drop(time.monotonic_ns(), dropped)
            trace.write()

    def _finish_file(self) -> None:
        trace = self._trace
        if trace is None:
            self._queue.clear()
            return
        try:
            self._drain(trace)
            trace.finish(time.monotonic_ns())
        except OSError as error:
            self._give_up(trace.file, error)
        trace.file.close()
        self._trace = None
        self._queue.clear()

    def _give_up(self, file: _TraceFile, error: OSError) -> None:
        """The disk is full, or worse: training goes on without a timeline."""
        self.enabled = False
        file.close()
        self._trace = None
        self._queue.clear()
        log.warning("the timeline %s ends here: %s", file.path, error.strerror or error)

    def _after_fork_in_child(self) -> None:
        if self._trace is not None:
            self._trace.file.close()
        self._start_idle()


_timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()


def _disable_in_child() -> None:
    for timeline in list(_timelines):
        timeline._after_fork_in_child()


def _close_all() -> None:
    for timeline in list(_timelines):
        timeline.close()


os.register_at_fork(after_in_child=_disable_in_child)
atexit.register(_close_all)


class _TraceFile:
    """A JSON array on disk that grows by whole batches and is complete after each."""

    TAIL = b"\n]\n"

    def __init__(self, path: str, first: str) -> None:
        self.path = os.path.abspath(path)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(error.errno, path) from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise _unwritable(errno.EINVAL, path, "not a regular file")
            os.ftruncate(self._fd, 0)
            self._write_at(0, b"[\n" + first.encode() + self.TAIL)
        except OSError as error:
            self.close()
            raise error if error.filename else _unwritable(error.errno, path) from None

    def append(self, events: Iterable[str]) -> None:
        """Write `events` over the final bracket, with a new one, in one call."""
        # The file's own size says where the end is: an interrupted call cannot leave us wrong.
        end = os.fstat(self._fd).st_size - len(self.TAIL)
        self._write_at(end, (",\n" + ",\n".join(events)).encode() + self.TAIL)

    def _write_at(self, offset: int, data: bytes) -> None:
        if os.pwrite(self._fd, data, offset) == len(data):
            return
        os.ftruncate(self._fd, offset)
        os.pwrite(self._fd, self.TAIL, offset)
        raise _unwritable(errno.ENOSPC, self.path)

    def close(self) -> None:
        """Close the file; nothing happens the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unwritable(number: int | None, path: str, reason: str = "") -> OSError:
    reason = reason or os.strerror(number or 0)
    return OSError(number, f"cannot write the timeline: {reason}", path)


class _Track:
    """One "process" of the trace: a tensor, the engine or the segments."""

    __slots__ = ("negotiating", "open", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.open = 0  # spans that have begun and not ended
        self.negotiating = False  # the one open span is a negotiation


class _Trace:
    """Turns records into events, and keeps every track well formed: each B gets its E.

    Recording can begin, and events can be lost, at any point of a tensor's life. What does not
    fit the state of its track is left out, and what it left open is closed.
    """

    def __init__(self, path: str, rank: int, clock_offset_seconds: float | None) -> None:
        self._rank = rank
        self._start_ns = time.monotonic_ns()
        self._start_epoch_us = time.time_ns() // 1000
        self._tracks: OrderedDict[str, _Track] = OrderedDict()
        self._pids = HEAD_PID
        self._quoted: dict[str, str] = {}
        self._events: list[str] = []
        self.file = _TraceFile(path, self._head(clock_offset_seconds))
        self._events.append(
            f'{{"name": "process_sort_index", "ph": "M", "pid": {HEAD_PID}, '
            '"args": {"sort_index": 0}}'
        )
        self.write()

    def write(self) -> None:
        """Append the events made since the last call to the file."""
        events, self._events = self._events, []
        if events:
            self.file.append(events)

    def finish(self, now: int) -> None:
        """Close every span that is open, and write."""
        self._end_all(now)
        self.write()

    def drop(self, now: int, count: int) -> None:
        """Say that `count` events are missing here."""
        self._end_all(now)
        self._events.append(
            f'{{"ph": "i", "name": "EVENTS_DROPPED", "ts": {self._ts(now)}, "pid": {HEAD_PID}, '
            f'"s": "g", "args": {{"count": {count}}}}}'
        )

    def clock_offset(self, now: int, seconds: float) -> None:
        self._events.append(self._head(seconds))

    # ---- tensors

    def negotiate_start(self, now: int, tensor: str, collective: str) -> None:
        track = self._track(tensor)
        if not track.negotiating:
            self._end_open(now, track)
            self._begin(now, track, NEGOTIATE_PREFIX + collective.upper())
            track.negotiating = True

    def rank_ready(self, now: int, tensor: str, rank: int) -> None:
        track = self._track(tensor)
        if track.negotiating:
            self._events.append(
                f'{{"ph": "X", "name": "{rank}", "ts": {self._ts(now)}, "pid": {track.pid}, '
                '"dur": 0}'
            )

    def negotiate_end(self, now: int, tensor: str) -> None:
        track = self._track(tensor)
        if track.negotiating:
            self._end_open(now, track)

    def start(self, now: int, tensor: str, collective: str) -> None:
        track = self._track(tensor)
        self._end_open(now, track)
        self._begin(now, track, collective.upper())

    def activity_start(self, now: int, tensors: Sequence[str], activity: str) -> None:
        for tensor in tensors:
            track = self._track(tensor)
            if track.open and not track.negotiating:
                self._begin(now, track, activity)

    def activity_end(self, now: int, tensors: Sequence[str]) -> None:
        for tensor in tensors:
            track = self._track(tensor)
            if track.open > 1:
                self._end(now, track)

    def end(self, now: int, tensor: str, dtype: str | None, shape: Sequence[int] | None) -> None:
        track = self._track(tensor)
        if track.negotiating:
            self._end_open(now, track)
        while track.open > 1:
            self._end(now, track)
        if track.open:
            self._end(now, track, _output(dtype, shape))

    # ---- the engine

    def engine(self, now: int, state: str | None) -> None:
        track = self._track(ENGINE_TRACK)
        self._end_open(now, track)
        if state is not None:
            self._begin(now, track, state)

    def mark_cycle(self, now: int) -> None:
        self._events.append(
            f'{{"ph": "i", "name": "CYCLE_START", "ts": {self._ts(now)}, "s": "g"}}'
        )

    def segment_start(
        self, now: int, names: Sequence[str], count: int, nbytes: int, collective: str
    ) -> None:
        track = self._track(SEGMENT_TRACK)
        self._end_open(now, track)
        args = {"tensors": count, "bytes": nbytes, "names": list(names)}
        self._begin(now, track, collective.upper(), f', "args": {json.dumps(args)}')
        self._count_bytes(now, track, nbytes)

    def segment_end(self, now: int) -> None:
        track = self._track(SEGMENT_TRACK)
        if track.open:
            self._end_open(now, track)
            self._count_bytes(now, track, 0)

    # ---- events

    def _ts(self, now: int) -> int:
        return max(0, now - self._start_ns) // 1000

    def _begin(self, now: int, track: _Track, name: str, args: str = "") -> None:
        track.open += 1
        self._events.append(
            f'{{"ph": "B", "name": {self._quote(name)}, "ts": {self._ts(now)}, '
            f'"pid": {track.pid}{args}}}'
        )

    def _end(self, now: int, track: _Track, args: str = "") -> None:
        track.open -= 1
        self._events.append(f'{{"ph": "E", "ts": {self._ts(now)}, "pid": {track.pid}{args}}}')

    def _end_open(self, now: int, track: _Track) -> None:
        while track.open:
            self._end(now, track)
        track.negotiating = False

    def _end_all(self, now: int) -> None:
        for track in self._tracks.values():
            self._end_open(now, track)

    def _count_bytes(self, now: int, track: _Track, nbytes: int) -> None:
        self._events.append(
            f'{{"ph": "C", "name": "bytes", "ts": {self._ts(now)}, "pid": {track.pid}, '
            f'"args": {{"bytes": {nbytes}}}}}'
        )

    def _quote(self, name: str) -> str:
        """`name` in JSON; only names of phases come here, and those are few."""
        if name not in self._quoted:
            self._quoted[name] = json.dumps(name)
        return self._quoted[name]

    def _track(self, name: str) -> _Track:
        track = self._tracks.get(name)
        if track is None:
            track = self._new_track(name)
        else:
            self._tracks.move_to_end(name)
        return track

    def _new_track(self, name: str) -> _Track:
        if len(self._tracks) >= TRACKS:
            _, oldest = self._tracks.popitem(last=False)
            self._end_open(time.monotonic_ns(), oldest)
        self._pids += 1
        sort_index = {ENGINE_TRACK: -2, SEGMENT_TRACK: -1}.get(name, self._pids)
        for what, value in (("name", json.dumps(name)), ("sort_index", str(sort_index))):
            self._events.append(
                f'{{"name": "process_{what}", "ph": "M", "pid": {self._pids}, '
                f'"args": {{"{what}": {value}}}}}'
            )
        track = self._tracks[name] = _Track(self._pids)
        return track

    def _head(self, clock_offset_seconds: float | None) -> str:
        args: dict[str, Any] = {
            "start_time_since_epoch_in_micros": self._start_epoch_us,
            "rank": self._rank,
            "start_monotonic_in_micros": self._start_ns // 1000,
        }
        if clock_offset_seconds is not None:
            args["clock_offset_in_micros"] = round(clock_offset_seconds * 1e6)
        event = {"name": "process_name", "ph": "M", "pid": HEAD_PID, "args": args}
        return json.dumps(event)


def _output(dtype: str | None, shape: Sequence[int] | None) -> str:
    args = {}
    if dtype is not None:
        args["dtype"] = dtype
    if shape is not None:
        args["shape"] = f"[{', '.join(map(str, shape))}]"
    return f', "args": {json.dumps(args)}' if args else ""
