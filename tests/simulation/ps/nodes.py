"""Processes with several threads in a world, and what the product asks of threads.

Each thread runs while it has the baton. A node can be killed, which ends all of its threads where
they sleep, or stopped, so that none goes on.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdlite.common.connections.loop import AwakeClock
from hvdlite.common.requests.handles import Handle
from hvdlite.ps.connections import system
from tests.simulation.lines import Wire
from tests.simulation.start import net as nets
from tests.simulation.world import Action, KilledThread, Process, in_a_thread

if TYPE_CHECKING:
    from tests.simulation.ps.cluster import Cluster
    from tests.simulation.ps.links import Link, SimulatedListener


class _Here(threading.local):
    task: Task


here = _Here()


class Node:
    """A process: its threads, and what it has open."""

    def __init__(self, cluster: Cluster, name: str, *, is_stranger: bool = False) -> None:
        self.cluster, self.name = cluster, name
        self.opened: nets.Node | None = None  # What it has open, where connections are real.
        if (net := cluster.net) is not None:
            self.opened = nets.Node(net, name, net.host(name), is_stranger=is_stranger)
        self.lives = True
        self.left: list[str] = []  # What it had open when its code had ended.
        self.stopped = False  # By a signal, which another one may undo.
        self.full = False  # Its disk.
        self.wire = Wire(cluster.bytes_per_second)
        self.slow = 0.0  # Seconds that its disk takes for a piece of a file.
        self.tasks: list[Task] = []
        self.links: list[Link] = []
        self.listeners: list[SimulatedListener] = []
        self.files: dict[Path, int] = {}  # That are not synchronized -> the bytes that are.
        self.renames: list[tuple[Path, Path, bytes | None]] = []  # Nor these, with what was there.
        self.ended: Callable[[BaseException | None], object] = lambda _error: None

    @property
    def host(self) -> nets.Host:
        """Return where it runs; connections have to be real."""
        assert self.opened is not None
        return self.opened.host

    def start(self, main: Action) -> None:
        """Begin to run `main`; `ended` hears of its end, but not where the node is killed."""
        Task(self, "main", partial(self._run, main)).start()

    def _run(self, main: Action) -> None:
        error: BaseException | None = None
        try:
            main()
        except Exception as raised:
            error = raised
        self.left = self._still_open()
        self.end()
        if self.opened is not None:  # No other thread of it may use what is closed.
            self.cluster.world.after(0.0, self.kill)
        self.ended(error)

    def _still_open(self) -> list[str]:
        """Return what its code has not closed, or let run on."""
        left = [f"a connection with {each.nodes[each.caller.node is self].name}"
                for each in self.links if each.open and not each.closed_by]  # fmt: skip
        left += ["what listens" for each in self.listeners if each.is_listening]
        if self.opened is not None:
            left += [type(each).__name__ for each in self.opened.open.values()]
        return left + [each.name for each in self.tasks if not each.ended and each is not here.task]

    def end(self) -> None:
        """Close all that is open, as the system does."""
        self.lives = False
        for listener in self.listeners:
            listener.shut()
        for link in [*self.links]:
            link.close(self)
        if self.opened is not None:
            self.opened.end()

    def kill(self, *, crashes: bool = False) -> None:
        """End all threads; where the host crashes, its disk has only what was synchronized."""
        self.end()
        for task in [*self.tasks]:
            task.kill()
        if crashes:
            self._crash(self.cluster.world.lot)

    def _crash(self, lot: random.Random) -> None:
        for source, target, old in reversed(self.renames):
            if lot.random() < 0.5 and target.exists():
                target.rename(source)
                if old is not None:
                    target.write_bytes(old)
        for path, safe in self.files.items():
            if path.exists():
                size = path.stat().st_size
                os.truncate(path, lot.randint(min(safe, size), size))

    def go_on(self) -> None:
        """Run again after a stop."""
        self.stopped = False
        for task in self.tasks:
            task.poke()


class Task(Process):
    """A thread of a node, with what the product asks of one."""

    def __init__(self, node: Node, name: str, target: Action) -> None:
        super().__init__(node.cluster.world, f"{node.name} {name}")
        self.node = node
        self._thread_id = 0
        self._target = target
        self._joins = Signal()
        self.end_of_killed = KilledThread
        node.tasks.append(self)

    def start(self) -> None:
        self._world.after(self._world.soon(), self._start)

    def _start(self) -> None:
        if not self.killed:
            self.begin(partial(in_a_thread, self._run))

    def _run(self) -> None:
        here.task, self._thread_id = self, threading.get_ident()
        if self.node.opened is not None:
            nets.here.node, nets.here.process = self.node.opened, self
        try:
            self._target()
        except KilledThread:
            pass
        except BaseException as error:
            if not self.killed:  # Else it has only found that its descriptors are closed.
                self.node.cluster.fail(self, error)
        self._joins.give()
        self.end()

    def join(self) -> None:
        self._joins.wait(lambda: self.ended)

    def stack(self) -> list[str]:
        """Return where it is in the code of the parameter server, the innermost function first."""
        frame = sys._current_frames().get(self._thread_id)
        words = []
        while frame is not None:
            if "/hvdlite/ps/" in frame.f_code.co_filename:
                words.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        return words[:4]

    def is_stopped(self) -> bool:
        return self.node.stopped and not self.killed


class Signal:
    """Wakes the threads that wait."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        task = here.task
        self._tasks.append(task)
        try:
            return task.sleep_until(ready, seconds)
        finally:
            self._tasks.remove(task)

    def give(self) -> None:
        for task in self._tasks:
            task.poke()


class Event:
    def __init__(self) -> None:
        self._set, self._signal = False, Signal()

    def set(self) -> None:
        self._set = True
        self._signal.give()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._signal.wait(lambda: self._set, timeout)


class Condition:
    def __init__(self) -> None:
        self._count, self._signal = 0, Signal()

    def __enter__(self) -> None:
        """Only one thread runs at a time."""

    def __exit__(self, *_: object) -> None:
        """See `__enter__`."""

    def notify_all(self) -> None:
        self._count += 1
        self._signal.give()

    def wait(self, timeout: float | None = None) -> bool:
        count = self._count
        return self._signal.wait(lambda: self._count > count, timeout)


class Queue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._signal = Signal()

    def put(self, item: object) -> None:
        self._items.append(item)
        self._signal.give()

    def get(self) -> Any:
        self._signal.wait(lambda: bool(self._items))
        return self._items.popleft()


class Loop:
    """What a thread waits for: calls, and what the world has for it."""

    def __init__(self) -> None:
        self._calls: deque[Action] = deque()
        self._signal, self._woken = Signal(), False
        self._awake = AwakeClock(system.now)
        self.awake_seconds = self._awake.seconds

    def post(self, function: Action) -> None:
        self._calls.append(function)
        self.wake()

    def wake(self) -> None:
        self._woken = True
        self._signal.give()

    def run_once(self, timeout: float | None = None) -> bool:
        self._awake.expect(timeout)
        woken = self._signal.wait(lambda: self._woken, timeout)
        self._awake.expect(0.0)
        self._woken = False
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        return woken

    def close(self) -> None:
        """Nothing is open."""


def new_thread(target: Action, name: str = "", daemon: bool = False) -> Task:
    return Task(here.task.node, name, target)


def sleep_for(handle: Handle, seconds: float = -1) -> None:
    task = here.task
    handle.on_end(task.poke)
    task.sleep_until(handle.poll, None if seconds < 0 else seconds)
