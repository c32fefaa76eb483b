"""What the ranks of the tests' jobs use, whatever they import next: this imports neither hvdlite
nor mpi4py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STARTED_BY_MPI = "OMPI_COMM_WORLD_RANK" in os.environ
_PREFIX = "OMPI_COMM_WORLD" if STARTED_BY_MPI else "HVDLITE"
rank, size = (int(os.environ[f"{_PREFIX}_{name}"]) for name in ("RANK", "SIZE"))


def say(word: str) -> None:
    """Let the other ranks hear a word, without hvdlite and without MPI."""
    (Path(os.environ["WORDS"]) / word).touch()


def hear(word: str) -> None:
    """Wait until another rank has said a word."""
    assert wait_until((Path(os.environ["WORDS"]) / word).exists, 60), word


def check(name: str = "check") -> None:
    """See that all ranks compute together."""
    import hvdlite.numpy as hvd

    total = hvd.allreduce(np.full(3, rank + 1.0), name=name, op=hvd.Sum)
    assert total.tolist() == [size * (size + 1) / 2] * 3, total


def call_init() -> None:
    """What a child process does that imports the script again."""
    import hvdlite.numpy as hvd

    hvd.init()


def belongings() -> tuple[list[str], int]:
    """The kinds of the descriptors of this process, and the number of its threads."""
    folder = "/proc/self/fd"
    kinds = []
    for descriptor in os.listdir(folder):
        path = f"{folder}/{descriptor}"
        if os.path.islink(path):
            kinds.append(os.readlink(path).split(":")[0])
    return sorted(kinds), threading.active_count()


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> bool:
    """Wait for a condition; returns whether it has come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def nothing_ends() -> bool:
    """Whether no engine of an earlier job goes on for other ranks."""
    from hvdlite.common.runtime import lifecycle
    from hvdlite.common.runtime.current import this_process

    lifecycle._forget_finished()
    return not this_process.shut_down


def done() -> None:
    """Say that all is well, in one piece."""
    os.write(1, f"rank {rank} done\n".encode())
