"""An elastic job whose workers are threads: they die, come, and form one world after another.

It stands in for the driver: `hvdlite.common.runtime.worlds` answers from it while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.common.base.topology import Topology
from hvdlite.common.driver_link.frames import World
from hvdlite.common.elastic.notification import NotificationManager
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import this_process
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.inprocess import InProcessWorld
from tests.limits import HANG_SECONDS

Main = Callable[["Worker"], Any]


class Died(BaseException):
    """Ends the thread of a worker as SIGKILL ends a process."""


class CurrentRuntime:
    """What a worker's thread has for a runtime: that of the world which the worker is in.

    Graphs of TensorFlow keep it, as they find the one runtime of a process in each world.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker.runtime, name)


class Worker:
    """One worker: a thread that is a rank of one world after another."""

    def __init__(self, job: ElasticJob, number: int, main: Main) -> None:
        self.job, self.number = job, number
        self.world: World | None = None
        self.runtime: Runtime | None = None
        self.current = CurrentRuntime(self)
        self.checks = 0
        self.result: Any = None
        self.error: BaseException | None = None
        # The number of the commit with which this worker waits for a world; None: it does not.
        self.ready: int | None = None
        # All worlds that it was in, in order.
        self.worlds: list[World] = []
        self.on_hosts_seen: list[Callable[[int, int], None]] = []
        self.manager = NotificationManager()
        self.thread = threading.Thread(
            target=self._run, args=(main,), name=f"worker-{number}", daemon=True
        )

    def _run(self, main: Main) -> None:
        self.job.here.worker = self
        try:
            if self.job.started:
                self._wait_apart()
            else:
                self.next_world(0)
            self.result = main(self)
        except Died:
            pass
        except BaseException as error:  # Raised by `ElasticJob.run`.
            self.error = error
            self._vanish()
        finally:
            self.job.end(self)
            if self.runtime is not None:
                self.runtime.shutdown()

    def _wait_apart(self) -> None:
        """Be what `init` makes of a newcomer: not in a world yet."""
        world = InProcessWorld(Topology.single_host(1))
        self._take(Runtime(world.transport(0), self.job.config))

    def _take(self, runtime: Runtime) -> None:
        self.runtime = runtime
        this_process.thread.runtime = self.current

    def die(self) -> None:
        """End this worker, called in its thread: its connections close, and nobody is told."""
        self._vanish()
        raise Died

    def _vanish(self) -> None:
        if self.runtime is not None:
            self.runtime.transport.close()

    def next_world(self, commit: int) -> None:
        """See `worlds.next_world`."""
        if self.runtime is not None:
            self.runtime.shutdown()
        transport, self.world = self.job.join(self, commit)
        self.worlds.append(self.world)
        self._take(Runtime(transport, self.job.config))

    @property
    def is_broken(self) -> bool:
        """See `worlds.world_is_broken`."""
        return self.runtime is not None and self.runtime.engine.failed


