"""The channels between the launcher of an elastic job and its agents, over the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvdlite.common.connections.frames import pack, unpack
from tests.simulation.elastic.programs import FROM_LAUNCHER, TO_LAUNCHER

if TYPE_CHECKING:
    from tests.simulation.elastic.hosts import AgentProcess
    from tests.simulation.elastic.job import ElasticJob

# Of workers that the driver can count on no longer when it hears this.
LAST_WORDS = ("silent", "closed", "raised")


class Way:
    """What is between the launcher and one agent: two ends of a channel."""

    def __init__(self, job: ElasticJob, host: str) -> None:
        self.job, self.host = job, host
        self.ends: dict[int, End] = {}  # By the way that its words go.
        self.agent: AgentProcess | None = None  # Where it has come.
        self.lost_at: float | None = None  # With its host.
        self.is_known = False  # The agent, to the launcher.

    def happen(self, end: End, action: Callable[[], None]) -> None:
        """Let something happen at an end, and let who is there do what follows."""
        if end.way == TO_LAUNCHER:
            if self.agent is not None and self.agent.lives:
                self.job.here = self.agent
                action()
                self.agent.turn()
        else:
            self.job.wake(action)


def _other(way: int) -> int:
    return TO_LAUNCHER if way == FROM_LAUNCHER else FROM_LAUNCHER


class End:
    """One end. Has the methods of `Channel`, whose descriptors are a `Way` and a direction here."""

    def __init__(
        self, loop: object, between: Way, way: int, *, received: Callable[[str, list[Any]], None],
        ended: Callable[[], None], prologue: bytes = b"",
    ) -> None:  # fmt: skip
        self.way = way
        self.open = self.says = True
        self.queued_bytes = 0
        self._between, self._received, self._ended = between, received, ended
        self._world = between.job.world
        between.ends[way] = self

    def send_raw(self, data: bytes) -> None:
        """Only the words of a shell could come before."""

    def send(self, kind: str, *fields: Any) -> None:
        if self.says:
            if kind in LAST_WORDS:
                self._between.job.workers[fields[0]].ended = True
            head = pack((kind, *fields))
            self._carry(lambda end: end.hear(unpack(head)), len(head))

    def send_data(self, kind: str, *fields: Any, data: bytes) -> None:
        self.send(kind, *fields, data)

    def feed(self, messages: Iterator[tuple[Any, ...]], fed: Callable[[], None]) -> None:
        def feed_all() -> None:
            for message in messages:
                self.send(*message)
            fed()

        self._world.after(1e-4, lambda: self.says and self._between.happen(self, feed_all))

    def beat(self, now: float, silence_seconds: float) -> bool:
        """Return whether the other end was heard in time: beats come while the way is free."""
        silent = self._between.job.network.silence(self._between.host, _other(self.way))
        if self._between.lost_at is not None:
            silent = max(silent, self._world.now - self._between.lost_at)
        return silent < silence_seconds

    def close_writing(self) -> None:
        """Say no more: the other end, which hears that, closes."""
        if self.says:
            self.says = False
            self._carry(End.lose)

    def close(self) -> None:
        self.close_writing()
        self.open = False

    def _carry(self, action: Callable[[End], None], count: int = 1) -> None:
        between = self._between

        def arrive() -> None:
            other = between.ends.get(_other(self.way))
            if other is not None and other.open:  # Which it may close while its process is stopped.
                between.happen(other, lambda: action(other) if other.open else None)

        between.job.network.carry(between, between.host, self.way, arrive, count)

    def hear(self, message: list[Any]) -> None:
        self._between.is_known |= message[0] == "hello"
        self._received(message[0], message[1:])

    def lose(self) -> None:
        """See that the other end says no more."""
        if self.open:
            self.open = self.says = False
            self._ended()
