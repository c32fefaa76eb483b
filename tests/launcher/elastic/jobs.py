"""Elastic jobs for tests: a script that trains until a file exists, and what the job says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forks import NUMPY
from tests.launcher.jobs import MARK, processes, start
from tests.limits import patient

# Trains until the file that is its argument exists. Whatever it sums must come out right, and the
# number of its steps is its state.
SCRIPT = """\
import os, sys, time
import numpy as np
import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import worlds

end = sys.argv[1]
hvd.init()
step, ended = 0, False
while not ended:
    try:
        world = worlds.current_world()
        if world is not None:
            if world.behind:
                step = int(hvd.broadcast(np.array([step]), root_rank=world.root, name="step")[0])
            print(f"world {world.epoch} rank {hvd.rank()}/{hvd.size()} local {hvd.local_rank()}"
                  f" step {step} pid {os.getpid()} number {os.environ['HVDLITE_WORKER']}"
                  f" host {os.environ['HVDLITE_HOSTNAME']}", flush=True)
        while world is not None and not ended:
            sums = hvd.allreduce(np.array([1.0, os.path.exists(end)]), op=hvd.Sum, name="x")
            assert sums[0] == hvd.size(), sums
            step, ended = step + 1, bool(sums[1])
            time.sleep(0.01)
            if worlds.check():
                break
    except HorovodInternalError as error:
        print("lost", error, flush=True)
    if not ended:
        worlds.next_world(step)
print(f"done rank {hvd.rank()} step {step}", flush=True)
"""
WORLD = re.compile(
    r"\[(?P<start>\d+)\]<stdout>:world (?P<epoch>\d+) rank (?P<rank>\d+)/(?P<size>\d+) "
    r"local (?P<local>\d+) step (?P<step>\d+) pid (?P<pid>\d+) number (?P<number>\d+) "
    r"host (?P<host>\S+)"
)


@dataclass(frozen=True)
class Place:
    """One worker in one world, as it has said itself."""

    start: int  # its rank at its start, with which its lines are marked
    epoch: int
    rank: int
    size: int
    local: int
    step: int
    pid: int
    number: int
    host: str


class Watch:
    """What a job says, read while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._changed = threading.Condition()
        pairs = ((process.stdout, self.out), (process.stderr, self.err))
        self._threads = [
            threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _wait(self, found: Callable[[], object], what: str, timeout: float) -> None:
        deadline = time.monotonic() + patient(timeout)
        with self._changed:
            while not found():
                left = deadline - time.monotonic()
                alive = any(thread.is_alive() for thread in self._threads)
                assert left > 0 and alive, f"{what} did not come:\n" + "\n".join(
                    [*self.out, *self.err]
                )
                self._changed.wait(min(left, 0.2))

    def world(self, size: int, epoch: int = 0, timeout: float = 20) -> list[Place]:
        """Return the places in rank order of the first world of this size from `epoch` on."""
        found: list[Place] = []

        def whole() -> bool:
            found[:] = self._whole_world(size, epoch)
            return bool(found)

        self._wait(whole, f"a world of {size} from {epoch} on", timeout)
        return found

    def _whole_world(self, size: int, epoch: int) -> list[Place]:
        by_epoch: dict[int, dict[int, Place]] = {}
        for place in self.places():
            if place.size == size and place.epoch >= epoch:
                by_epoch.setdefault(place.epoch, {})[place.rank] = place
        whole = (e for e in sorted(by_epoch) if len(by_epoch[e]) == size)
        first = next(whole, None)
        return [] if first is None else [by_epoch[first][rank] for rank in range(size)]

    def places(self) -> list[Place]:
        """Return all places that workers have said."""
        found = []
        for line in list(self.out):
            if match := WORLD.match(line):
                words = match.groupdict()
                host = words.pop("host")
                found.append(Place(host=host, **{name: int(n) for name, n in words.items()}))
        return found

    def line(self, pattern: str, timeout: float = 20) -> str:
        """Return the first line of standard error that has the pattern."""

        def matching() -> list[str]:
            return [line for line in self.err if re.search(pattern, line)]

        self._wait(matching, f"a line with {pattern!r}", timeout)
        return matching()[0]

    def said(self, pattern: str, timeout: float = 20) -> tuple[str, ...]:
        """Return the groups of the first line of standard output that has the pattern."""

        def matching() -> list[re.Match[str]]:
            return [found for line in list(self.out) if (found := re.search(pattern, line))]

        self._wait(matching, f"a line with {pattern!r}", timeout)
        return matching()[0].groups()

    def finish(self, timeout: float = 20) -> int:
        """Wait for the end; return the exit code."""
        try:
            code = self.process.wait(patient(timeout))
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(["no end:", *self.out, *self.err])) from None
        for thread in self._threads:
            thread.join(5)
        return code

    def close(self) -> None:
        """Kill the process, and end the threads."""
        self.process.kill()
        for thread in self._threads:
            thread.join(5)


@dataclass
class ElasticRun:
    """A job that trains until `end` is called."""

    watch: Watch
    folder: Path

    def end(self, timeout: float = 20) -> int:
        """Let the workers return; return the exit code of the job."""
        (self.folder / "end").touch()
        return self.watch.finish(timeout)

    def wait_for_nothing(self, seconds: float) -> None:
        """Wait until no process of the job runs."""
        deadline = time.monotonic() + seconds
        while left := processes(str(self.folder)):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


@contextlib.contextmanager
def elastic(
    folder: Path, *flags: str, forked: Sequence[str] = NUMPY, **variables: str
) -> Iterator[ElasticRun]:
    """Start an elastic job on this host, as `start` does; at the end, nothing of it may be left."""
    (folder / "train.py").write_text(SCRIPT)
    words = ("python", str(folder / "train.py"), str(folder / "end"))
    with start(*flags, *words, forked=forked, **{MARK: str(folder), **variables}) as process:
        watch = Watch(process)
        try:
            yield ElasticRun(watch, folder)
        finally:
            watch.close()


def kill(place: Place) -> None:
    """Kill a worker of this host."""
    os.kill(place.pid, signal.SIGKILL)
