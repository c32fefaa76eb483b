"""The timeline's file: events in Chrome's trace format, with the event names of Horovod.

This module has no threads and no queues: `TraceWriter` receives timed records in order.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ENGINE_TRACK = "[engine]"  # the track of the engine thread's states
SEGMENT_TRACK = "[segments]"  # the track of segments, with their bytes
HEAD_PID = 0  # the "process" of events that describe the whole file
NEGOTIATE_PREFIX = "NEGOTIATE_"
TRACKS = 1 << 15  # the most open tracks; the least recently used one is dropped


class TraceFile:
    """A JSON array on disk, one event a line, that is complete after each batch of events."""

    TAIL = b"\n]\n"

    def __init__(self, path: str, first: str, who: str) -> None:
        """Replace the file `path` by an array of the event `first`.

        Raises `OSError` that names the path and `who` it is that cannot write there, or finds no
        regular file.
        """
        self.path = os.path.abspath(path)
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            os.ftruncate(self._fd, 0)
            self._write_at(0, b"[\n" + first.encode() + self.TAIL)
        except OSError as error:
            self.close()
            why = f"{who} cannot write the timeline: {error.strerror}"
            raise OSError(error.errno, why, path) from None

    def append(self, events: Iterable[str]) -> None:
        """Overwrite the final bracket with `events` and a new bracket, in one system call."""
        # The file's size is the position: a count of our own would be wrong after a failed call.
        end = os.fstat(self._fd).st_size - len(self.TAIL)
        self._write_at(end, (",\n" + ",\n".join(events)).encode() + self.TAIL)

    def _write_at(self, offset: int, data: bytes) -> None:
        if os.pwrite(self._fd, data, offset) == len(data):
            return
        # The disk is full: drop the partial batch, so that the file stays complete JSON.
        os.ftruncate(self._fd, offset)
        os.pwrite(self._fd, self.TAIL, offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Track:
    """The state of one "process" of the trace: a tensor, the engine or the segments."""

    __slots__ = ("negotiating", "open", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.open = 0  # the depth of nested spans that have begun and not ended
        self.negotiating = False  # whether the only open span is a negotiation


class TraceWriter:
    """The conversion of timeline records to events, in which every B event gets its E event.

    Recording can begin, and records can be lost, at any point of a tensor's life. A record that
    does not fit the state of its track is left out, and spans that it should have ended are ended.
    The methods for tensors and the engine mirror those of `Timeline`; their first argument is the
    time `now` in monotonic nanoseconds.
    """

    def __init__(
        self, path: str, rank: int, clock_offset_seconds: float | None, who: str
    ) -> None:  # fmt: skip
        """Write to the file `path`; the clock offset is None where it is not yet measured.

        Errors name the process `who`.
        """
        self._rank = rank
        self._start_ns = time.monotonic_ns()
        self._start_epoch_us = time.time_ns() // 1000
        self._last_ts = 0
        self._tracks: OrderedDict[str, _Track] = OrderedDict()
        self._pids = HEAD_PID  # the last pid in use
        self._quoted: dict[str, str] = {}  # JSON strings by name: phases recur in every step
        self._events: list[str] = []
        self.file = TraceFile(path, self._head(clock_offset_seconds), who)
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
        """End every open span, and append the events to the file."""
        self.end_rows(now)
        self.write()

    def drop(self, now: int, count: int) -> None:
        """Record that `count` events are missing here."""
        self.end_rows(now)
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
            args = {}
            if dtype is not None:
                args["dtype"] = dtype
            if shape is not None:
                args["shape"] = f"[{', '.join(map(str, shape))}]"
            self._end(now, track, f', "args": {json.dumps(args)}' if args else "")

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

    def device_span(
        self,
        now: int,
        kind: str,
        collective: str,
        names: Sequence[str],
        count: int,
        start: int,
        end: int,
    ) -> None:
        """See `Timeline.device_span`. It is over already, so that one event says all."""
        if end <= self._start_ns:  # It was over before the file began.
            return
        start = max(start, self._start_ns)
        track = self._track(f"[device {kind}]")
        args = {"tensors": count, "names": list(names)}
        begin = (start - self._start_ns) // 1000
        self._events.append(
            f'{{"ph": "X", "name": "{collective.upper()}", "ts": {begin}, "pid": {track.pid}, '
            f'"dur": {max((end - start) // 1000, 1)}, "args": {json.dumps(args)}}}'
        )

    # ---- other spans

    def span_start(self, now: int, track: str, name: str) -> None:
        found = self._track(track)
        self._end_open(now, found)
        self._begin(now, found, name)

    def span_end(self, now: int, track: str, about: Mapping[str, Any]) -> None:
        found = self._track(track)
        if found.open:
            self._end(now, found, f', "args": {json.dumps(about)}')

    # ---- worlds of an elastic job

    def end_rows(self, now: int) -> None:
        """End every open span."""
        for track in self._tracks.values():
            self._end_open(now, track)

    def reset(self, now: int, epoch: int, old: tuple[int, int], new: tuple[int, int]) -> None:
        self.end_rows(now)
        places = {"old_rank": old[0], "old_size": old[1], "rank": new[0], "size": new[1]}
        self._events.append(
            f'{{"ph": "i", "name": "RESET", "ts": {self._ts(now)}, "pid": {HEAD_PID}, "s": "g", '
            f'"args": {json.dumps({"world": epoch, **places})}}}'
        )

    # ---- events

    def _ts(self, now: int) -> int:
        # Two threads may read the clock in one order and append in the other: never go back.
        self._last_ts = max(self._last_ts, (now - self._start_ns) // 1000)
        return self._last_ts

    def _begin(self, now: int, track: _Track, name: str, args: str = "") -> None:
        track.open += 1
        quoted = self._quoted.get(name)
        if quoted is None:
            quoted = self._quoted[name] = json.dumps(name)
        self._events.append(
            f'{{"ph": "B", "name": {quoted}, "ts": {self._ts(now)}, "pid": {track.pid}{args}}}'
        )

    def _end(self, now: int, track: _Track, args: str = "") -> None:
        track.open -= 1
        self._events.append(f'{{"ph": "E", "ts": {self._ts(now)}, "pid": {track.pid}{args}}}')

    def _end_open(self, now: int, track: _Track) -> None:
        while track.open:
            self._end(now, track)
        track.negotiating = False

    def _count_bytes(self, now: int, track: _Track, nbytes: int) -> None:
        self._events.append(
            f'{{"ph": "C", "name": "bytes", "ts": {self._ts(now)}, "pid": {track.pid}, '
            f'"args": {{"bytes": {nbytes}}}}}'
        )

    def _track(self, name: str) -> _Track:
        track = self._tracks.get(name)
        if track is not None:
            self._tracks.move_to_end(name)
            return track
        if len(self._tracks) >= TRACKS:
            _, oldest = self._tracks.popitem(last=False)
            self._end_open(time.monotonic_ns(), oldest)
        self._pids += 1
        sort_index = {ENGINE_TRACK: -2, SEGMENT_TRACK: -1}.get(name, self._pids)
        for key, value in (("name", json.dumps(name)), ("sort_index", str(sort_index))):
            self._events.append(
                f'{{"name": "process_{key}", "ph": "M", "pid": {self._pids}, '
                f'"args": {{"{key}": {value}}}}}'
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
