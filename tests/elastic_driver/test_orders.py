"""Events in all orders: never two worlds of one epoch, never a dead member, always an end.

The simulation asserts the first two laws whenever a world is published. Workers answer only when
it is their turn, so that every answer may come before or after every other event.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.simulation.elastic.by_hand import JobByHand, Puppet

ANSWER, KILL, RAISE, RETURN, CLOSE, STOP = "answer", "kill", "raise", "return", "close", "stop"
BEGIN = "begin to raise"  # The process ends at its next answer.
Event = tuple[str, Any]


class Puppets(JobByHand):
    """Its workers keep what they are told until their turn comes."""

    def __init__(self, *arguments: Any, **plan: Any) -> None:
        self.unread: dict[int, list[list[Any]]] = {}
        self.heard = 0  # How often the driver has heard of anything.
        self.played: list[Event] = []  # The events that have changed something, in their order.
        self.greeted: set[int] = set()
        super().__init__(**plan)
        self.slow_workers = True
        self.discover(*arguments)

    def event(self, name: str, *arguments: Any) -> None:
        self.heard += 1
        super().event(name, *arguments)

    def hear(self, process: Puppet, frame: list[Any]) -> None:
        if frame[0] == "world":
            super().hear(process, frame)
        else:
            process.frames.append(frame)
        self.unread.setdefault(process.number, []).append(frame)

    def answer(self, number: int) -> None:
        """Let a worker say all that it has to say."""
        process = self.processes[number]
        if not process.lives:
            return
        if any(process.ended):
            self.kill(number)
            return
        if process.cause:
            self.end_by_exception(number)
            return
        if number not in self.greeted:
            self.greeted.add(number)
            self.hello(number)
            return
        frames, self.unread[number] = self.unread.get(number, []), []
        for frame in frames:
            if process.lives:
                self.react(process, frame)

    def react(self, process: Puppet, frame: list[Any]) -> None:
        match frame:
            case ["newcomer", *_]:
                self.ready(process.number)
            case ["regroup", epoch, *_] if epoch == process.epoch and process.in_world:
                self.ready(process.number)
            case ["raise", *_] if process.in_world:
                self.ready(process.number, process.commit + 1)
            case ["notice", counter, _]:
                self.event("worker_said", process.number, ["checks", counter, process.number])
            case ["end", code, _]:
                self.end(process.number, code)

    def play(self, event: Event) -> None:
        """Let an event happen, if it can."""
        before = self.heard, sum(map(len, self.unread.values()))
        self.play_if_possible(event)
        if (self.heard, sum(map(len, self.unread.values()))) != before:
            self.played.append(event)

    def play_if_possible(self, event: Event) -> None:
        kind, what = event
        if self.finish is not None:
            return
        if kind == "discovered":
            self.discover(dict(what))
        elif kind == "agent_leaving":
            self.event(kind, *what)
        elif kind == "host":
            if what in self.agents:
                self.lose_host(what)
        elif kind == "pass":
            self.wait(what)
        elif what in self.processes and self.processes[what].lives:
            self.play_worker(kind, what)

    def play_worker(self, kind: str, number: int) -> None:
        match kind:
            case "answer":
                self.answer(number)
            case "return":
                self.end(number, 0)
            case "raise":
                self.end(number, 1, "ValueError")
            case "begin to raise":
                self.begin_to_raise(number)
            case "kill":
                self.kill(number)
            case "close":
                self.event("worker_closed", number)
            case "stop":
                self.event("worker_stopped", number)

    def settle_down(self) -> None:
        """Let all workers answer and time pass until nothing changes, then let the ranks return."""
        for _ in range(40):
            if self.finish is not None:
                return
            before = len(self.processes), len(self.worlds)
            for number in list(self.processes):
                for _ in range(3):
                    if self.finish is None:
                        self.answer(number)
            if (len(self.processes), len(self.worlds)) == before and not self.waiting():
                break
            if self.finish is None:
                self.wait(1.5)
        for number in self.members:
            if self.finish is None and self.processes[number].lives:
                self.end(number, 0)

    def waiting(self) -> bool:
        living = [number for number in self.members if self.processes[number].lives]
        return not living or not all(self.processes[number].in_world for number in living)


def play(events: Sequence[Event], start: Sequence[Event], **plan: Any) -> Puppets:
    job = begin([*start, *events], **plan)
    end(job, events)
    return job


def begin(events: Sequence[Event], **plan: Any) -> Puppets:
    plan = {"num_proc": 3, "min_np": 1, "elastic_timeout": 20, "cooldown": (1, 4), **plan}
    job = Puppets({"a": 2, "b": 1}, **plan)
    for event in events:
        job.play(event)
    return job


def end(job: Puppets, events: Sequence[Event]) -> None:
    job.settle_down()
    assert job.finish is not None, (events, job.lines[-3:], job.worlds)
    if job.finish.code == 0:
        assert set(job.members) <= set(job.finish.results)
    else:
        assert job.finish.sentence


def play_in_all_orders(events: Sequence[Event], start: Sequence[Event], **plan: Any) -> int:
    """Play an even number of events in all orders; return how many different jobs have ended.

    Orders that differ only in events which change nothing are one: such an event comes too early
    or too late, as the answer of a worker that has not started.
    """
    seen: set[tuple[tuple[Event, ...], tuple[Event, ...]]] = set()
    jobs = 0
    unfinished: list[tuple[tuple[Event, ...], tuple[Event, ...]]] = [(tuple(start), tuple(events))]
    while unfinished:
        done, left = unfinished.pop()
        job = begin(done, **plan)
        state = tuple(job.played), tuple(sorted(left, key=repr))
        if state in seen:
            continue
        seen.add(state)
        if not left:
            end(job, done)
            jobs += 1
        for two in set(itertools.permutations(left, 2)):  # One is too few to pay for the replay.
            others = list(left)
            for event in two:
                others.remove(event)
            unfinished.append(((*job.played, *two), tuple(others)))
    return jobs


RUNNING = [(ANSWER, number) for number in range(3)]
SHRUNK = (("a", 2),)
GROWN = (("a", 2), ("b", 1), ("c", 1))
MOVED = (("b", 1), ("c", 2))
SAME = (("a", 2), ("b", 1))
# Each has events of which some are answers that the others make possible.
SETS: dict[str, list[Event]] = {
    "the start": [*RUNNING, (KILL, 1), (ANSWER, 3), ("host", "b"), (RETURN, 2)],
    "two deaths": [(KILL, 0), (KILL, 2), (ANSWER, 1), (ANSWER, 3), (ANSWER, 4), (ANSWER, 1)],
    "growth and a death": [
        ("discovered", GROWN), (ANSWER, 3), (ANSWER, 3), *RUNNING[:2], (KILL, 2),
    ],
    "growth and a dead newcomer": [
        ("discovered", GROWN), (ANSWER, 3), (ANSWER, 3), *RUNNING[1:], (KILL, 3),
    ],
    "a removal and a death": [("discovered", SHRUNK), *RUNNING, (KILL, 0), (ANSWER, 1)],
    "a move": [("discovered", MOVED), *RUNNING, (ANSWER, 3), (ANSWER, 4)],
    "returns and a death": [(RETURN, 0), (RETURN, 1), (KILL, 2), *RUNNING[:2], (ANSWER, 3)],
    "exceptions": [(BEGIN, 0), (ANSWER, 0), (BEGIN, 2), *RUNNING[1:], (ANSWER, 3)],
    "an exception and a death": [(BEGIN, 1), (KILL, 0), *RUNNING[1:], ("host", "b"), (ANSWER, 3)],
    "silence": [(STOP, 0), (CLOSE, 1), ("pass", 3), *RUNNING, (RETURN, 1)],
    "a host that goes": [
        ("agent_leaving", ("b", "SIGTERM")), ("host", "b"), *RUNNING, (RAISE, 1),
    ],
}  # fmt: skip
PLANS: list[dict[str, Any]] = [
    {},
    {"failures_by_host": True, "admit": "wait"},
    {"min_np": 3, "reset_limit": 2},
]


def every_set() -> Iterator[Any]:
    """Each set with the first plan and one of the others; the rest is for the soak."""
    for number, name in enumerate(SETS):
        for plan in range(len(PLANS)):
            is_rare = plan not in (0, 1 + number % (len(PLANS) - 1))
            yield pytest.param(name, plan, marks=[pytest.mark.soak] if is_rare else [])


@pytest.mark.parametrize(("name", "plan"), list(every_set()))
def test_events_in_all_orders(name: str, plan: int) -> None:
    start = [] if name == "the start" else RUNNING
    assert play_in_all_orders(SETS[name][:6], start, **PLANS[plan]) > 5


def test_eight_events_in_all_orders() -> None:
    """A rank dies while hosts change, and its replacement and a newcomer arrive meanwhile."""
    events = [("discovered", GROWN), (KILL, 1), *[(ANSWER, 3)] * 2, *[(ANSWER, 4)] * 2]
    events += [(ANSWER, 0)] * 2
    assert play_in_all_orders(events, RUNNING) > 500


ALPHABET: list[Event] = [
    *[(kind, number) for kind in (ANSWER, KILL, RETURN) for number in range(6)],
    *[(kind, number) for kind in (RAISE, BEGIN, CLOSE, STOP) for number in range(4)],
    *[(ANSWER, number) for number in range(6)] * 3,
    *[("discovered", hosts) for hosts in (SAME, SHRUNK, GROWN, MOVED, ())],
    *[("host", host) for host in "abc"],
    ("agent_leaving", ("a", "SIGTERM")),
    *[("pass", seconds) for seconds in (0.06, 1.1, 3.0, 12.0)],
]


def sequences(count: int, length: int, seed: int = 0) -> Iterator[list[Event]]:
    chance = random.Random(100 * seed + length)
    for _ in range(count):
        yield chance.choices(ALPHABET, k=length)


@pytest.mark.parametrize("plan", range(len(PLANS)))
@pytest.mark.parametrize("length", [8, 24])
def test_random_events(length: int, plan: int) -> None:
    for events in sequences(200, length):
        play(events, RUNNING if len(events) % 2 else RUNNING[:2], **PLANS[plan])
