"""A training in which some ranks are slow for the reason that a file names.

    python -m tests.launcher.live.slowed_training FILE [COUNT WIDTH]

All ranks work alike: a step sleeps for each row of its batch, as one on an accelerator, and then
computes. The last COUNT ranks (1) are slow, until the file says `END`. WIDTH (8) is that of the
model's one layer, whose gradients are reduced.
"""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hvdlite.torch as hvd
from tests.launcher.live import hasty  # noqa: F401 - a rank tells its numbers more often

END = "end"
ROWS, ROW_SECONDS = 16, 1e-3
LOOPS = 60_000  # 1 ms of a core, or several.
MORE_SECONDS = 0.04  # In each step of the slow rank, where the reason has no length of its own.
RIVALS = 5  # Processes on the core of the slow rank.
FILE_BYTES = 64 << 20
OBJECTS = 200_000

# A loop that wants a core, until its parent has gone.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"

Hook = Callable[[], object]


class Model(torch.nn.Module):
    """A layer whose forward takes a time for each row, and that of `more`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.more: Hook = lambda: None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(len(batch) * ROW_SECONDS)
        loops(LOOPS)
        self.more()
        result: torch.Tensor = self.layer(batch)
        return result


def loops(count: int) -> None:
    for _ in range(count):
        pass


def slow_loader(training: Training) -> AbstractContextManager[None]:
    training.loads = lambda: time.sleep(MORE_SECONDS)
    return nullcontext()


def large_batches(training: Training) -> AbstractContextManager[None]:
    training.rows = 3 * ROWS
    return nullcontext()


def more_compute(training: Training) -> AbstractContextManager[None]:
    training.model.more = lambda: time.sleep(MORE_SECONDS)
    return nullcontext()


@contextmanager
def rivals() -> Iterator[None]:
    """Let other processes want the cores on which this one may run."""
    words = [sys.executable, "-c", BUSY]
    started = [subprocess.Popen(words) for _ in range(RIVALS)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def busy_core(training: Training) -> Iterator[None]:
    """Other processes want the one core on which this one may run."""
    training.model.more = lambda: loops(4 * LOOPS)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})  # Of this thread, and of what it starts.
    try:
        with rivals():
            yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def garbage(training: Training) -> Iterator[None]:
    """Each step looks for garbage among many objects."""
    gc.freeze()  # Not among those of torch, whose number nobody knows.
    objects = [[number] for number in range(OBJECTS)]
    training.model.more = gc.collect
    yield
    objects.clear()
    gc.unfreeze()


@contextmanager
def swapping(training: Training) -> Iterator[None]:
    """What the step reads is not in memory any more."""
    with tempfile.TemporaryFile(dir=training.folder) as file:
        file.write(os.urandom(FILE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        pages = mmap.mmap(file.fileno(), 0)
        pages.madvise(mmap.MADV_RANDOM)  # Read no page that nobody has asked for.

        def read() -> None:
            end = time.monotonic() + MORE_SECONDS
            pages.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for place in range(0, FILE_BYTES, mmap.PAGESIZE):
                pages[place]
                if time.monotonic() > end:
                    break

        training.model.more = read
        yield
        training.model.more = lambda: None
        pages.close()


class Clock:
    """Lets loops of Python take longer in the threads that begin with `trace`.

    No test may change the clock of a machine; what is measured of it is how long loops take.
    """

    def __init__(self) -> None:
        self.slow = False

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Be called by Python at the begin of a function, and `_line` at each line of it."""
        return self._line if self.slow else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line


@contextmanager
def lower_clock(training: Training) -> Iterator[None]:
    """Compute takes longer without more use of a core, which others may want, too."""
    training.clock.slow = True
    training.model.more = lambda: time.sleep(MORE_SECONDS)
    yield
    training.clock.slow = False


REASONS: dict[str, Callable[[Training], AbstractContextManager[None]]] = {
    "data": slow_loader, "batches": large_batches, "compute": more_compute, "core": busy_core,
    "garbage": garbage, "swap": swapping, "clock": lower_clock,
}  # fmt: skip


class Training:
    """The loop of one rank."""

    def __init__(self, file: Path, slow: int = 1, width: int = 8) -> None:
        self.file, self.folder, self.width = file, file.parent, width
        self.clock = Clock()
        threading.settrace(self.clock.trace)
        hvd.init()
        threading.settrace(None)
        self.slow = hvd.rank() >= hvd.size() - slow
        self.model = Model(width)
        plain = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._optimizer = hvd.DistributedOptimizer(plain, self.model.named_parameters())
        self._begin()

    def _begin(self) -> None:
        self.rows = ROWS
        self.loads: Hook = lambda: None
        self.model.more = lambda: None

    def run(self) -> None:
        """Go on for one reason after the other."""
        reason = ""
        while reason != END:
            self._begin()
            slowed = REASONS[reason](self) if self.slow and reason else nullcontext()
            with slowed:
                self._step()
                if hvd.rank() == hvd.size() - 1:
                    print("slowed by", reason, flush=True)
                reason = self._steps_until_another(reason)

    def _steps_until_another(self, reason: str) -> str:
        while True:
            self._step()
            wanted = int(self.file.read_text() != reason) if hvd.rank() == 0 else 0
            if hvd.broadcast(torch.tensor([wanted]), 0).item():
                return str(hvd.broadcast_object(self.file.read_text(), 0))

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self.loads()
        self.model(torch.ones(self.rows, self.width)).sum().backward()
        self._optimizer.step()


def main() -> None:
    """Run a rank."""
    torch.set_num_threads(1)
    file, *numbers = sys.argv[1:]
    Training(Path(file), *map(int, numbers)).run()


if __name__ == "__main__":
    main()
