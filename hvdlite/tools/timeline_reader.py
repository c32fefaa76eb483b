"""The timeline reader: the events of a file one at a time, its head, and its problems."""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from hvdlite.common.timeline.chrome_trace import HEAD_PID, NEGOTIATE_PREFIX

Event = dict[str, Any]
MERGED_NAME = re.compile(r"(?:rank (\d+): )?(.*)", re.DOTALL)  # `merge` puts the rank before it.
KINDS = NEGOTIATION, QUEUE, EXCHANGE = "negotiation", "queue", "exchange"
TAIL_BYTES = 64  # read at the end of a file in search of the final bracket


class TimelineFormatError(ValueError):
    """The error that a file is no timeline; the message names the file and the place."""


class _LineError(TimelineFormatError):
    """The error that a line is not one whole event; `incomplete` where its newline is missing."""

    def __init__(self, message: str, incomplete: bool) -> None:
        super().__init__(message)
        self.incomplete = incomplete


def read_events(path: str) -> Iterator[Event]:
    """Yield the events of `path` in order.

    A file with one event a line, as hvdlite and Horovod write it, is read line by line, and memory
    holds one line. A kill may have cut it off: its whole lines are read, and `is_cut_off` reports
    it. A JSON array in another layout is read at once. Raises `OSError` when the file cannot be
    read and `TimelineFormatError` when it is not a JSON array of events.
    """
    with open(path, "rb") as file:
        try:
            yield from _events(file if file.seekable() else io.BytesIO(file.read()))
        except TimelineFormatError as error:
            raise TimelineFormatError(f"{path}: {error}") from None


def is_cut_off(path: str) -> bool:
    """Return whether the regular file `path` lacks the final bracket of a JSON array."""
    if not os.path.isfile(path):
        return False  # a pipe can be read only once
    with open(path, "rb") as file:
        return not _is_closed(file)


def _events(file: BinaryIO) -> Iterator[Event]:
    count = 0
    try:
        for event in _events_by_line(file):
            yield event
            count += 1
    except _LineError as error:
        # Another tool may have laid the file out anew. Without its final bracket it is no whole
        # array, and need not be read into memory.
        events = _read_array(file) if _is_closed(file) else None
        if events is not None:
            yield from map(_checked, events[count:])
        elif not (error.incomplete and count):  # otherwise the file is cut off
            raise


def _events_by_line(file: BinaryIO) -> Iterator[Event]:
    """Yield the event of each line.

    Raises `_LineError` for a line that is not one event, and `TimelineFormatError` for a file that
    does not begin as a JSON array.
    """
    opened = closed = False
    for number, line in enumerate(file, 1):
        text = line.strip()
        if not opened and text:
            if not text.startswith(b"["):
                shown = text[:20].decode("utf-8", "replace")
                raise TimelineFormatError(f"'[' expected at its beginning, not {shown!r}")
            opened, text = True, text[1:].lstrip()
        if not text:
            continue
        if closed:
            raise TimelineFormatError(f"line {number}: text after the final ']'")
        if text.endswith(b"]"):
            closed, text = True, text[:-1].rstrip()
        if text:
            try:
                event = _parse(text.removesuffix(b","))
            except (ValueError, RecursionError) as error:
                message = f"line {number} is not an event: {error}"
                raise _LineError(message, not line.endswith(b"\n")) from None
            yield _checked(event)
    if not opened:
        raise TimelineFormatError("'[' expected at its beginning: the file is empty")


def _read_array(file: BinaryIO) -> list[Any] | None:
    """Return the array that the whole file is; None where it is none."""
    file.seek(0)
    try:
        array = _parse(file.read())
    except (ValueError, RecursionError):
        return None
    return array if isinstance(array, list) else None


def _parse(text: bytes) -> Any:
    # Decoded here: `json.loads` guesses the encoding of bytes.
    return json.loads(text.decode("utf-8"))


