"""The workers of the elastic jobs that elastic.py and soak_elastic.py disturb.

    python elastic_worker.py FOLDER PROGRAM [OPTIONS]

`PROGRAM` is one of `PROGRAMS`. Each worker appends notes to a file in FOLDER, one JSON object a
line, until the file FOLDER/end exists.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import current

LOOKS = 10


class Notes:
    """The file of this worker."""

    def __init__(self, folder: Path) -> None:
        self.number = int(os.environ.get("HVDLITE_WORKER", os.environ.get("HVDLITE_RANK", "0")))
        self.end = folder / "end"
        self._file = os.open(
            folder / f"{self.number}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )

    def write(self, what: str, **more: Any) -> None:
        """Append a note about this worker and its world."""
        world = worlds.current_world()
        place = {"epoch": 0 if world is None else world.epoch, "rank": hvd.rank()}
        self.write_alone(what, **place, size=hvd.size(), **more)

    def write_alone(self, what: str, **more: Any) -> None:
        """Append a note about this worker, in one system call."""
        fixed = {"what": what, "time": time.monotonic(), "number": self.number, "pid": os.getpid()}
        os.write(self._file, json.dumps({**fixed, **more}).encode() + b"\n")


class Sent:
    """Counts bytes of collectives between the begin of a world and that of its training."""

    def __init__(self) -> None:
        self.bytes = self.collectives = 0
        self._remove: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Count in the new world."""
        self.bytes = self.collectives = 0
        self._remove = current().engine.observe(self._add)

    def _add(self, run: Any) -> None:
        self.bytes += run.bytes
        self.collectives += 1

    def end(self) -> None:
        """Count no more."""
        self._remove()


def train(notes: Notes, args: argparse.Namespace) -> None:
    """Sum one number in each step, commit, and note when each world began and what came before.

    "began" holds times: `left` of the last commit of the old world, `failed` of the error, `joined`
    of the new world, `entered` after the sync; `time` is the end of the first allreduce. `undone`
    is how many committed steps the failure has lost, and `pause` the longest time between two steps
    of the old world.
    """
    hvd.init()
    weights = np.arange(args.mib * (1 << 17), dtype=np.float64)
    sent, times = Sent(), dict.fromkeys(("left", "failed", "joined", "entered"), 0.0)
    committed, pause, summed = 0, 0.0, 0.0

    class State(hvd.elastic.NumpyState):
        def restore(self) -> None:
            times["failed"] = time.monotonic()
            super().restore()

    def on_joined() -> None:
        times["joined"] = time.monotonic()
        sent.begin()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        nonlocal committed, pause, summed
        times["entered"] = time.monotonic()
        sent.end()
        lost = max(committed - state.step, 0)
        began, ended = False, False
        while not ended:
            sums = hvd.allreduce(np.array([1.0, notes.end.exists()]), op=hvd.Sum, name="x")
            if sums[0] != hvd.size():
                raise ArithmeticError(f"{sums[0]} ranks instead of {hvd.size()}")
            if not began:
                began = True
                moved = {"bytes": sent.bytes, "collectives": sent.collectives}
                notes.write("began", step=state.step, undone=lost, pause=pause, **times, **moved)
                pause, summed = 0.0, time.monotonic()
            now = time.monotonic()
            pause, summed = max(pause, now - summed), now
            state.step, ended = state.step + 1, bool(sums[1])
            time.sleep(args.pause)
            times["left"] = time.monotonic()
            state.save()
            committed = state.step
            state.check_host_updates()

    state = State(weights=weights, step=0)
    state.register_reset_callbacks([on_joined])
    loop(state)


def look() -> dict[str, float]:
    """Return what this process holds after a garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def resets(notes: Notes, args: argparse.Namespace) -> None:
    """Fail in every world after the first allreduce; note what the process holds ten times."""
    hvd.init()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        hvd.allreduce(np.ones(1000), name="x")
        state.resets += 1
        state.commit()
        if state.resets % (args.count // LOOKS) == 0:
            notes.write("look", resets=state.resets, **look())
        if state.resets < args.count:
            raise HorovodInternalError("fail on purpose")

    loop(hvd.elastic.NumpyState(resets=0))


def of_module(module: str, name: str) -> Callable[[Notes, argparse.Namespace], None]:
    """Return a program of another module, which is imported where it runs."""

    def program(notes: Notes, args: argparse.Namespace) -> None:
        getattr(import_module(module), name)(notes, args)

    return program


PROGRAMS: dict[str, Callable[[Notes, argparse.Namespace], None]] = {
    "train": train,
    "resets": resets,
    "soak": of_module("elastic_soak_worker", "soak"),
    "commit": of_module("elastic_training", "commit"),
    "steady": of_module("elastic_training", "steady"),
    "learn": of_module("elastic_training", "learn"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--mib", type=int, default=1, help="of weights")
    parser.add_argument("--pause", type=float, default=0.005, help="seconds of a step")
    parser.add_argument("--count", type=int, default=1000, help="of resets, or of steps")
    parser.add_argument("--network", default="gpt")
    args = parser.parse_args()
    PROGRAMS[args.program](Notes(args.folder), args)


if __name__ == "__main__":
    main()
