"""Where processes of a cluster run: on this host, or on those of a lab (tests/hosts/clusters.py).

The fixture `site` says which it is, so that a scenario is written once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from hvdlite.launcher.processes.signals import die_with_parent

SPACES = ("pid", "net", "uts", "ipc", "mnt")


class Site:
    """This host, and a folder that all processes see."""

    def __init__(self, folder: Path, inside: Path | None = None) -> None:
        """`inside` is the path by which the processes of a cluster see `folder`."""
        self.folder, self.inside = folder, inside or folder

    def address(self, role: str, number: int = 0) -> str:
        """Return the address of the host on which a process runs."""
        del role, number
        return "127.0.0.1"

    def first_process(self, role: str, number: int) -> int | None:
        """Return a process of the host on which another one is to run; None: it is this host."""
        del role, number
        return None

    def program_of(self, process: int) -> int:
        """Return the process that runs the program, of one that was started on a host."""
        return process

    def port(self) -> contextlib.AbstractContextManager[int]:
        """Hold a port on which a process of the cluster may listen, and nobody else."""
        return held_port()


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a port on which a process may listen, and which no other process is given meanwhile.

    The socket here is bound and does not listen, which SO_REUSEADDR allows beside one that does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def enter_host(first_process: int) -> None:
    """Let this process go on in the host of another one; what it was waits for it, and ends alike.

    A process keeps its own process namespace, and only its children are in another one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    die = die_with_parent(signal.SIGKILL)
    files = [os.open(f"/proc/{first_process}/ns/{space}", os.O_RDONLY) for space in SPACES]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "cannot enter a host")
        os.close(file)
    child = os.fork()
    if child == 0:
        die()
        return
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