def _is_closed(file: BinaryIO) -> bool:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - TAIL_BYTES, 0))
    return file.read().rstrip().endswith(b"]")


def _checked(event: Any) -> Event:
    """Return an event whose fields have the types that all readers rely on."""
    if not (
        isinstance(event, dict)
        and isinstance(event.get("pid", HEAD_PID), int)
        and isinstance(event.get("ts", 0), (int, float))
        and isinstance(event.get("args", {}), dict)
    ):
        raise TimelineFormatError(f"{event!r} is not an event")
    return event


@dataclass
class Head:
    """The description of a file by its own events; times are in microseconds."""

    rank: int | None = None
    start_epoch: int | None = None
    start_monotonic: int | None = None
    clock_offset: int | None = None  # how far rank 0's monotonic clock is ahead of this rank's
    names: dict[int, str] = field(default_factory=dict)  # the names of tracks, by pid

    def update(self, event: Event) -> None:
        """Adopt the description in `event`, if it has one; a later one replaces an earlier one."""
        args = event.get("args", {})
        if event.get("ph") != "M":
            return
        if "start_time_since_epoch_in_micros" in args:
            self.start_epoch = args["start_time_since_epoch_in_micros"]
            self.rank = args.get("rank", self.rank)
            self.start_monotonic = args.get("start_monotonic_in_micros")
            self.clock_offset = args.get("clock_offset_in_micros")
        if event.get("name") == "process_name" and "name" in args:
            self.names[event.get("pid", HEAD_PID)] = str(args["name"])

    @property
    def start_common(self) -> int | None:
        """The start of the file on rank 0's monotonic clock; None where the offset is unknown."""
        if self.start_monotonic is None or self.clock_offset is None:
            return None
        return self.start_monotonic + self.clock_offset


def split_name(name: str) -> tuple[int | None, str]:
    """Return the rank that a merge has put before the name of a track, and the rest."""
    match = MERGED_NAME.fullmatch(name)
    assert match is not None  # It takes any text.
    return (int(match[1]) if match[1] else None), match[2]


def read_head(path: str) -> Head:
    """Return the description of the whole file `path`; raise as `read_events`."""
    head = Head()
    for event in read_events(path):
        head.update(event)
    return head


@dataclass
class _Busy:
    """For how long any tensor of a rank has been in a kind of phase; times are in microseconds."""

    tensors: int = 0  # That are in it now.
    since: float = 0.0
    total: float = 0.0

    def change(self, tensors: int, now: float) -> None:
        """Take in that so many more tensors are in it."""
        if self.tensors > 0:
            self.total += now - self.since
        self.tensors, self.since = self.tensors + tensors, now


