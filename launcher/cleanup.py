"""What an MPI leaves behind when it is killed: processes and shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MPI_SEGMENTS = ("sm_segment.*", "vader_segment.*", "mpich_shm_*", "Intel_MPI_*")


def kill_session(session: int) -> None:
    """Kill the processes of a session whose leader has ended (Linux)."""
    for process in _processes():
        with contextlib.suppress(OSError):
            if os.getsid(process) == session:
                os.kill(process, signal.SIGKILL)


def remove_segments(since: float) -> None:
    """Remove this user's MPI segments newer than `since` (epoch seconds) that nobody maps.

    A segment of another job that runs beside this one is mapped by its ranks, and stays.
    """
    candidates = set(_segments(since))
    if candidates:
        for path in candidates - _mapped(candidates):
            with contextlib.suppress(OSError):
                path.unlink()


def _segments(since: float) -> Iterator[Path]:
    for pattern in MPI_SEGMENTS:
        for path in SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.geteuid() and status.st_ctime >= since:
                    yield path


def _mapped(candidates: set[Path]) -> set[Path]:
    """Those of `candidates` that a process maps; all of them where that cannot be told."""
    found: set[Path] = set()
    processes = _processes()
    if not processes:
        return candidates
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
            found |= {path for path in candidates if str(path) in maps}
    return found


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
