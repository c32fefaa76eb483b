"""What is between the launcher of an elastic job and its hosts: ways that are held up, or lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from hvdlite.launcher.agents.channel import BEATS
from tests.simulation.elastic.programs import FROM_LAUNCHER, SILENCE_SECONDS, TO_LAUNCHER
from tests.simulation.lines import Line, Wire
from tests.simulation.world import World


class Network:
    """The ways between the launcher and the hosts."""

    def __init__(self, world: World, bytes_per_second: float) -> None:
        self._world = world
        self._wires: dict[str, Wire] = defaultdict(partial(Wire, bytes_per_second))
        self._lines: dict[object, Line] = defaultdict(Line)
        self._stalls: dict[tuple[str, int], tuple[float, float]] = {}  # From when, until when.
        self.down: set[str] = set()  # Hosts that were lost.

    def stall(self, host: str, way: int, seconds: float) -> None:
        """Let nothing arrive for a while."""
        now = self._world.now
        for each in (TO_LAUNCHER, FROM_LAUNCHER):
            if way & each:
                since, until = self._stalls.get((host, each), (now, 0.0))
                if until <= now:  # A while after the last beat.
                    since = now - SILENCE_SECONDS / BEATS * self._world.lot.random()
                self._stalls[host, each] = since, max(until, now + seconds)

    def silence(self, host: str, way: int) -> float:
        """Return for how long nothing has arrived, beats included."""
        since, until = self._stalls.get((host, way), (0.0, 0.0))
        return self._world.now - since if until > self._world.now else 0.0

    def reaches(self, host: str) -> bool:
        """Return whether a new connection can be made."""
        ways = TO_LAUNCHER, FROM_LAUNCHER
        return host not in self.down and not any(self.silence(host, way) for way in ways)

    def carry(
        self, key: object, host: str, way: int, action: Callable[[], None], count: int = 1
    ) -> None:
        """Let `action` happen after all that has the same `key` and goes the same way.

        It comes with `count` bytes: all that the launcher sends goes over one wire.
        """
        wire = self._wires[host if way == TO_LAUNCHER else ""]
        left = wire.take(self._world.now, count)
        latency = 1e-4 * (0.5 + self._world.lot.random())
        until = self._stalls.get((host, way), (0.0, 0.0))[1]
        self._world.at(self._lines[key, way].arrival(left, latency, until), action)
