"""What an MPI leaves behind when it is killed: processes and shared memory.

Nothing is removed that may belong to another job: two containers can share ``/dev/shm`` and a user
id, and then neither sees the processes of the other. So a segment counts as this job's only if one
of its own ranks has been seen to map it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Collection, Iterable

SHARED_MEMORY = b"/dev/shm/"
MPI_SEGMENTS = re.compile(rb"/(sm_segment\.|vader_segment\.|osc_|mpich_shm_|Intel_MPI_)[^/]*$")


def kill_session(session: int) -> None:
    """Kill the processes of a session whose leader has ended (Linux)."""
    for process in _processes():
        with contextlib.suppress(OSError):
            if os.getsid(process) == session:
                os.kill(process, signal.SIGKILL)


def segments_of(groups: Collection[int]) -> set[bytes]:
    """Return the MPI segments that the processes of these process groups map (Linux)."""
    found: set[bytes] = set()
    for process in _processes():
        with contextlib.suppress(OSError):
            if os.getpgid(process) in groups:
                with open(f"/proc/{process}/maps", "rb") as maps:
                    found.update(_segments(maps))
    return found


def _segments(maps: Iterable[bytes]) -> Iterable[bytes]:
    """Yield the paths of MPI segments in lines of ``/proc/PID/maps``."""
    for line in maps:
        path = line.split(maxsplit=5)[5:]
        if path and path[0].startswith(SHARED_MEMORY) and MPI_SEGMENTS.search(path[0].rstrip()):
            yield path[0].rstrip()


def remove_segments(paths: Iterable[bytes]) -> None:
    """Remove segments; those that are gone already do no harm."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