class ElasticJob:
    """The workers of one job, and what a driver decides about them."""

    def __init__(self, size: int, config: Config | None = None) -> None:
        self.size = size
        self.config = config or Config()
        self.here = threading.local()
        self.workers: list[Worker] = []
        self.started = False
        self._changed = threading.Condition()  # Guards all that follows.
        self._members: list[Worker] = []  # The workers of the current world, in rank order.
        self._newcomers: list[Worker] = []
        self._gone: set[Worker] = set()
        self._epoch = 0
        self._had_commit = False  # Whether any rank was ever ready with one.
        self._wanted = HostUpdateResult.no_update
        self._raise_at: int | None = None
        self._made: dict[Worker, tuple[Any, World]] = {}

    # -- called by tests

    def run(self, main: Main) -> list[Any]:
        """Run ``main(worker)`` in all workers, also those that `add` makes; return results.

        These are in the order of the workers' numbers; None for those that died. Raises the first
        error in this order.
        """
        with self._answering():
            for _ in range(self.size):
                self._new(main)
            self._members = list(self.workers)
            for worker in list(self.workers):
                worker.thread.start()
            for worker in self.workers:  # which `add` makes longer
                worker.thread.join(HANG_SECONDS)
        stuck = [worker.thread.name for worker in self.workers if worker.thread.is_alive()]
        errors = [worker.error for worker in self.workers if worker.error is not None]
        if errors:
            raise errors[0]
        assert not stuck, f"still running: {stuck}"
        return [worker.result for worker in self.workers]

    def add(self, main: Main) -> Worker:
        """Start one more worker, and wait until it is ready: the next world has it."""
        worker = self._new(main)
        worker.thread.start()
        with self._changed:
            is_ready = self._changed.wait_for(
                lambda: worker.ready is not None or worker in self._gone, HANG_SECONDS
            )
        assert is_ready, f"worker {worker.number} does not enter elastic.run"
        return worker

    def change_hosts(self, kind: HostUpdateResult) -> None:
        """Want another world of the same workers: all ranks raise in the same check."""
        with self._changed:
            self._wanted |= kind

    def tell_of_hosts(self, counter: int, kind: HostUpdateResult) -> None:
        """Send what the driver sends when discovery has found a change."""
        for worker in self.workers:
            for callback in worker.on_hosts_seen:
                callback(counter, int(kind))

    # -- called by workers

    def _new(self, main: Main) -> Worker:
        worker = Worker(self, len(self.workers), main)
        self.workers.append(worker)
        return worker

    def join(self, worker: Worker, commit: int) -> tuple[Any, World]:
        """Wait until all who live are ready; return the transport and the next world."""
        with self._changed:
            worker.ready = commit
            if worker not in self._members:
                self._newcomers.append(worker)
                self._wanted |= HostUpdateResult.added
                self._changed.notify_all()
            self._decide()
            if not self._changed.wait_for(lambda: worker in self._made, HANG_SECONDS):
                raise AssertionError(f"worker {worker.number} waits for a world")
            return self._made.pop(worker)

    def end(self, worker: Worker) -> None:
        """Note that a worker has returned or died."""
        with self._changed:
            self._gone.add(worker)
            self._decide()

    def _decide(self) -> None:
        living = [worker for worker in self._members if worker not in self._gone]
        if any(worker.ready is None for worker in living):
            return
        members = [*living, *(w for w in self._newcomers if w not in self._gone)]
        if not members:
            return
        commits = [worker.ready or 0 for worker in members]
        root = commits.index(max(commits))
        behind = [rank for rank, commit in enumerate(commits) if commit < commits[root]]
        self._had_commit |= commits[root] > 0
        if not self._had_commit:
            behind = list(range(1, len(members)))
        elif commits[root] == 0:
            raise AssertionError("no rank holds a commit any more")
        self._epoch += 1
        self.started = True
        self._members, self._newcomers = members, []
        self._wanted, self._raise_at = HostUpdateResult.no_update, None
        room = InProcessWorld(Topology.single_host(len(members)))
        global_process_set._bind(0, range(len(members)))
        names = tuple((worker.number, "here") for worker in members)
        for rank, worker in enumerate(members):
            world = World(self._epoch, rank, names, root, tuple(behind), commits[root])
            worker.ready, worker.checks = None, 0
            self._made[worker] = room.transport(rank), world
        self._changed.notify_all()

    def check(self, worker: Worker) -> HostUpdateResult | None:
        """See `worlds.check`."""
        with self._changed:
            worker.checks += 1
            if self._wanted and self._raise_at is None:
                passed = [w.checks for w in self._members if w is not worker and w.ready is None]
                self._raise_at = max([*(count + 1 for count in passed), worker.checks])
            return self._wanted if worker.checks == self._raise_at else None

    @contextmanager
    def _answering(self) -> Iterator[None]:
        here = self.here

        def listen(callback: Callable[[int, int], None]) -> None:
            here.worker.on_hosts_seen = [callback]

        def next_world(commit: int) -> None:
            here.worker.next_world(commit)

        answers = {
            "elastic": lambda: True,
            "current_world": lambda: here.worker.world,
            "next_world": next_world,
            "check": lambda: self.check(here.worker),
            "on_hosts_seen": listen,
            "world_is_broken": lambda: here.worker.is_broken,
        }
        manager = mock.Mock()
        for name in ("init", "register_listener", "remove_listener"):
            method = _of_worker(here, name)
            setattr(manager, name, method)
        with (
            mock.patch.multiple(worlds, **answers),
            mock.patch("hvdlite.common.elastic.run.notification_manager", manager),
        ):
            yield
        global_process_set.ranks = None


def _of_worker(here: threading.local, name: str) -> Callable[..., Any]:
    """The method of the calling worker's own manager."""

    def call(*arguments: Any) -> Any:
        return getattr(here.worker.manager, name)(*arguments)

    return call
