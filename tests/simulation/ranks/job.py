"""A job of ranks in a world: real engines run a program, and the invariants are checked."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from types import SimpleNamespace
from unittest.mock import patch

from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.engine import engine, tree_links
from hvdlite.common.engine.inbox import WAKING_BYTES
from hvdlite.common.settings.config import Config
from tests.simulation.ranks.programs import Kill, Program, Retuning, Trouble
from tests.simulation.ranks.rank import EngineThread, Rank
from tests.simulation.ranks.script import ENDS, ORDER, PATIENCE_SECONDS, PROGRESS
from tests.simulation.ranks.transport import SILENCE_SECONDS, Network
from tests.simulation.start.starting import Starting
from tests.simulation.world import BrokenError, World

MOST_LATE_SECONDS = 1.0  # Of a rank that has yet to do what does not need others.


class Job:
    """A program in a world."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.world = World(program.seed)
        self.progress = 0.0
        self.killed: set[int] = set()
        self.quitters: set[int] = set()
        self.cuts: set[int] = set()  # The ends of connections that were cut.
        self.muted = False  # Nothing arrives any more between two hosts, in one direction.
        self.broken: BrokenError | None = None
        topology = Topology(program.hosts)
        self.network = Network(
            self.world,
            topology,
            fan_out=program.fan_out,
            latency=program.latency,
            bytes_per_second=program.bytes_per_second,
            eager_bytes=program.eager_bytes,
        )
        config = Config(
            cache_capacity=program.cache_capacity,
            fusion_threshold_bytes=program.threshold_bytes,
            cycle_time_ms=program.cycle_time_ms,
            stall_check_disable=not program.stall_seconds,
            stall_warning_seconds=program.stall_seconds,
            allreduce=program.allreduce,
            native="off",
            devices="off",
            network_model="default",
        )
        self.ranks = [Rank(self, rank, config) for rank in range(program.size)]
        self._ended = 0  # Of the first ranks: nothing is left of so many.

    def run(self) -> None:
        """Run the job. Raises `BrokenError`."""
        try:
            if self._start():
                self._run()
        finally:
            self.world.close()

    def _start(self) -> bool:
        """Let the ranks meet; return whether all have connected."""
        program = self.program
        if program.start is None:
            return True
        starting = Starting(
            self.world,
            program.start,
            self.network.topology,
            fan_out=program.fan_out,
            latency=program.latency,
            bytes_per_second=program.bytes_per_second,
        )
        return starting.run()

    def _run(self) -> None:
        self.progress = self.world.now
        for rank in self.ranks:
            rank.start()
        for kill in self.program.kills:
            self.world.after(kill.at, partial(self._kill, kill))
        for trouble in self.program.troubles:
            self.world.after(trouble.at, partial(self._trouble, trouble))
        for retuning in self.program.retunings:
            self.world.after(retuning.at, partial(self._retune, retuning))
        self.world.after(PATIENCE_SECONDS, self._watch)
        self.world.run(self._over)
        self._check_end()

    def _over(self) -> bool:
        while not self.ranks[self._ended].lives and self.ranks[self._ended].has_ended:
            self._ended += 1
            if self._ended == len(self.ranks):
                return True
        return False

    def _kill(self, kill: Kill) -> None:
        topology = self.network.topology
        for number in topology.peers(kill.rank) if kill.host else (kill.rank,):
            rank = self.ranks[number]
            if rank.has_ended:
                continue
            self.killed.add(number)
            self.progress = self.world.now
            rank.end.process.kill()
            rank.finish(137, "is lost with its host" if kill.host else "is killed")
            self.network.close(number, 1.0 if kill.host else 0.0)

    def _trouble(self, trouble: Trouble) -> None:
        rank, other = self.ranks[trouble.rank], self.ranks[trouble.other]
        if rank.has_ended or other.has_ended:
            return
        self.progress = self.world.now
        match trouble.kind:
            case "stop" if not rank.end.process.stopped:
                self.world.tell(rank.name, f"is stopped for {trouble.seconds:.4f} s")
                rank.end.process.stopped = True
                self.world.after(trouble.seconds, rank.go_on)
            case "stall":
                text = f"sends nothing to {other.name} for {trouble.seconds:.4f} s"
                self.world.tell(rank.name, text)
                self.network.stall(rank.rank, other.rank, trouble.seconds)
            case "cut":
                self._cut(rank.rank, other.rank)
            case "part" | "mute":
                peers = self.network.topology.peers
                for pair in itertools.product(peers(rank.rank), peers(other.rank)):
                    (self._cut if trouble.kind == "part" else self._mute)(*pair)

    def _cut(self, one: int, other: int) -> None:
        self.world.tell(f"rank {one}", f"has no connection with rank {other} any more")
        self.cuts |= {one, other}
        self.network.cut(one, other)

    def _mute(self, one: int, other: int) -> None:
        self.world.tell(f"rank {one}", f"reaches rank {other} no longer")
        self.cuts |= {one, other}
        self.muted = True
        self.network.mute(one, other)

    def _retune(self, retuning: Retuning) -> None:
        root = self.ranks[0]
        if root.end.process.stopped:
            return
        if not root.end.closed and not root.end.process.killed:
            self.world.tell(root.name, f"orders {retuning.order}")
            root.engine._control_plane.retune(retuning.order)
            root.end.wake()

    def _watch(self) -> None:
        if self.world.now - self.progress < PATIENCE_SECONDS:
            self.world.after(PATIENCE_SECONDS, self._watch)
            return
        waiting = [rank.waiting() for rank in self.ranks if rank.lives]
        waiting += [
            f"the engine of {rank.name} goes on"
            for rank in self.ranks
            if not rank.lives and not rank.end.closed
        ]
        raise BrokenError(PROGRESS, "; ".join(waiting))

    @property
    def _loses(self) -> bool:
        return bool(self.killed or self.quitters or self.cuts)

    def _check_end(self) -> None:
        if self.muted:
            self._check_ends_in_time()
        for rank in self.ranks:
            wanted = (0, 1) if self._loses else (0,)
            if rank.rank not in self.killed and rank.code not in wanted:
                raise BrokenError(ENDS, f"{rank.name} has ended with {rank.code}")
        for first in self.ranks:
            for second in self.ranks[first.rank + 1 :]:
                both = {first.rank, second.rank}
                orders = [
                    [run.names for run in rank.ran if both <= set(run.members)]
                    for rank in (first, second)
                ]
                least = min(map(len, orders))
                if orders[0][:least] != orders[1][:least] or (
                    not self._loses and len(orders[0]) != len(orders[1])
                ):
                    raise BrokenError(ORDER, f"{first.name} and {second.name} ran {orders}")

    def _check_ends_in_time(self) -> None:
        """Check that all ranks end soon after the first one that has seen a loss."""
        failed = [rank.ended_at for rank in self.ranks if rank.code == 1]
        held_up = sum(each.seconds for each in self.program.troubles)
        limit = min(failed, default=self.world.now) + SILENCE_SECONDS + held_up + MOST_LATE_SECONDS
        late = [rank.name for rank in self.ranks if rank.ended_at > limit]
        if late:
            raise BrokenError(PROGRESS, f"{late} end later than {limit:.3f} s")


@contextmanager
def quiet(program: Program) -> Iterator[None]:
    """Replace what a host decides, and what would be printed."""
    log = logging.getLogger("hvdlite")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with (
            patch.object(tree_links, "Tree", partial(Tree, fan_out=program.fan_out)),
            patch.object(tree_links, "main_thread_stack", lambda: "a stack\n"),
            patch.object(engine, "threading", SimpleNamespace(Event=Event, Thread=EngineThread)),
            patch.object(engine, "waking_bytes", lambda topology, cores: WAKING_BYTES),
        ):
            yield
    finally:
        log.setLevel(level)


def play(program: Program) -> Job:
    """Run a program; return its job, whose `broken` is the invariant that broke, or None."""
    with quiet(program):
        job = Job(program)
        try:
            job.run()
        except BrokenError as broken:
            job.broken = broken
            job.world.tell("world", str(broken))
    return job
