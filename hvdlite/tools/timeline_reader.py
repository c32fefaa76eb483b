"""Reading timelines: events one at a time, the head of a file, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hvdlite.common.timeline.chrome_trace import HEAD_PID, NEGOTIATE_PREFIX

Event = dict[str, Any]
READ_CHARACTERS = 1 << 18
EVENT_CHARACTERS = 1 << 20  # no event is longer
SPACE = " \t\r\n"


class TimelineFormatError(ValueError):
    """A file is no timeline; the text names the file and what is wrong."""


def read_events(path: str) -> Iterator[Event]:
    """The events of `path` in order, holding a part of the file at a time.

    Raises `OSError` when it cannot be read and `TimelineFormatError` when it is not a JSON array
    of events; an array that is cut off, as Horovod's may be, is an error at its end.
    """
    with open(path, encoding="utf-8") as file:
        try:
            yield from _events(_Text(file))
        except UnicodeDecodeError as error:
            raise TimelineFormatError(f"{path}: not text in UTF-8 ({error.reason})") from None
        except TimelineFormatError as error:
            raise TimelineFormatError(f"{path}: {error}") from None


class _Text:
    """A file as a buffer that is refilled at its end and dropped at its front."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._dropped = 0
        self.buffer = ""
        self.at = 0

    @property
    def position(self) -> int:
        """Characters before `at`, since the start of the file."""
        return self._dropped + self.at

    def refill(self) -> bool:
        """Read on; False at the end of the file."""
        more = self._file.read(READ_CHARACTERS)
        self._dropped += self.at
        self.buffer, self.at = self.buffer[self.at :] + more, 0
        return bool(more)

    def peek(self) -> str:
        """The next character that is no space, or "" at the end; it is not consumed."""
        while True:
            while self.at < len(self.buffer):
                if self.buffer[self.at] not in SPACE:
                    return self.buffer[self.at]
                self.at += 1
            if not self.refill():
                return ""

    def expect(self, wanted: str) -> str:
        """Consume the next character, which must be one of `wanted`."""
        found = self.peek()
        if not found or found not in wanted:
            choice = " or ".join(repr(each) for each in wanted)
            what = repr(found) if found else "the file ends"
            raise TimelineFormatError(f"{choice} expected at character {self.position}, {what}")
        self.at += 1
        return found


def _events(text: _Text) -> Iterator[Event]:
    text.expect("[")
    if text.peek() == "]":
        text.expect("]")
    else:
        yield _event(text)
        while text.expect(",]") == ",":
            yield _event(text)
    if text.peek():
        raise TimelineFormatError(f"text after the final ']' at character {text.position}")


def _event(text: _Text) -> Event:
    text.peek()
    while True:
        try:
            event, text.at = json.JSONDecoder().raw_decode(text.buffer, text.at)
            break
        except json.JSONDecodeError as error:
            start = text.position
            if len(text.buffer) - text.at > EVENT_CHARACTERS or not text.refill():
                message = f"{error.msg} in the event at character {start}"
                raise TimelineFormatError(message) from None
    if not _is_event(event):
        raise TimelineFormatError(f"{event!r} before character {text.position} is not an event")
    return event  # type: ignore[no-any-return]


def _is_event(value: Any) -> bool:
    """Whether the fields of `value` have the types that all readers rely on."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("pid", HEAD_PID), int)
        and isinstance(value.get("ts", 0), (int, float))
        and isinstance(value.get("args", {}), dict)
    )


@dataclass
class Head:
    """What a file says about itself; times are in microseconds."""

    rank: int | None = None
    start_epoch: int | None = None
    start_monotonic: int | None = None
    clock_offset: int | None = None  # of rank 0's monotonic clock, ahead of this rank's
    names: dict[int, str] = field(default_factory=dict)  # of the tracks, by pid

    def read(self, event: Event) -> None:
        """Take what `event` says; the last word counts."""
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
        """When the file began, on rank 0's monotonic clock."""
        if self.start_monotonic is None or self.clock_offset is None:
            return None
        return self.start_monotonic + self.clock_offset


def read_head(path: str) -> Head:
    """What the whole file `path` says about itself; raises as `read_events`."""
    head = Head()
    for event in read_events(path):
        head.read(event)
    return head


@dataclass
class Report:
    """What `check` found."""

    events: int = 0
    tracks: int = 0
    collectives: int = 0
    dropped: int = 0  # events that found no place in the queue
    open_spans: int = 0  # begun and not ended: the process was killed
    problems: list[str] = field(default_factory=list)


def check(events: Iterable[Event]) -> Report:
    """Whether `events` make a timeline: named tracks, spans that nest, ticks in negotiations."""
    report, head = Report(), Head()
    stacks: dict[int, list[str]] = {}
    for number, event in enumerate(events):
        head.read(event)
        problem = _problem(event, head, stacks)
        if problem:
            report.problems.append(f"event {number}: {problem}: {json.dumps(event)}")
        report.events += 1
        if event.get("name") == "EVENTS_DROPPED":
            report.dropped += event.get("args", {}).get("count", 0)
        if event.get("ph") == "E" and "args" in event:
            report.collectives += 1
    if head.start_epoch is None:
        report.problems.append("no event says when the file began")
    report.tracks = len(head.names)
    report.open_spans = sum(len(stack) for stack in stacks.values())
    return report


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
    elif phase == "X" and not (stack and stack[-1].startswith(NEGOTIATE_PREFIX)):
        return "a rank is ready outside a negotiation"
    return None
