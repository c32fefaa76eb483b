"""What workers of elastic jobs on Ray and Spark run in tests, and what the tests see of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.limits import HANG_SECONDS

STEP_SECONDS = 0.02


def train(folder: str) -> dict[str, Any]:
    """Train until the file `end` is there; each worker writes down each world that it is in.

    The state is the number of steps, and the sum of the averages of their numbers, whatever the
    number of ranks.
    """
    import hvdlite.numpy as hvd
    from hvdlite.common.runtime import worlds

    hvd.init()
    print(f"begun with {os.environ.get('MINE')}")
    state = hvd.elastic.NumpyState(total=np.zeros(3), step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        world = worlds.current_world()
        epoch = 0 if world is None else world.epoch
        _write(folder, epoch, hvd.rank(), hvd.size(), state.step)
        ended = False
        while not ended:
            values = np.array([state.step, Path(folder, "end").exists()], dtype=np.float64)
            average = hvd.allreduce(values, name="x")
            state.total += average[0]
            state.step += 1
            ended = bool(average[1])
            time.sleep(STEP_SECONDS)
            state.commit()

    loop(state)
    return {
        "rank": hvd.rank(), "size": hvd.size(), "step": state.step, "total": state.total.tolist(),
    }  # fmt: skip


def fail_again() -> None:
    """Raise on rank 1 of each world."""
    import hvdlite.numpy as hvd

    hvd.init()
    state = hvd.elastic.NumpyState(step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if hvd.rank() == 1:
            raise KeyError("mine")
        hvd.barrier()

    loop(state)


def _write(folder: str, epoch: int, rank: int, size: int, step: int) -> None:
    place = {"rank": rank, "size": size, "step": step, "pid": os.getpid()}
    unfinished = Path(folder, f"part.{os.getpid()}")
    unfinished.write_text(
        json.dumps(place | {"epoch": epoch, "host": os.environ.get("HVDLITE_HOSTNAME", "")})
    )
    unfinished.rename(Path(folder, f"world.{epoch}.{rank}"))


@dataclass(frozen=True)
class Place:
    """One worker in one world, as it has said itself."""

    epoch: int
    rank: int
    size: int
    step: int
    pid: int
    host: str

    def kill(self) -> None:
        """Kill the worker's process."""
        os.kill(self.pid, signal.SIGKILL)


def wait_for_world(folder: Path, size: int, after: int = -1) -> list[Place]:
    """Return the places in rank order of a whole world of this size with a later epoch."""
    end = time.monotonic() + HANG_SECONDS
    while True:
        by_epoch: dict[int, dict[int, Place]] = {}
        for path in folder.glob("world.*"):
            place = Place(**json.loads(path.read_text()))
            by_epoch.setdefault(place.epoch, {})[place.rank] = place
        for epoch in sorted(by_epoch):
            world = by_epoch[epoch]
            if epoch > after and len(world) == size == world[min(world)].size:
                return [world[rank] for rank in range(size)]
        assert time.monotonic() < end, f"no world of {size} after {after}: {by_epoch}"
        time.sleep(0.02)


def check_results(results: list[dict[str, Any]], size: int) -> None:
    """Assert that all ranks of the last world have done the same steps, each once."""
    assert [result["rank"] for result in results] == list(range(size))
    steps = results[0]["step"]
    total = [float(sum(range(steps)))] * 3
    expected = {"size": size, "step": steps, "total": total}
    assert [{**result, "rank": None} for result in results] == [{**expected, "rank": None}] * size


class Running:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the end of the call."""
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()

    def result(self) -> Any:
        """Return what the call has returned, or raise what it has raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result
