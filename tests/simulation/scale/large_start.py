"""How a job of thousands of ranks meets, in a world: a launcher, agents, and workers.

The launcher runs the real driver, and what packs its messages; see large_workers.py for the others.
A message takes a latency, and its bytes the launcher's link.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hvdlite.common.connections.frames import unpack
from hvdlite.launcher.agents.channel import unsqueeze
from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.commands import ElasticPlan
from hvdlite.launcher.elastic import worker_processes
from hvdlite.launcher.elastic.driver_loop import DriverLoop
from tests.simulation.lines import Wire
from tests.simulation.scale.large_workers import Agent, Worker
from tests.simulation.world import World

LATENCY, LINK_BYTES = 1e-4, 3e9  # Seconds, and bytes a second: 25 Gbit/s.
SSH_SECONDS = 0.3  # Until an agent has come.
MOST_AT_ONCE = 32  # Agents that are on their way.


def _start(rank: int, slot: int, variables: dict[str, str]) -> dict[str, Any]:
    return {"rank": rank, "local_rank": slot, "command": ["train"], "variables": variables}


class Launcher(DriverLoop):
    """The process of the launcher: the driver, with the messages that it reads and packs."""

    def __init__(self, world: World, hosts: dict[str, int]) -> None:
        self.world, self.hosts = world, hosts
        self.seconds = 0.0  # Of CPU.
        self.sent = self.queued = self.most_queued = 0  # Bytes.
        self.agents: dict[str, Agent] = {}
        self.met: Counter[int] = Counter()  # How many have connected, by epoch.
        self.was_lost = False  # Whether a host was lost, and no world has followed.
        self.since = 0.0  # When the last worker has come, or has asked for the next world.
        self._wire = Wire(LINK_BYTES)
        self._inbox: list[bytes] = []
        self._coming: list[str] = []
        self._under_way = 0
        self._due = False
        self._tick_at = 0.0
        self._told: tuple[bytes, list[Any], list[int]] = (b"", [], [])
        loop: Any = SimpleNamespace(look_every=lambda *_: None)
        ranks = sum(hosts.values())
        plan = ElasticPlan(ranks, max(1, ranks // 2), cooldown=(1, 4))
        super().__init__(plan, loop)
        self.driver._uniform = world.lot.random
        nothing = lambda *_: None  # noqa: E731
        options = SimpleNamespace(command=["python", "train.py"], as_horovod=False)
        output = SimpleNamespace(feed=nothing, begin=nothing, end=lambda number: None)
        live = SimpleNamespace(note=nothing, orders=SimpleNamespace(receive=nothing))
        job: Any = SimpleNamespace(options=options, output=output, live=live)
        description: Any = SimpleNamespace(keep_answer=nothing, start=_start)
        self.workers = worker_processes.WorkerProcesses(job, description, self.driver)

    # -- messages

    def carry(self, count: int, action: Callable[[], object]) -> None:
        """Let bytes go out, one message after the other, and `action` happen where they come."""
        self.sent, self.queued = self.sent + count, self.queued + count
        self.most_queued = max(self.most_queued, self.queued)
        left = self._wire.take(self.world.now, count)

        def arrive() -> None:
            self.queued -= count
            action()

        latency = LATENCY * (0.5 + self.world.lot.random())
        self.world.at(left + latency, arrive)

    def arrive(self, message: bytes) -> None:
        """Have a message of an agent after a latency."""
        latency = LATENCY * (0.5 + self.world.lot.random())
        self.world.after(latency, lambda: self._take(lambda: self._said(message)))

    def _said(self, message: bytes) -> None:
        kind, *fields = unpack(message)
        if fields[1][0] != "gather":
            self.since = self.world.now
        self.workers.receive(kind, fields)

    def _take(self, action: Callable[[], object]) -> None:
        """Do something as the loop does: all that has come, and then what was decided."""
        self._run(action)
        if not self._due:
            self._due = True
            self.world.after(1e-4, self._turn)

    def _turn(self) -> None:
        self._due = False
        self._run(self.carry_out)
        due = self.driver.due()
        if due is not None and not self.world.now < self._tick_at <= due:
            self._tick_at = due
            self.world.after(max(0.0, due - self.world.now), lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if due == self._tick_at:  # Else an earlier one has come between.
            self._tick_at = 0.0
            self._take(lambda: self.driver.tick(self.world.now))

    def _run(self, action: Callable[[], object]) -> None:
        began = time.thread_time()
        with patch.object(worker_processes, "time", SimpleNamespace(monotonic=self.world.clock)):
            action()
        self.seconds += time.thread_time() - began

    def read(self, data: bytes) -> tuple[list[Any], list[int]]:
        """Return a message of the driver, and the members of the last world."""
        if self._told[0] is not data:
            message = unpack(unsqueeze(data))
            members = [each for each, _ in message[2]] if message[0] == "world" else self._told[2]
            self._told = data, message, members
        return self._told[1], self._told[2]

    # -- commands of the driver

    def start_agent(self, host: str) -> None:
        self._coming.append(host)
        self._start_next()

    def _start_next(self) -> None:
        while self._coming and self._under_way < MOST_AT_ONCE:
            self._under_way += 1
            host = self._coming.pop(0)
            after = SSH_SECONDS * (1 + self.world.lot.random())
            self.world.after(after, lambda h=host: self._take(lambda: self._came(h)))  # type: ignore[misc]

    def _came(self, host: str) -> None:
        self._under_way -= 1
        self.agents[host] = Agent(self, host, list(self.hosts).index(host))
        self.driver.agent_came(host, self.world.now)
        self._start_next()

    def drop_agent(self, host: str) -> None:
        raise AssertionError(f"{host} is not dropped")

    def start_worker(self, worker: commands.StartWorker) -> None:
        agent: Any = self.agents[worker.host]
        self.workers.start(worker, agent)

    def signal(self, number: int, signal_number: int) -> None:
        raise AssertionError(f"worker {number} is not ended")

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        self.workers.tell(numbers, frame)

    def say(self, line: str) -> None:
        self.world.tell("launcher", line)

    def look(self, now: float) -> None:
        """Nothing goes without a word."""

    # -- what happens

    def discover(self) -> None:
        self._take(lambda: self.driver.discovered(self.hosts, self.world.now))

    def lose(self, host: str) -> None:
        """Lose a host: its channel closes, and the other ranks hear of it as the launcher does."""
        self.was_lost = True
        lost = self.agents.pop(host)
        lost.lives = False

        def hear() -> None:
            self.workers.forget(lost)  # type: ignore[arg-type]
            self.driver.agent_lost(host, "it has closed its connection", True, self.world.now)

        self.world.after(LATENCY, lambda: self._take(hear))
        for agent in self.agents.values():
            for worker in agent.workers.values():
                after = 1e-3 * (1 + self.world.lot.random())
                self.world.after(after, lambda w=worker, e=worker.epoch: w.leave(e))  # type: ignore[misc]

    def living(self) -> list[Worker]:
        return [each for agent in self.agents.values() for each in agent.workers.values()]
