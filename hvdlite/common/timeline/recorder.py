"""The timeline: what the engine does with each tensor, as a Chrome trace (Perfetto, chrome://tracing).

    training thread, engine thread            writer thread
    timeline.start(...)  -> queue (bounded) -> Trace (state of each track) -> TraceFile (disk)

Recording costs one clock reading and one append; a disabled timeline costs one comparison. The
file is a JSON array that ends with ``]`` after every write, so that it loads whatever happens to
the process. Tensors are "processes" of the trace, with Horovod's event names:

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import PurePath
from typing import Any

from hvdlite.common.timeline.chrome_trace import Trace, TraceFile

QUEUE_EVENTS = 1 << 18  # what waits for the writer; some 50 MB when full
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
        self._trace: Trace | None = None
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
                trace = Trace(path, self.rank, self._clock_offset_seconds)
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
            self._put(Trace.clock_offset, seconds)

    # ---- tensors

    def negotiate_start(self, tensor: str, collective: str) -> None:
        """The first rank asks for `collective` (``"allreduce"``); again: nothing."""
        if self.enabled:
            self._put(Trace.negotiate_start, tensor, collective)

    def rank_ready(self, tensor: str, rank: int) -> None:
        """`rank` is ready for the tensor that is negotiated."""
        if self.enabled:
            self._put(Trace.rank_ready, tensor, rank)

    def negotiate_end(self, tensor: str) -> None:
        """All ranks are ready."""
        if self.enabled:
            self._put(Trace.negotiate_end, tensor)

    def start(self, tensor: str, collective: str) -> None:
        """The collective (or ``"error"``) begins for `tensor`."""
        if self.enabled:
            self._put(Trace.start, tensor, collective)

    def activity_start(self, tensors: Sequence[str], activity: str) -> None:
        """A phase, such as ``MEMCPY_IN_FUSION_BUFFER``, begins for all `tensors`."""
        if self.enabled:
            self._put(Trace.activity_start, tensors, activity)

    def activity_end(self, tensors: Sequence[str]) -> None:
        """The innermost phase of `tensors` ends."""
        if self.enabled:
            self._put(Trace.activity_end, tensors)

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
            self._put(Trace.end, tensor, dtype, shape)

    # ---- the engine

    def engine(self, state: str | None) -> None:
        """The engine is in `state` (``"WAIT"``) until the next call; None: in no state."""
        if self.enabled:
            self._put(Trace.engine, state)

    def mark_cycle(self) -> None:
        """The engine woke up; recorded only with ``mark_cycles``."""
        if self.enabled and self._mark_cycles:
            self._put(Trace.mark_cycle)

    def segment_start(self, names: Sequence[str], nbytes: int, collective: str) -> None:
        """The tensors `names`, `nbytes` in all, begin to travel together."""
        if self.enabled:
            self._put(Trace.segment_start, names[:NAMES_SHOWN], len(names), nbytes, collective)

    def segment_end(self) -> None:
        """The segment has arrived."""
        if self.enabled:
            self._put(Trace.segment_end)

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

    def _drain(self, trace: Trace) -> None:
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

    def _give_up(self, file: TraceFile, error: OSError) -> None:
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
