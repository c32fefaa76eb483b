"""--debug-rank: one rank gets the terminal, so that a debugger works in it."""

from __future__ import annotations

import os
import shlex

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.hosts import Host, host_of_rank

# While a person looks at one rank the others wait for it: that is no stall, and no failed start.
PATIENCE = {"stall_check_disable": "1", "start_timeout_seconds": "86400"}


def check_debug_rank(rank: int, num_proc: int, hosts: tuple[Host, ...]) -> None:
    """Raise `ConfigError` where `rank` cannot be given this terminal."""
    if rank >= num_proc:
        raise ConfigError(f"--debug-rank {rank}: there are {num_proc} ranks, from 0 on")
    host = host_of_rank(hosts, num_proc, rank) if hosts else None
    if host is not None and host.remote:
        raise ConfigError(
            f"--debug-rank {rank}: it runs on {host.name}, and a terminal does not reach there; "
            "choose a rank of this host"
        )


def terminals() -> dict[int, str]:
    """Return the paths that connect a rank with our standard streams, by file descriptor.

    Standard output and error are left out where they are no terminal: they come through the
    launcher then.
    """
    paths = {}
    for fd in (0, 1, 2):
        try:
            is_terminal = os.isatty(fd) and os.access(os.ttyname(fd), os.R_OK | os.W_OK)
        except OSError:
            is_terminal = False
        if is_terminal:
            paths[fd] = os.ttyname(fd)
        elif fd == 0:
            paths[fd] = f"/proc/{os.getpid()}/fd/0"
    return paths


def redirections() -> str:
    """Return `terminals` as redirections of a shell."""
    signs = {0: "<", 1: ">", 2: ">"}
    return " ".join(f"{fd}{signs[fd]}{shlex.quote(path)}" for fd, path in terminals().items())
