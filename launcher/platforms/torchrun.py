"""--torchrun-env: variables by which torch.distributed finds the ranks, as torchrun sets them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hvdlite.common.plain.nodelist import expand_nodelist
from hvdlite.launcher.command_line.options import LaunchOptions

LOOPBACK = "127.0.0.1"


@contextmanager
def torchrun_variables(
    options: LaunchOptions, environ: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield ``MASTER_ADDR`` and ``MASTER_PORT``; nobody else is given the port meanwhile.

    What the user has set stays. The shell around each rank sets ``RANK`` and its kin.
    """
    if not options.torchrun_env:
        yield {}
        return
    if options.torch_pod is not None:
        # Where rank 0 serves the meeting of hvdlite only until all ranks have come.
        master = options.torch_pod.master
        yield {"MASTER_ADDR": master.host, "MASTER_PORT": str(master.port)}
        return
    with socket.socket() as reservation:
        # Bound, but not listening: the system gives this port to nobody who asks for any, and lets
        # rank 0 have it, whose store asks for it by number and with the same option.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        variables = {
            "MASTER_ADDR": first_host(options, environ),
            "MASTER_PORT": str(reservation.getsockname()[1]),
        }
        yield {name: environ.get(name) or value for name, value in variables.items()}


def first_host(options: LaunchOptions, environ: Mapping[str, str]) -> str:
    """Return the address of the host of rank 0, as the other ranks can reach it."""
    if options.hosts:
        first = options.hosts[0]
        if first.remote:
            return first.name
        return socket.gethostname() if options.remote else LOOPBACK
    if environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return LOOPBACK
    return next(iter(expand_nodelist(environ.get("SLURM_JOB_NODELIST", ""))), LOOPBACK)
