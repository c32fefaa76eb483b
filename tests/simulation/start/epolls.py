"""What the loops of the product wait with, in a world."""

from __future__ import annotations

import select

from tests.simulation.start.net import here
from tests.simulation.world import Process

READ, ERROR = select.EPOLLIN, select.EPOLLERR


class Epoll:
    """Has the methods of `select.epoll`."""

    def __init__(self) -> None:
        self._node = here.node
        self._masks: dict[int, int] = {}
        self._number = self._node.take(self)
        self._sleeper: Process | None = None

    def register(self, number: int, events: int) -> None:
        self._masks[number] = events
        self._node.open[number].epolls[self] = None
        self.poke()

    def modify(self, number: int, events: int) -> None:
        self._masks[number] = events
        self.poke()

    def unregister(self, number: int) -> None:
        if self._node.lives:
            del self._masks[number]
            del self._node.open[number].epolls[self]

    def drop(self, number: int) -> None:
        """Forget what was closed."""
        self._masks.pop(number, None)

    def poke(self) -> None:
        if self._sleeper is not None:
            self._sleeper.poke()

    def _ready(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        if not self._node.lives:
            return found
        for number, mask in self._masks.items():
            events = self._node.open[number].events() & (mask | ERROR)
            if events:
                found.append((number, events))
        return found

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self._sleeper = process = here.process
        process.sleep_until(lambda: bool(self._ready()), timeout)
        self._sleeper = None
        ready = self._ready()
        if len(ready) > 1:
            self._node.net.world.lot.shuffle(ready)
        return ready

    def close(self) -> None:
        self._node.open.pop(self._number, None)
        for number in self._masks:
            if number in self._node.open:
                self._node.open[number].epolls.pop(self, None)


class _Flag:
    """What the kernel has of an event."""

    def __init__(self) -> None:
        self.is_set = False
        self.epolls: dict[Epoll, None] = {}

    def events(self) -> int:
        return READ if self.is_set else 0

    def close(self) -> None:
        """It is gone with the last reference to it."""


class Event:
    """Has the methods of what ends the sleep of a loop; closed with the last reference to it."""

    def __init__(self) -> None:
        self._flag, self._node = _Flag(), here.node
        self.number = self._node.take(self._flag)

    def set(self) -> None:
        self._flag.is_set = True
        for epoll in self._flag.epolls:
            epoll.poke()

    def clear(self) -> None:
        self._flag.is_set = False

    def __del__(self) -> None:
        if self._node.lives:
            self._node.open.pop(self.number, None)
