"""A driver in a thread of the test: it forms worlds of all workers that live."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdlite.common.connections.address import Address, listen
from hvdlite.common.connections.loop import Loop, readable
from hvdlite.common.driver_link import frames
from hvdlite.common.driver_link.server import WorkerServer

SECRET = "only this job knows it"
STOP = 4  # The kind of an interrupt at which the workers of these tests end.


class FakeDriver:
    """Forms a world when all workers that live are ready, and there are enough of them."""

    def __init__(
        self, folder: Path, size: int, *, hosts: Callable[[int], str] = lambda number: "a"
    ) -> None:
        self.address = f"unix:{folder}/driver"
        self.size = size  # The least size of the next world.
        self.admits = True  # Whether newcomers are in the next world without being ready.
        self.epoch = 0
        self.over = True  # Whether no world runs.
        self.members: list[int] = []
        self.living: list[int] = []
        self.commits: dict[int, int] = {}  # Of the workers that are ready.
        self.messages: list[tuple[int, list[Any]]] = []  # But those of GATHER.
        self.worlds: dict[int, tuple[int, ...]] = {}  # The numbers, by epoch.
        self.silent_from = (1 << 30, 0)  # The epoch and round that is not answered.
        self.changed = threading.Condition()
        self._hosts = hosts
        self._bodies: dict[tuple[int, int], dict[int, bytes]] = {}
        self._counts: dict[int, int] = {}
        self._notice = (0, 0)
        self._closed = False
        self._loop = Loop()
        listener = listen(Address(path=f"{folder}/driver"))
        self.server = WorkerServer(self._loop, listener, SECRET.encode(), self._said, self._ended)
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self._thread.start()

    def environment(self, number: int, rank: int = 0, size: int = 1) -> dict[str, str]:
        """The variables of a worker."""
        return {
            "HVDLITE_ELASTIC": "1", "HVDLITE_ELASTIC_DRIVER": self.address,
            "HVDLITE_WORKER": str(number), "HVDLITE_SECRET": SECRET,
            "HVDLITE_HOST_NAME": self._hosts(number),
            "HVDLITE_RANK": str(rank), "HVDLITE_SIZE": str(size),
        }  # fmt: skip

    # -- what tests do

    def do(self, command: Callable[[], None]) -> None:
        """Have `command` done by the driver's thread."""
        self._loop.post(command)

    def give_up(self, number: int, why: str = "it was silent") -> None:
        """Let a worker be lost although its connection stands."""
        self.do(lambda: self._lose(number, why))

    def hang_up(self, number: int) -> None:
        """Close the connection of a worker."""
        self.do(lambda: self.server._workers.pop(number).close())

    def notice(self, kind: int) -> None:
        """Want another world; the interrupt is raised in the next check. No-op between worlds."""

        def begin() -> None:
            if self.over:
                return
            self._notice, self._counts = (self._notice[0] + 1, kind), {}
            for number in self.members:
                self.server.send(number, [frames.NOTICE, *self._notice])

        self.do(begin)

    def send(self, number: int, *message: Any) -> None:
        """Send any message to a worker."""
        self.do(lambda: self.server.send(number, message))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until something is so."""
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "it did not come about"

    def wait_for_world(self, epoch: int) -> None:
        """Wait until a world was published."""
        self.wait_for(lambda: self.epoch >= epoch)

    def pending_rounds(self) -> set[tuple[int, int]]:
        """The rounds that were not answered though all ranks wait in them."""
        whole = len(self.members)
        return {key for key, bodies in self._bodies.items() if len(bodies) == whole}

    def close(self) -> None:
        """End; workers that are connected are told nothing."""
        if not self._closed:
            self._closed = True
            self._loop.wake()
            self._thread.join()
            self.server.close()
            self._loop.close()

    # -- the thread

    def _run(self) -> None:
        while not self._closed:
            readable(self._loop.fileno(), 0.1)  # Timers are less urgent.
            with self.changed:
                self._loop.run_once(0.0)
                self._form()
                self.changed.notify_all()

    def _said(self, number: int, message: list[Any]) -> None:
        kind = message[0]
        if kind != frames.GATHER:
            self.messages.append((number, message))
        if kind == frames.HELLO:
            self.living.append(number)
            if self.over or self.admits:
                self.commits[number] = 0
            else:
                members = [[each, self._hosts(each)] for each in (*self.members, number)]
                self.server.send(number, [frames.NEWCOMER, len(members) - 1, members])
        elif kind == frames.READY:
            self.commits[number] = message[2]
        elif kind == frames.GATHER:
            self._gather(number, *message[1:])
        elif kind == frames.CHECKS and message[1] == self._notice[0]:
            self._counts[number] = message[2]
            if self._counts.keys() >= set(self.members):
                decision = [frames.RAISE, self._notice[0], max(self._counts.values()) + 1]
                for member in self.members:
                    self.server.send(member, [*decision, self._notice[1]])
                self.over = True

    def _gather(self, number: int, epoch: int, round_: int, body: bytes) -> None:
        bodies = self._bodies.setdefault((epoch, round_), {})
        bodies[number] = body
        if epoch == self.epoch and len(bodies) == len(self.members):
            if (epoch, round_) == self.silent_from:
                return
            answer = [frames.BODIES, epoch, round_, [bodies[each] for each in self.members]]
            for member in self.members:
                self.server.send(member, answer)
            del self._bodies[epoch, round_]

    def _ended(self, number: int) -> None:
        self._lose(number, "it has died")

    def _lose(self, number: int, why: str) -> None:
        if number in self.living:
            self.living.remove(number)
        self.commits.pop(number, None)
        if number in self.members and not self.over:
            self._regroup(f"worker {number} is lost: {why}", self.members.index(number))

    def _regroup(self, sentence: str, rank: int | None) -> None:
        self.over = True
        for member in self.members:
            if member in self.living:
                self.server.send(member, [frames.REGROUP, self.epoch, sentence, rank])

    def _form(self) -> None:
        complete = self.commits.keys() >= set(self.living)
        if not self.over or not complete or len(self.living) < self.size:
            return
        old = [number for number in self.members if number in self.living]
        self.members = old + sorted(set(self.living) - set(old))
        newest = max(self.commits.values())
        root = next(r for r, each in enumerate(self.members) if self.commits[each] == newest)
        behind = [r for r, each in enumerate(self.members) if self.commits[each] < newest]
        members = tuple((number, self._hosts(number)) for number in self.members)
        self.epoch, self.over, self._notice = self.epoch + 1, False, (self._notice[0], 0)
        self.worlds[self.epoch] = tuple(self.members)
        self.commits.clear()
        for number in self.members:
            self.server.send(number, frames.world_frame(self.epoch, members, root, behind, newest))
