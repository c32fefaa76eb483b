"""What is between the launcher of an elastic job and its hosts: ways that are held up, or lost."""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.launcher.agents.channel import BEATS
from tests.simulation.elastic.programs import FROM_LAUNCHER, SILENCE_SECONDS, TO_LAUNCHER
from tests.simulation.world import World


class Network:
    """The ways between the launcher and the hosts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._busy: dict[object, float] = {}
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

    def carry(self, key: object, host: str, way: int, action: Callable[[], None]) -> None:
        """Let `action` happen after all that has the same `key` and goes the same way."""
        at = self._world.now + 1e-4 * (0.5 + self._world.lot.random())
        until = self._stalls.get((host, way), (0.0, 0.0))[1]
        at = self._busy[key, way] = max(at, until, self._busy.get((key, way), 0.0))
        self._world.at(at, action)
