"""The system, as a process of a cluster uses it: time, chance, threads and files.

Whatever decides asks this module, by its name, so that a simulated world can stand in for it (see
docs/simulation.md). Records, what only starts a process, and numbers that only have to differ do
not. The ends of connections are replaced besides: see `channel`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

now = time.monotonic
rising_number = time.time_ns  # Higher than those that a predecessor of this process was given.
sleep = time.sleep
random_bytes = os.urandom
Thread, Event, Condition, Queue = (
    threading.Thread, threading.Event, threading.Condition, queue.SimpleQueue,
)  # fmt: skip
replace = os.replace
UNFINISHED = ".unfinished"  # Of a file that is being written.


def new_file(path: Path) -> BinaryIO:
    """Return an empty file to write to."""
    return open(path, "wb")


def longer_file(path: Path) -> BinaryIO:
    """Return a file that is there, to write at its end."""
    return open(path, "ab")


def sync(file: BinaryIO) -> None:
    """Let what was written be on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Let new names of files be on disk; not all systems can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Write a file, which is on disk when this returns; return its size. Raises OSError.

    It is written under another name, synchronized and renamed, so that whoever is killed in between
    leaves no half of it; what a full disk did not take is removed.
    """
    temporary = path.with_suffix(UNFINISHED)
    try:
        with new_file(temporary) as file:
            for piece in pieces:
                file.write(piece)
            sync(file)
            size = file.tell()
        replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
    return size


def append(path: Path, data: bytes) -> None:
    """Write at the end of a file that is there; it is on disk when this returns. Raises OSError.

    Where that fails, or the process is killed meanwhile, a part of the data may be in the file.
    """
    with longer_file(path) as file:
        file.write(data)
        sync(file)