class TimeShares:
    """Where the time of each rank went, and which rank was the last to be ready."""

    def __init__(self) -> None:
        self._busy: dict[int | None, dict[str, _Busy]] = {}
        self._ready: dict[int, list[str]] = {}  # Ranks in the negotiation of a track, in order.
        self._times_last: Counter[str] = Counter()
        self._first, self._last = float("inf"), 0.0

    def update(self, event: Event, head: Head, stack: Sequence[str]) -> None:
        """Take in an event, before which the spans `stack` are open on its track."""
        phase, now, pid = event.get("ph"), event.get("ts", 0), event.get("pid", HEAD_PID)
        if phase != "M":
            self._first, self._last = min(self._first, now), max(self._last, now)
        number, track = split_name(head.names.get(pid, "["))
        depth = len(stack) - (phase == "E")
        if track.startswith("[") or phase not in ("B", "E", "X") or depth < 0:
            return
        if phase == "X":
            self._ready.setdefault(pid, []).append(str(event.get("name")))
            return
        rank = head.rank if number is None else number
        busy = self._busy.setdefault(rank, {kind: _Busy() for kind in KINDS})
        more, outermost = 1 if phase == "B" else -1, stack[0] if stack else str(event.get("name"))
        if outermost.startswith(NEGOTIATE_PREFIX):
            ready = [] if phase == "B" else self._ready.pop(pid, [])
            if len(ready) > 1:
                self._times_last[ready[-1]] += 1
            kinds = {NEGOTIATION: more}
        else:  # From the decision on, what is in no phase waits for its turn.
            kinds = [{QUEUE: more}, {QUEUE: -more, EXCHANGE: more}][depth] if depth < 2 else {}
        for kind, tensors in kinds.items():
            busy[kind].change(tensors, now)

    def lines(self) -> list[str]:
        """Return one line for each rank, and one on who was last most often."""
        whole, lines = max(self._last - self._first, 1.0), []
        for rank, kinds in sorted(self._busy.items(), key=lambda each: each[0] or 0):
            for each in kinds.values():
                each.change(0, self._last)
            shares = (f"{kind} {b.total / 1000:.1f} ms ({b.total / whole:.0%})"
                      for kind, b in kinds.items())  # fmt: skip
            who = "all ranks" if rank is None else f"rank {rank}"
            lines.append(f"{who}, of {whole / 1000:.1f} ms: {', '.join(shares)}")
        if self._times_last:
            (rank_name, times), count = self._times_last.most_common(1)[0], self._times_last.total()
            lines.append(f"last to be ready most often: rank {rank_name}, {times} of {count} times")
        return lines


@dataclass
class TimelineCheck:
    """The result of `check`."""

    events: int = 0
    tracks: int = 0
    collectives: int = 0
    dropped: int = 0  # events that found the queue full
    open_spans: int = 0  # spans without an end: the process was killed
    problems: list[str] = field(default_factory=list)
    time_shares: TimeShares = field(default_factory=TimeShares)  # Where the file is whole.


def check(events: Iterable[Event]) -> TimelineCheck:
    """Check that tracks have names, spans nest, and ready ranks appear in negotiations."""
    result, head = TimelineCheck(), Head()
    stacks: dict[int, list[str]] = {}
    for number, event in enumerate(events):
        head.update(event)
        result.time_shares.update(event, head, stacks.get(event.get("pid", HEAD_PID), ()))
        problem = _problem(event, head, stacks)
        if problem:
            result.problems.append(f"event {number}: {problem}: {json.dumps(event)}")
        result.events += 1
        if event.get("name") == "EVENTS_DROPPED":
            result.dropped += event.get("args", {}).get("count", 0)
        if event.get("ph") == "E" and "args" in event:
            result.collectives += 1
    if head.start_epoch is None:
        result.problems.append("no event says when the file began")
    result.tracks = len(head.names)
    result.open_spans = sum(len(stack) for stack in stacks.values())
    return result


def _problem(event: Event, head: Head, stacks: dict[int, list[str]]) -> str | None:
    phase = event.get("ph")
    if phase not in ("B", "E", "X", "i", "C", "M"):
        return f"unknown phase {phase!r}"
    if phase == "M":
        return None if "args" in event else "metadata without args"
    if not isinstance(event.get("ts"), int) or event["ts"] < 0:
        return "ts is no whole number of microseconds"
    if phase == "i":
        return None
    pid = event.get("pid")
    if pid not in head.names and pid != HEAD_PID:
        return f"pid {pid!r} has no name"
    return _span_problem(event, stacks.setdefault(pid, []))


def _span_problem(event: Event, stack: list[str]) -> str | None:
    phase, name = event["ph"], event.get("name")
    if phase == "E":
        if not stack:
            return "the end of what has not begun"
        stack.pop()
        return None
    if not isinstance(name, str):
        return "no name"
    if phase == "B":
        stack.append(name)
    elif (
        phase == "X"
        and not event.get("dur")
        and not (stack and stack[-1].startswith(NEGOTIATE_PREFIX))
    ):
        return "a rank is ready outside a negotiation"
    return None
