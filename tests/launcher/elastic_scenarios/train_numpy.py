"""A script of the scenarios: it sums arrays that tell who took part, and keeps its history.

In a step each worker adds (its number + 1) x (step + 1). Sums are whole numbers, so weights are
exact, and the history (step, numbers of the members) says what they must be.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.launcher.elastic_scenarios import faults

faults.at("before init")

import numpy as np  # noqa: E402

import hvdlite.numpy as hvd  # noqa: E402
from hvdlite.common.base.errors import HorovodInternalError  # noqa: E402
from hvdlite.common.runtime import lifecycle, worlds  # noqa: E402
from hvdlite.common.runtime.current import current, this_process  # noqa: E402

STEPS = int(os.environ.get("STEPS", "30"))
MISMATCH_STEP = int(os.environ.get("MISMATCH_STEP", "-1"))
ELEMENTS = int(os.environ.get("ELEMENTS", "1000"))  # Of what is summed in each step.
WEIGHTS = int(os.environ.get("WEIGHTS", "1000"))
COMMIT_EVERY = int(os.environ.get("COMMIT_EVERY", "1"))
# A step that waits for a world of a size, as "step size", and one that waits for an epoch.
HOLD_STEP, HOLD_SIZE = map(int, os.environ.get("HOLD", "-1 0").split())
LATER_STEP, LATER_EPOCH = map(int, os.environ.get("LATER", "-1 0").split())
# Any step waits for a world of so many ranks.
LEAST_SIZE = int(os.environ.get("LEAST_SIZE", "1"))
# The last step waits until all workers have such numbers: those below are to die.
FIRST_TO_LIVE = int(os.environ.get("FIRST_TO_LIVE", "0"))
VERIFIES = "elastic.check"  # Compares the weights of all ranks after a reset.


class Sent:
    """Counts the bytes of collectives from the begin of a world to that of its training."""

    def __init__(self) -> None:
        self.bytes = 0
        self._remove: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Count in a new world."""
        self._remove()
        self.bytes = 0
        self._remove = current().engine.observe(self._add)

    def _add(self, run: Any) -> None:
        if not all(VERIFIES in name for name in run.names):
            self.bytes += run.bytes


sent = Sent()


def wire() -> int:
    """Return the bytes that this host has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if line.split()[0] != "lo:")


class State(hvd.elastic.NumpyState):
    """A state that passes places of the scenarios."""

    syncs = False

    def save(self) -> None:
        faults.at("save")
        super().save()
        faults.at("saved")

    def restore(self) -> None:
        faults.at("restore")
        if not self.syncs:
            faults.say(restored=epoch(), step=self.step, wire=wire())
        super().restore()

    def sync(self) -> None:
        faults.at("sync")
        self.syncs = True
        try:
            super().sync()
        finally:
            self.syncs = False
        faults.at("synced")

    def check_host_updates(self) -> None:
        faults.at("check")
        super().check_host_updates()


def members() -> list[int]:
    """Return the numbers of the workers of this world in rank order."""
    world = worlds.current_world()
    assert world is not None
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    return [number for number, _ in world.members]


def epoch() -> int:
    world = worlds.current_world()
    return 0 if world is None else world.epoch


def say_what_is_held() -> None:
    """Tell the threads and open files of this process, as soon as the last world has ended."""
    deadline = time.monotonic() + 10
    while any(not old.engine.finished for old in this_process.shut_down):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    lifecycle._forget_finished()
    gc.collect()
    files, memories = 0, set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The one of this loop.
            target = os.readlink(path)
            if target.startswith("/memfd:"):  # Each mapping of it has a descriptor of its own.
                memories.add(path.stat().st_ino)
            else:
                files += not target.startswith("socket:")
    world = worlds.current_world()
    assert world is not None
    layout = [world.rank, *(host for _, host in world.members), *world.behind]
    faults.say(held=[threading.active_count(), files, len(memories)], layout=layout)


def may_die() -> bool:
    """Return whether this is the one worker of a large world that may die by itself."""
    mortal = [number for number in members() if number < FIRST_TO_LIVE]
    large = hvd.size() >= LEAST_SIZE and bool(mortal)
    return large and mortal[epoch() % len(mortal)] == faults.NUMBER


def waits(step: int) -> bool:
    """Return whether a step is for a later world."""
    return (
        hvd.size() < LEAST_SIZE
        or (step == HOLD_STEP and hvd.size() < HOLD_SIZE)
        or (step == LATER_STEP and epoch() < LATER_EPOCH)
        or (step == STEPS - 1 and min(members()) < FIRST_TO_LIVE)
    )


@hvd.elastic.run
def train(state: State) -> None:
    """Go on to the last step."""
    first = True
    faults.at_step(state.step)
    faults.say(
        entered=epoch(), members=members(), rank=hvd.rank(), step=state.step, sent=sent.bytes
    )
    if epoch() > 1:
        faults.go_on()
    while state.step < STEPS:
        faults.at("idle")
        if may_die():
            faults.at("large enough")
        if waits(state.step):
            time.sleep(0.002)
            state.check_host_updates()
            continue
        elements = ELEMENTS + (hvd.rank() if state.step == MISMATCH_STEP else 0)
        own = np.full(elements, (faults.NUMBER + 1.0) * (state.step + 1))
        sums = hvd.allreduce(own, op=hvd.Sum, name="gradient")
        if first:
            faults.say(reduced=epoch(), wire=wire())
            say_what_is_held()
            first = False
        assert (sums == sums[0]).all()
        faults.at("between collectives")
        state.weights += sums[0]
        state.history.append([state.step, members()])
        state.step += 1
        faults.at_step(state.step)
        faults.say(done=state.step)
        if state.step % COMMIT_EVERY == 0:
            state.commit()
        else:
            state.check_host_updates()


def main() -> None:
    """Train, and say what came of it."""
    faults.at("before hvd.init")
    faults.say(begun=0, wire=wire())
    hvd.init()
    fields: dict[str, Any] = {"step": 0, "history": []}
    state = State(weights=np.zeros(WEIGHTS), **fields)
    state.register_reset_callbacks([lambda: faults.at("on_reset"), sent.begin])
    if not lifecycle.is_waiting():
        sent.begin()
    try:
        train(state)
    except SystemExit as end:  # Of a worker that is not needed any more.
        faults.say(end=end.code)
        raise
    except HorovodInternalError as error:
        faults.say(error=str(error))
        raise
    assert (state.weights == state.weights[0]).all()
    faults.say(
        result=float(state.weights[0]), history=state.history, rank=hvd.rank(), size=hvd.size()
    )


if __name__ == "__main__":
    main()
