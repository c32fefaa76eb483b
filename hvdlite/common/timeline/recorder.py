"""The timeline: a Chrome trace of what the engine does with each tensor.

Perfetto and chrome://tracing display it.

    training thread, engine thread            writer thread
    timeline.start(...)  -> queue (bounded) -> TraceWriter (tracks) -> TraceFile (disk)

Recording costs one clock reading and one append; a disabled timeline costs one comparison. The
file is a JSON array that ends with ``]`` after every write, so that it can be loaded even after a
SIGKILL. Tensors are "processes" of the trace, with Horovod's event names:

    NEGOTIATE_ALLREDUCE  with a tick for each rank that is ready
    ALLREDUCE            with nested activities; ends with the tensor's dtype and shape
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import PurePath
from typing import Any

from hvdlite.common.timeline.chrome_trace import TraceFile, TraceWriter

QUEUE_EVENTS = 1 << 18  # the most events that wait for the writer: some 50 MB
BATCH_EVENTS = 4096  # formatted at a time, which bounds the memory of the writer
FLUSH_SECONDS = 0.1  # how long events gather before they are written
NAMES_SHOWN = 8  # the most tensors of a segment that the file names

log = logging.getLogger("hvdlite")


def path_of_rank(path: str, rank: int) -> str:
    """Return the file of `rank` when every rank writes one: ``a.json`` -> ``a.rank3.json``."""
    return insert_in_name(path, f".rank{rank}")


def path_of_world(path: str, epoch: int) -> str:
    """Return the file that is begun in a later world of a job: ``a.json`` -> ``a.world3.json``."""
    return insert_in_name(path, f".world{epoch}")


def insert_in_name(path: str, text: str) -> str:
    """Return `path` with `text` before its suffix; a folder without a name, such as ``.``, as is.

    Whoever opens the folder learns that it is one.
    """
    pure = PurePath(path)
    return str(pure.with_name(f"{pure.stem}{text}{pure.suffix}")) if pure.name else path


class Timeline:
    """The timeline of one rank; it can be switched on, to another file, and off at any time.

    All methods may be called from any thread. While `enabled` is False, recording methods do
    nothing. In a forked child a timeline is off and leaves the parent's file alone.
    """

    def __init__(self, rank: int, *, who: str = "", queue_events: int = QUEUE_EVENTS) -> None:
        """Make a timeline that is off; its queue holds at most `queue_events`.

        Errors name the process `who`, which is the rank unless it is said.
        """
        self.rank = rank
        self._who = who or f"rank {rank}"
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
        # Guards _trace, _writer and _dropped, and the popping end of the queue.
        self._lock = threading.RLock()
        self._trace: TraceWriter | None = None
        self._writer: threading.Thread | None = None
        self._wake = threading.Event()  # something is in the queue
        self._stopping = threading.Event()

    # ---- on and off

    @classmethod
    def open(cls, path: str, rank: int, mark_cycles: bool = False, *, who: str = "") -> Timeline:
        """Return a timeline that records to `path` from now on; raise as `record_to`."""
        timeline = cls(rank, who=who)
        timeline.record_to(path, mark_cycles)
        return timeline

    def record_to(self, path: str, mark_cycles: bool = False) -> None:
        """Record to the file `path`, which is overwritten; a file in use until now is completed.

        When `path` is in use already, only `mark_cycles` changes. Raises `OSError` that names path
        and process when it cannot be written; recording then goes on as before.
        """
        with self._lock:
            if not self.records_to(path):
                trace = TraceWriter(path, self.rank, self._clock_offset_seconds, self._who)
                self._finish_file()
                self._trace = trace
            self._mark_cycles = mark_cycles
            if self._writer is None:
                self._wake, self._stopping = threading.Event(), threading.Event()
                self._writer = threading.Thread(
                    target=self._write, args=(self._wake, self._stopping), daemon=True
                )
                self._writer.name = "hvdlite-timeline"
                self._writer.start()
            self.enabled = True

    def records_to(self, path: str) -> bool:
        return self._trace is not None and self._trace.file.path == os.path.abspath(path)

    def close(self) -> None:
        """Stop recording and complete the file; idempotent."""
        with self._lock:
            self.enabled = False
            writer, self._writer = self._writer, None
            self._stopping.set()
            self._wake.set()
            self._finish_file()
        if writer is not None and writer is not threading.current_thread():
            writer.join()

    def flush(self) -> None:
        """Write the events recorded until now; the writer does so ten times a second anyway."""
        with self._lock:
            if self._trace is not None:
                try:
                    self._drain(self._trace)
                except OSError as error:
                    self._give_up(self._trace.file, error)

    def set_clock_offset(self, seconds: float) -> None:
        """Set how many seconds ``time.monotonic()`` of rank 0 is ahead of this rank's.

        The file stores it, so that a merge can put the files of several ranks on one clock.
        """
        with self._lock:
            self._clock_offset_seconds = seconds
        if self.enabled:
            self._put(TraceWriter.clock_offset, seconds)

    # ---- tensors

    def negotiate_start(self, tensor: str, collective: str) -> None:
        """Record the first request for `collective` (``"allreduce"``); later ones are ignored."""
        if self.enabled:
            self._put(TraceWriter.negotiate_start, tensor, collective)

    def rank_ready(self, tensor: str, rank: int) -> None:
        """Record that `rank` is ready for the tensor under negotiation."""
        if self.enabled:
            self._put(TraceWriter.rank_ready, tensor, rank)

    def negotiate_end(self, tensor: str) -> None:
        if self.enabled:
            self._put(TraceWriter.negotiate_end, tensor)

    def start(self, tensor: str, collective: str) -> None:
        """Record that the collective (or ``"error"``) begins for `tensor`."""
        if self.enabled:
            self._put(TraceWriter.start, tensor, collective)

    def activity_start(self, tensors: Sequence[str], activity: str) -> None:
        """Record that a phase, such as ``MEMCPY_IN_FUSION_BUFFER``, begins for all `tensors`."""
        if self.enabled:
            self._put(TraceWriter.activity_start, tensors, activity)

    def activity_end(self, tensors: Sequence[str]) -> None:
        """Record that the innermost phase of `tensors` ends."""
        if self.enabled:
            self._put(TraceWriter.activity_end, tensors)

    def activity(self, tensors: Sequence[str], name: str) -> AbstractContextManager[None]:
        """Return a context manager that records its block as phase `name` of `tensors`."""
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
        """Record the end of the collective of `tensor`; its output has `dtype` and `shape`."""
        if self.enabled:
            self._put(TraceWriter.end, tensor, dtype, shape)

    # ---- the engine

    def engine(self, state: str | None) -> None:
        """Record that the engine is in `state` (``"WAIT"``) until the next call; None: in none."""
        if self.enabled:
            self._put(TraceWriter.engine, state)

    def receiving(self, *, sleeps: bool) -> AbstractContextManager[None]:
        """Mark a block in which the engine receives messages and may sleep; then it negotiates."""
        return self._receiving(sleeps) if self.enabled else _NOTHING

    @contextmanager
    def _receiving(self, sleeps: bool) -> Iterator[None]:
        self.engine(None if sleeps else "NEGOTIATE")
        yield
        self.mark_cycle()
        self.engine("NEGOTIATE")

    def mark_cycle(self) -> None:
        """Record that the engine woke up, if ``mark_cycles`` is on."""
        if self.enabled and self._mark_cycles:
            self._put(TraceWriter.mark_cycle)

    def segment_start(self, names: Sequence[str], nbytes: int, collective: str) -> None:
        """Record that the tensors `names`, `nbytes` in all, begin to be sent together."""
        if self.enabled:
            self._put(
                TraceWriter.segment_start, names[:NAMES_SHOWN], len(names), nbytes, collective
            )

    def segment_end(self) -> None:
        if self.enabled:
            self._put(TraceWriter.segment_end)

    def device_span(
        self, kind: str, collective: str, names: Sequence[str], start: float, end: float
    ) -> None:
        """Record when a device has run a segment, in seconds of `time.monotonic`."""
        if self.enabled:
            times = int(start * 1e9), int(end * 1e9)
            self._put(
                TraceWriter.device_span, kind, collective, names[:NAMES_SHOWN], len(names), *times
            )

    # ---- other spans

    def span_start(self, track: str, name: str) -> None:
        """Record that `name` begins on the track `track`, and what was open there ends."""
        if self.enabled:
            self._put(TraceWriter.span_start, track, name)

    def span_end(self, track: str, about: Mapping[str, Any]) -> None:
        """Record that the span of the track ends; the file says `about` of it."""
        if self.enabled:
            self._put(TraceWriter.span_end, track, about)

    # ---- worlds of an elastic job

    def end_rows(self) -> None:
        """Record that all that has begun ends here: the world is over."""
        if self.enabled:
            self._put(TraceWriter.end_rows)

    def reset(self, epoch: int, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Record that a world begins; `old` and `new` are rank and size before and in it."""
        if self.enabled:
            self._put(TraceWriter.reset, epoch, old, new)

    # ---- the queue and its writer

    def _put(self, action: Callable[..., None], *args: Any) -> None:
        if len(self._queue) >= self._bound:
            with self._lock:
                self._dropped += 1
            return
        self._queue.append((action, time.monotonic_ns(), args))
        if not self._wake.is_set():
            self._wake.set()

    def _write(self, wake: threading.Event, stopping: threading.Event) -> None:
        while True:
            wake.wait()
            wake.clear()  # First: a stop from here on is seen below, or wakes it again.
            if stopping.wait(FLUSH_SECONDS):  # more events gather meanwhile
                return
            self.flush()

    def _drain(self, trace: TraceWriter) -> None:
        """Write the events in the queue, then the number of events that were dropped."""
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

    def _give_up(self, file: TraceFile, error: OSError) -> None:
        """Switch the timeline off after an error such as a full disk; training goes on."""
        self.enabled = False
        file.close()
        self._trace = None
        self._queue.clear()
        log.warning("the timeline %s ends here: %s", file.path, error.strerror or error)


_NOTHING = nullcontext()
_timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()


def _disable_in_child() -> None:
    for timeline in list(_timelines):
        if timeline._trace is not None:
            timeline._trace.file.close()
        timeline._start_idle()


def _close_all() -> None:
    for timeline in list(_timelines):
        timeline.close()


os.register_at_fork(after_in_child=_disable_in_child)
atexit.register(_close_all)
