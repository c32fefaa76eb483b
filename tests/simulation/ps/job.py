"""A job of the parameter server in a world: its scheduler, servers and workers, and what befalls.

All of them are the real ones. Workers train one table by a script; nodes that are killed come
again, as their supervisor starts them.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER
from hvdlite.ps.connections.system import UNFINISHED
from hvdlite.ps.scheduler.running import run_scheduler
from hvdlite.ps.server.running import run_server
from tests.simulation.ps.cluster import Cluster
from tests.simulation.ps.nodes import Node
from tests.simulation.ps.oracle import Oracle, new_updater
from tests.simulation.ps.programs import Blow, PsProgram, named
from tests.simulation.ps.training import ENDS, LEFT, PROGRESS, Training
from tests.simulation.ps.wires import SCHEDULER_PORT, come
from tests.simulation.world import BrokenError, World

# A job that makes no progress for so long will never make any: nodes come again sooner, and what
# waits for a lost one is told sooner.
PATIENCE_SECONDS = 40.0


class PsJob(Training):
    """A program in a world."""

    def __init__(self, program: PsProgram, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.world = World(program.seed)
        self.cluster = Cluster(
            self.world, program.latency, program.bytes_per_second, proves=program.proves
        )
        self.broken: BrokenError | None = None
        self.progress = 0.0
        self.begun: dict[int, int] = dict.fromkeys(range(program.workers), 0)  # Pushes, by worker.
        self.done: set[int] = set()  # Workers that have made all steps.
        self.leaves = False  # Workers have begun to leave.
        self.has_saved = False
        self.codes: dict[str, int] = {}  # Of nodes that have ended.
        self._killed: dict[str, float] = {}  # Nodes, and when they were last.
        self.errors: dict[str, BaseException] = {}
        self.nodes: dict[str, Node] = {}
        self._names = [SCHEDULER, *named(SERVER, program.servers)]
        self._names += named(WORKER, program.workers)
        self._done_before: set[int] = set()  # Who had made all steps when something has failed.
        self._sent: Counter[tuple[str, str]] = Counter()  # Messages, by node and kind.
        self._asked: set[object] = set()  # What worker 0 has asked for.
        self.cluster.on_send = self._count
        self._oracle = Oracle(program)
        self._settings = ClusterSettings(
            SCHEDULER, self._scheduler_address(), program.servers, program.workers,
            token=b"a secret", independent=True,
            start_seconds=20.0, server_seconds=20.0, worker_seconds=20.0,
            snapshots=str(folder / "snapshots") if program.every else "",
            snapshot_every=program.every or 1,
        )  # fmt: skip

    def _scheduler_address(self) -> str:
        net = self.cluster.net
        return f"{'127.0.0.1' if net is None else net.host(SCHEDULER).address}:{SCHEDULER_PORT}"

    def run(self) -> None:
        """Run the job. Raises `BrokenError`."""
        with self.cluster.around():
            for name in self._names:
                self.world.after(self.world.lot.random() * 0.01, partial(self._start, name))
            for blow in (each for each in self.program.blows if not each.sends):
                self.world.after(blow.at, partial(self._strike, blow))
            for visitor in self.program.visitors:
                self.world.after(visitor.at, partial(come, self, self._settings, visitor))
            self.world.after(PATIENCE_SECONDS, self._watch)
            try:
                self.world.run(self._over)
                self._check_end()
            finally:
                self.cluster.close()

    def _over(self) -> bool:
        if self.cluster.failure is not None:
            return True
        return len(self.codes) >= len(self._names) and self.codes.keys() >= set(self._names)

    # -- nodes

    def _start(self, name: str) -> None:
        role, _, number = name.partition(" ")
        joins = role == SERVER and int(number) >= self.program.servers
        settings = replace(
            self._settings, role=role, node_id=name, joins=joins,
            number=int(number) if number and not joins else None,
        )  # fmt: skip
        node = self.nodes[name] = self.cluster.node(name)
        self.progress = self.world.now
        self.world.tell(name, "starts")
        node.ended = partial(self._ended, name)
        if role == SCHEDULER:
            node.start(partial(run_scheduler, settings))
        elif role == SERVER:
            node.start(partial(run_server, settings, partial(new_updater, self.program)))
        else:
            node.start(partial(self.train, settings, int(number)))

    def _ended(self, name: str, error: BaseException | None) -> None:
        self.codes[name] = int(error is not None)
        if error is None:
            self.world.tell(name, "ends")
            return
        text = str(error).replace(str(self.folder), "")  # Which is another one each time.
        self.world.tell(name, f"fails: {text}")
        if not self.errors:
            self._done_before = set(self.done)
        self.errors[name] = error
        if isinstance(error, BrokenError):
            self.cluster.failure = error
        elif not isinstance(error, HorovodInternalError):
            text = f"{name}: {type(error).__name__}: {error}"
            self.cluster.failure = BrokenError(ENDS, text)
            self.cluster.failure.__cause__ = error

    # -- what happens

    def _count(self, name: str, kind: str) -> None:
        """Take note of a message, by which the time has perhaps come for something."""
        self._sent[name, ""] += 1
        self._sent[name, kind] += 1
        for blow in self.program.blows:
            is_its = blow.node == name and blow.of in ("", kind)
            if is_its and blow.sends == self._sent[name, blow.of]:
                struck = replace(blow, node=blow.target)
                self.world.after(blow.at, partial(self._strike, struck))

    def _strike(self, blow: Blow) -> None:
        if blow.kind == "join":
            if any(self.begun.values()) and not self.leaves:
                self._names.append(blow.node)
                self._start(blow.node)
            return
        if blow.kind == "jump":
            self.world.tell(blow.node, f"has a clock on the wall that jumps by {blow.seconds:.3f}")
            self.cluster.wall += blow.seconds
            return
        node, other = self.nodes.get(blow.node), self.nodes.get(blow.other)
        if node is None or not node.lives or self.leaves:
            return
        after = self.world.after
        self.progress = self.world.now
        self.world.tell(blow.node, f"{blow.kind} {blow.other} {blow.seconds:.3f}")
        match blow.kind:
            case "kill" | "crash":
                self._killed[blow.node] = self.world.now
                node.kill(crashes=blow.kind == "crash")
                after(blow.seconds, partial(self._start, blow.node))
            case "stop":
                node.stopped = True
                after(blow.seconds, node.go_on)
            case "cut" if other is not None and other is not node:
                self.cluster.cut(node, other, blow.seconds)
            case "stall":
                self.cluster.stall(blow.node, blow.other, blow.seconds)
            case "fill":
                node.full = True
                after(blow.seconds, lambda: setattr(node, "full", False))
            case "slow":
                node.slow = 0.05
                after(blow.seconds, lambda: setattr(node, "slow", 0.0))

    # -- the end

    def _watch(self) -> None:
        left = self.progress + PATIENCE_SECONDS - self.world.now
        if left > 0:
            self.world.after(left, self._watch)
            return
        self.cluster.failure = BrokenError(PROGRESS, "; ".join(self.cluster.waiting()))

    def _check_end(self) -> None:
        if isinstance(self.cluster.failure, BrokenError):
            raise self.cluster.failure
        if self.cluster.failure is not None:
            failure = self.cluster.failure
            raise BrokenError(ENDS, f"a thread fails: {failure!r}") from failure
        if not self._over():
            raise BrokenError(PROGRESS, "nothing will happen any more")
        self._check_left()
        failed = {name: str(error) for name, error in self.errors.items()}
        if failed and not (self.program.loses and self._all_heard()):
            raise BrokenError(ENDS, f"{failed}")

    def _check_left(self) -> None:
        # The script of a worker that fails closes nothing.
        failed = {name for name in self.errors if name.startswith(WORKER)}
        left = [f"{node.name}: {', '.join(node.left)}" for node in self.cluster.nodes
                if node.left and node.name not in failed]  # fmt: skip
        if not any(blow.kind in ("kill", "crash") for blow in self.program.blows):
            left += [each.name for each in self.folder.rglob(f"*{UNFINISHED}")]
        if left:
            raise BrokenError(LEFT, "; ".join(left))

    def _all_heard(self) -> bool:
        """Return whether all workers have failed that had steps to make when the first one did."""
        late = set(range(self.program.workers)) - self._done_before
        return all(self.codes[f"{WORKER} {number}"] for number in late)


@contextmanager
def quiet() -> Iterator[None]:
    log = logging.getLogger("hvdlite")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def play_ps(program: PsProgram) -> PsJob:
    """Run a program; return its job, whose `broken` is the invariant that broke, or None."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="hvdlite-", dir=memory if memory.is_dir() else None))
    try:
        with quiet():
            if program.follows is not None:
                job = PsJob(program.follows, folder)
                job.run()
            job = PsJob(program, folder)
            job.run()
    except BrokenError as broken:
        job.broken = broken
        job.world.tell("world", str(broken))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return job
