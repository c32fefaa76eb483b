"""The world of a simulated job: virtual time, one seeded lot, and processes that run one at a time.

A process is a real thread in which blocking code of the product runs unchanged. It runs only while
it holds the baton. Where it would sleep, it lets the events of the world happen until one of them
says who goes on: often it is the same thread, and no other one has to wake up. Some events only the
thread of the world may see to, to which the baton goes back. So the world alone decides who goes on
next, and when. The same seed gives the same trace, to the byte.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from hvdlite.common.base.errors import HorovodInternalError

Action = Callable[[], object]
PAUSES = 1e-6, 5e-6, 2e-5, 1e-4, 2e-3
PAUSES_COUNT = len(PAUSES)
READING_SECONDS = 1e-8  # That pass between two looks at the clock.
STUCK_SECONDS = (
    60.0  # Twice as long is a limit of real time, in which a process may hold the baton.
)


@contextmanager
def in_place(stand_ins: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put things of the world in the place of the product's: an owner, a name in it, and each."""
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


class KilledError(HorovodInternalError):
    """What ends the thread of a process that was killed."""


class KilledThread(BaseException):
    """What ends a thread of a process that was killed."""


class BrokenError(AssertionError):
    """An invariant does not hold; `law` is its name, the same in all runs that break it."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"{law}: {text}")
        self.law = law


def _taken_lock() -> threading.Lock:
    """Return a lock that one thread takes when another one has released it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class World:
    """Virtual time and the events to come. Used by one thread at a time: whoever has the baton."""

    def __init__(self, seed: int) -> None:
        self.seed, self.lot = seed, random.Random(seed)
        self._draw, self._bits = self.lot.random, self.lot.getrandbits
        self.now = 0.0
        self.trace: list[tuple[float, str, str]] = []
        self.baton_is_back = _taken_lock()
        self.paused: Process | None = None  # Who went on last.
        self.goes_on: Process | None = None  # What an event has decided.
        self.turns = 0  # By which a thread that does not yield is told from a long job.
        # With numbers, so none are equal; the last field says whether any thread may see to it.
        self._events: list[tuple[float, int, Action, bool]] = []
        self._numbers = itertools.count()
        self._until: Callable[[], bool] = lambda: True
        self._error: BaseException | None = None
        self._processes: list[Process] = []

    def clock(self) -> float:
        """Return the time in seconds; code takes its time, however little it is."""
        self.now += READING_SECONDS
        return self.now

    def after(self, seconds: float, action: Action, *, anywhere: bool = False) -> None:
        """Let `action` happen in so many seconds; `anywhere` as for `at`."""
        event = (self.now + seconds, next(self._numbers), action, anywhere)
        heapq.heappush(self._events, event)

    def at(self, time: float, action: Action, *, anywhere: bool = False) -> None:
        """Let `action` happen at a time: what is due at the same one keeps its order.

        It happens `anywhere`, in the thread of a process that sleeps, if it neither begins nor
        kills one, nor asks in which thread it is.
        """
        heapq.heappush(self._events, (time, next(self._numbers), action, anywhere))

    def soon(self) -> float:
        """Draw how long a process takes until it goes on: mostly at once, now and then long."""
        draw, bits = self._draw, self._bits
        if draw() < 0.003:
            return 0.6 * draw()  # Less than who has lost a peer waits for the reason.
        number = bits(3)
        while number >= PAUSES_COUNT:
            number = bits(3)
        return PAUSES[number] * (1 + draw())

    def tell(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        self.trace.append((self.now, who, what))

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen until a condition holds, or none is left."""
        self._until = until
        while (process := self._happen(anywhere=False)) is not None:
            process.hand_over(self.baton_is_back)
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def next_process(self) -> Process | None:
        """Let events happen until a process goes on; return None where the world has to see on."""
        try:
            return self._happen(anywhere=True)
        except BaseException as error:
            self._error = error
            return None

    def _happen(self, *, anywhere: bool) -> Process | None:
        """Let events happen until a process goes on; return None if none will, or not here."""
        events, until, pop = self._events, self._until, heapq.heappop
        while True:
            if self.paused is not None:
                paused, self.paused = self.paused, None
                paused.on_pause()
            if not events or until() or (anywhere and not events[0][3]):
                return None
            time, _, action, _ = pop(events)
            self.now = max(self.now, time)
            action()
            if self.goes_on is not None:
                process, self.goes_on = self.goes_on, None
                self.paused = process
                self.turns += 1
                return process

    def process(self, name: str) -> Process:
        """Return a new process, which has not begun."""
        process = Process(self, name)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()

    def story(self) -> list[str]:
        """Return the trace as lines."""
        return [f"{time * 1000:12.3f} ms  {who:8} {what}" for time, who, what in self.trace]


class _Thread:
    """A thread that runs one function after the other: new ones take their time."""

    def __init__(self) -> None:
        self.function: Action = lambda: None
        self.go = _taken_lock()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            self.function()
            self.function = lambda: None
            _idle.append(self)


_idle: list[_Thread] = []


def in_a_thread(function: Action) -> None:
    """Run a function, which raises nothing, in a thread."""
    thread = _idle.pop() if _idle else _Thread()
    thread.function = function
    thread.go.release()


class Process:
    """Code that sleeps only by `sleep_until`, in a thread of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.killed = False
        self.ended = False
        self.stopped = False  # By a signal, which another one undoes.
        self.on_pause: Action = lambda: None  # Called when it has run for a while.
        self.end_of_killed: Callable[[], BaseException] = self._killed_error
        self._world = world
        self._go = _taken_lock()
        self._back: threading.Lock | None = None  # Of who waits until it sleeps or ends.
        self._sleeps = False
        self._ready: Callable[[], bool] = lambda: True  # What it sleeps for,
        self._until: float | None = None  # and no longer than until then.
        self._resuming = False  # It will be resumed soon.
        self._turn = 0  # Which of its sleeps it is: a timer of an earlier one does not count.

    def _killed_error(self) -> KilledError:
        return KilledError(f"{self.name} was killed", rank=-1)

    # -- called by the world

    def begin(self, start: Action) -> None:
        """Let `start` begin its thread, and run it up to its first sleep."""
        self._back = back = _taken_lock()
        start()
        self._wait_for(back)

    def poke(self) -> None:
        """Let it look soon whether it can go on."""
        if not self._resuming and self._sleeps and not self.ended:
            self._resuming = True
            self._world.after(self._world.soon(), self._resume, anywhere=True)

    def kill(self) -> None:
        """End it, without a word to others: whatever it waits for raises `KilledError`."""
        if not self.killed and not self.ended:
            self.killed = True
            if self._sleeps:
                self._back = _taken_lock()
                self.hand_over(self._back)

    def go_on(self) -> None:
        """Go on after a stop."""
        self.stopped = False
        self.poke()

    def _resume(self) -> None:
        self._resuming = False
        self._go_on_if_it_may()

    def _go_on_if_it_may(self) -> None:
        if self._sleeps and not self.ended and not self.is_stopped():
            # Others look for it, so that no thread wakes up for nothing.
            if self._ready() or (self._until is not None and self._world.now >= self._until):
                self._world.goes_on = self
            else:
                self.on_pause()

    def is_stopped(self) -> bool:
        """Return whether a signal keeps it from running."""
        return self.stopped

    def hand_over(self, back: threading.Lock) -> None:
        """Let it go on, and wait for the baton at `back`."""
        self.let_go()
        self._wait_for(back)

    def let_go(self) -> None:
        """Let it go on."""
        self._go.release()

    def _wait_for(self, back: threading.Lock) -> None:
        world, seen = self._world, -1
        # Twice: this process may be stopped by a signal for longer.
        while not back.acquire(timeout=STUCK_SECONDS):
            if seen == world.turns:
                name = (world.paused or self).name
                raise BrokenError("processes yield", f"{name} neither sleeps nor ends")
            seen = world.turns

    # -- called in its thread

    def sleep_until(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Sleep until `ready`, at most so many seconds; return whether it is."""
        world = self._world
        end = None if seconds is None else world.now + seconds
        timer = False
        while not self.killed:
            if ready():
                return True
            if end is not None:
                if world.now >= end:
                    return False
                if not timer:
                    timer = True
                    self._turn += 1
                    world.at(end, partial(self._time_is_up, self._turn), anywhere=True)
            self._ready, self._until = ready, end
            self._pass_on()
        raise self.end_of_killed()

    def _pass_on(self) -> None:
        """Sleep: let others run until it is told to go on."""
        self._sleeps = True
        if self._back is not None:
            back, self._back = self._back, None
            back.release()
            self._go.acquire()
        else:
            process = self._world.next_process()
            if process is None:
                self._world.baton_is_back.release()
            elif process is not self:
                process.let_go()
            if process is not self:
                self._go.acquire()
        self._sleeps = False

    def end(self) -> None:
        """Give the baton back for good."""
        if not self.ended:
            self.ended = True
            (self._back or self._world.baton_is_back).release()

    def _time_is_up(self, turn: int) -> None:
        if turn == self._turn:
            self._go_on_if_it_may()
