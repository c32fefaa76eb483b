"""Jobs of thousands of ranks in a world: what a start, a step and the loss of a host take rank 0.

    python -m tests.simulation.scale            # 4,096 ranks: a minute; 16,384 take 4 GB
    python -m tests.simulation.scale --ranks 512

Control planes are the real ones, with the coordinator, the leaders and what each rank remembers;
messages are encoded and decoded. Tensors have no data, and connections take the latencies of a
cluster. CPU time is that of rank 0; virtual time ends when the last rank has what it waits for.
Before that the ranks meet, by large_start.py: at the start, without a host that is lost,
and with it again.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.engine.control_plane import ControlPlane
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.engine.response_memory import ResponseMemory
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request, Segment
from hvdlite.common.requests.process_set_table import ProcessSetTable
from hvdlite.common.settings.config import Config
from hvdlite.common.timeline.recorder import Timeline
from hvdlite.common.transport.base import Incoming
from tests.simulation.lines import Line, Wire
from tests.simulation.scale.large_start import LINK_BYTES, Launcher
from tests.simulation.scale.large_workers import RankZero
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
        self._lines: dict[tuple[int, int], Line] = defaultdict(Line)
        self._wires = [Wire(LINK_BYTES) for _ in hosts]
        self._due: set[int] = set()
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            self.ranks.append(Rank(self, rank, config))

    def carry(self, source: int, target: int, body: bytes | None) -> None:
        own, other = self.topology.host_of[source], self.topology.host_of[target]
        left, latency = self.world.now, NEAR
        if own != other:
            left, latency = self._wires[own].take(left, len(body or b"")), FAR
        latency *= 0.5 + self.world.lot.random()
        at = self._lines[source, target].arrival(left, latency)
        self.world.at(at, lambda: self._arrive(source, target, body))

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

    def root_bytes(self) -> int:
        """Return what rank 0 holds in its control plane and memory of answers; hosts left out."""
        root, seen, total = self.ranks[0], {id(each) for each in (self, self.topology)}, 0
        held: list[Any] = [root]
        while held:
            one = held.pop()
            if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
                continue
            seen.add(id(one))
            total += sys.getsizeof(one)
            held += gc.get_referents(one)
        return total

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


@dataclass(frozen=True)
class Row:
    """What a phase took: virtual seconds, and CPU seconds of rank 0 and of the launcher."""

    seconds: float
    root: float
    launcher: float


class Start:
    """A job of so many ranks that meets, loses a host, and has it again."""

    LOST = "node3"

    def __init__(self, ranks: int) -> None:
        self.world = World(ranks)
        hosts = {f"node{number}": HOST for number in range(ranks // HOST)}
        self.launcher = Launcher(self.world, hosts)
        self.sent = 0  # Bytes of the last phase.
        self._ranks, self._epoch = ranks, 0

    def start(self) -> Row:
        """Start all agents and workers: the time is that from the last worker's `init` on."""
        return self._phase(self.launcher.discover, self._ranks)

    def lose_host(self) -> Row:
        """Lose a host: the time is that from its loss until the others have met again."""
        return self._phase(lambda: self.launcher.lose(self.LOST), self._ranks - HOST)

    def have_it_back(self) -> Row:
        """Have the host back: the time is that since the last rank has asked for the next world."""
        return self._phase(lambda: None, self._ranks)

    def _phase(self, begin: Callable[[], None], ranks: int) -> Row:
        launcher = self.launcher
        self._epoch += 1
        now, cpu, sent = self.world.now, launcher.seconds, launcher.sent
        begin()
        self.world.run(lambda: launcher.met[self._epoch] == ranks and self._root.connected)
        assert launcher.met[self._epoch] == ranks
        since = now if launcher.was_lost else launcher.since
        launcher.was_lost, self.sent = False, launcher.sent - sent
        return Row(self.world.now - since, self._root.seconds, launcher.seconds - cpu)

    @property
    def _root(self) -> RankZero:
        root = next(each.rank_0 for each in self.launcher.living() if each.rank_0 is not None)
        assert root.epoch == self._epoch
        return root

    def bytes_of_memory(self) -> int:
        return self._root.bytes_of_memory()


def meet(ranks: int) -> None:
    job = Start(ranks)
    phases = {"start": job.start, "a host is lost": job.lose_host, "it is back": job.have_it_back}
    for name, phase in phases.items():
        row = phase()
        print(
            f"{ranks} ranks, {name}: met after {row.seconds * 1e3:.1f} ms; CPU of rank 0 "
            f"{row.root:.2f} s, of the launcher {row.launcher:.2f} s, which sends "
            f"{job.sent / 1e6:.0f} MB",
            flush=True,
        )
    print(f"{ranks} ranks, rank 0 meets in {job.bytes_of_memory() / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4096])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for ranks in options.ranks:
        started = time.thread_time()
        meet(ranks)
        job = Large(ranks)
        rows = {"first step": job.step()}
        steps = [job.step() for _ in range(options.steps)]
        virtual, cpu = (sum(column) / options.steps for column in zip(*steps, strict=True))
        held = job.root_bytes()
        rows |= {"a later step": (virtual, cpu), "a host is lost": job.lose_host()}
        for name, (virtual, cpu) in rows.items():
            print(
                f"{ranks} ranks, {name}: {virtual * 1e3:.1f} ms, rank 0 {cpu * 1e3:.1f} ms of CPU"
            )
        print(f"{ranks} ranks, the control plane of rank 0 holds {held / 1e6:.1f} MB")
        print(f"the simulation took {time.thread_time() - started:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
