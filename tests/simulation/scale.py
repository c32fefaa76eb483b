"""Jobs of thousands of ranks in a world: what a start, a step and the loss of a host take rank 0.

    python -m tests.simulation.scale            # 4,096 ranks: a minute; 16,384 take 3 GB
    python -m tests.simulation.scale --ranks 512

Control planes are the real ones, with the coordinator, the leaders and what each rank remembers;
messages are encoded and decoded. Tensors have no data, and connections take the latencies of a
cluster. CPU time is that of rank 0; virtual time ends when the last rank has what it waits for.
The driver of an elastic job of this size decides beside it: its CPU time is without messages.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.engine.control_plane import ControlPlane
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.engine.response_memory import ResponseMemory
from hvdlite.common.plain.config import Config
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import Request, Segment
from hvdlite.common.plain.process_set_table import ProcessSetTable
from hvdlite.common.timeline.recorder import Timeline
from hvdlite.common.transport.base import Incoming
from hvdlite.launcher.decisions.commands import ElasticPlan, StartWorker
from hvdlite.launcher.decisions.driver import Driver
from tests.simulation.world import World

HOST = 8  # Ranks of a host.
TENSORS = 50
NEAR, FAR, SPREAD = 2e-5, 1e-4, 1e-2  # Latencies; the time within which ranks have a gradient.


class End:
    """The part of a `Transport` that a control plane uses."""

    def __init__(self, job: Large, rank: int) -> None:
        self.rank, self.topology = rank, job.topology
        self.messages: list[Incoming] = []
        self._job = job

    def send(self, rank: int, body: bytes) -> None:
        self._job.carry(self.rank, rank, bytes(body))

    def receive(self, timeout: float | None) -> list[Incoming]:
        messages, self.messages = self.messages, []
        return messages


class Rank:
    """A rank without data: it reports, and obeys."""

    def __init__(self, job: Large, rank: int, config: Config) -> None:
        self.end = End(job, rank)
        self.answered = 0
        self.failed = False
        self.pending = PendingTable(rank)
        self._memory = ResponseMemory(rank, self.pending)
        transport: Any = self.end
        self.plane = ControlPlane(
            transport, config, Timeline(rank), self._memory, job.sets, job.world.clock
        )

    def submit(self, names: Sequence[str]) -> None:
        requests = [Request(0, name, "allreduce", "float32", (256, 100), "cpu") for name in names]
        entries = [Entry(request) for request in requests]
        self.pending.add(entries)
        self.plane.report(self._memory.reports(entries))
        self.cycle()

    def cycle(self) -> None:
        """Do as an engine does when a message has come."""
        self.plane.receive(0)
        self.plane.pass_on()
        while self.plane.orders:
            order = self.plane.orders.popleft()
            if isinstance(order, Segment):
                responses, _ = self._memory.resolve(order)
                self.answered += len(responses)


class Large:
    """A job of so many ranks."""

    def __init__(self, ranks: int) -> None:
        hosts = tuple(tuple(range(r, min(r + HOST, ranks))) for r in range(0, ranks, HOST))
        self.topology = Topology(hosts)
        self.sets = ProcessSetTable(ranks)  # Which no rank changes.
        self.world = World(ranks)
        self.root_seconds = 0.0
        config = Config(stall_check_disable=True, cache_capacity=2 * TENSORS)
        self._busy: dict[tuple[int, int], float] = {}
        self._due: set[int] = set()
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            self.ranks.append(Rank(self, rank, config))

    def carry(self, source: int, target: int, body: bytes | None) -> None:
        near = self.topology.host_of[source] == self.topology.host_of[target]
        latency = (NEAR if near else FAR) * (0.5 + self.world.lot.random())
        at = max(self._busy.get((source, target), 0.0), self.world.now + latency)
        self._busy[source, target] = at
        self.world.after(at - self.world.now, lambda: self._arrive(source, target, body))

    def _arrive(self, source: int, target: int, body: bytes | None) -> None:
        self.ranks[target].end.messages.append(Incoming(source, body))
        if target not in self._due:  # What comes while it wakes up is handled together.
            self._due.add(target)
            self.world.after(1e-5, lambda: self._cycle(target))

    def _cycle(self, target: int) -> None:
        self._due.discard(target)
        self.act(target, self.ranks[target].cycle)

    def act(self, rank: int, action: Callable[[], None]) -> None:
        if self.ranks[rank].failed:
            return
        start = time.thread_time()
        try:
            action()
        except HorovodInternalError as error:
            self.ranks[rank].failed = True
            self.ranks[rank].plane.abort(error)
        if rank == 0:
            self.root_seconds += time.thread_time() - start

    def phase(self, begin: Callable[[], None], over: Callable[[], bool]) -> tuple[float, float]:
        """Return the virtual seconds of a phase, and the CPU seconds of rank 0."""
        now, cpu = self.world.now, self.root_seconds
        begin()
        self.world.run(lambda: False)
        assert over()
        return self.world.now - now, self.root_seconds - cpu

    def step(self) -> tuple[float, float]:
        """Let all ranks report their tensors in a few messages, each when it has them."""
        wanted = self.ranks[-1].answered + TENSORS
        names = [f"allreduce.layer{number}.weight" for number in range(TENSORS)]

        def begin() -> None:
            for rank in range(self.topology.size):
                for first in range(0, TENSORS, 25):
                    some = names[first : first + 25]
                    delay = SPREAD * self.world.lot.random() + first * 1e-3
                    self.world.after(delay, lambda r=rank, s=some: self.submit(r, s))  # type: ignore[misc]

        return self.phase(begin, lambda: all(rank.answered == wanted for rank in self.ranks))

    def submit(self, rank: int, names: Sequence[str]) -> None:
        self.act(rank, lambda: self.ranks[rank].submit(names))

    def lose_host(self) -> tuple[float, float]:
        """Lose the last host: all others hear of it."""
        lost = self.topology.hosts[-1]

        def begin() -> None:
            for rank in lost:
                self.ranks[rank].failed = True
            for rank in lost:
                for peer in sorted(neighbours(self.topology, rank) - set(lost)):
                    self.carry(rank, peer, None)

        return self.phase(begin, lambda: all(rank.failed for rank in self.ranks))


class LargeDriver:
    """The decisions of the driver of an elastic job, which hears of its workers in any order."""

    AT_ONCE = 32  # Agents of which the loop of the launcher hears together.

    def __init__(self, ranks: int) -> None:
        self._hosts = {f"host{number}": HOST for number in range(ranks // HOST)}
        lot = random.Random(ranks)
        self._driver = Driver(ElasticPlan(ranks, HOST, cooldown=(1, 4)), lot.random)
        self._lot = lot
        self._workers: list[StartWorker] = []

    def start(self) -> float:
        """Return the CPU seconds from the first host to the first world."""
        begin = time.thread_time()
        self._driver.tick(0.0)
        self._driver.discovered(self._hosts, 0.0)
        self._driver.take()
        for number, host in enumerate(self._hosts, 1):
            self._driver.agent_came(host, 1.0)
            if number % self.AT_ONCE == 0 or number == len(self._hosts):
                orders = self._driver.take()
                self._workers += [each for each in orders if isinstance(each, StartWorker)]
        self._lot.shuffle(self._workers)
        self._say("hello", 1)
        return time.thread_time() - begin

    def lose_host(self) -> float:
        """Return the CPU seconds from the loss of a host to the next world."""
        begin = time.thread_time()
        self._driver.agent_lost("host3", "no sign of life for 1 s", True, 2.0)
        self._driver.take()
        self._workers = [each for each in self._workers if each.host != "host3"]
        self._say("ready", 1, 5)
        return time.thread_time() - begin

    def _say(self, *frame: object) -> None:
        told = 0
        for worker in self._workers:
            self._driver.worker_said(worker.number, list(frame), 2.0)
            told += len(self._driver.take())
        assert told >= len(self._workers)  # Each has been told its world.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4096])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for ranks in options.ranks:
        started = time.thread_time()
        job = Large(ranks)
        rows = {"first step": job.step()}
        steps = [job.step() for _ in range(options.steps)]
        virtual, cpu = (sum(column) / options.steps for column in zip(*steps, strict=True))
        rows |= {"a later step": (virtual, cpu), "a host is lost": job.lose_host()}
        for name, (virtual, cpu) in rows.items():
            print(
                f"{ranks} ranks, {name}: {virtual * 1e3:.1f} ms, rank 0 {cpu * 1e3:.1f} ms of CPU"
            )
        driver = LargeDriver(ranks)
        print(f"{ranks} ranks, the driver starts them: {driver.start():.2f} s of CPU")
        print(f"{ranks} ranks, the driver loses a host: {driver.lose_host():.2f} s of CPU")
        print(f"the simulation took {time.thread_time() - started:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
