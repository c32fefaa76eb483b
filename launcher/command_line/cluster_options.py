"""The options of a job with a parameter server, checked before anything starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.plain.config import Config
from hvdlite.launcher.command_line.launcher_choice import MPIRUN
from hvdlite.launcher.hosts.hosts import Host

if TYPE_CHECKING:
    from hvdlite.ps.cluster.settings import ClusterSettings
    from hvdlite.ps.scheduler.hosted import HostedScheduler

# Settings that mean nothing without servers.
ONLY_WITH_SERVERS = (
    "ps_workers", "ps_snapshot", "ps_snapshot_every", "ps_restarts", "ps_timeout_seconds",
    "ps_worker_timeout_seconds",
)  # fmt: skip
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What makes a job one with a parameter server."""

    servers: int
    independent: bool  # Workers are no ranks: they may be lost, and have no collectives.
    restarts: int  # Of each process that is killed.


def cluster_options(
    config: Config, flags: Iterable[str], launcher: str, *, elastic: bool, in_pods: bool
) -> ClusterOptions | None:
    """Return the options of the cluster; None without servers.

    `flags` are the names of the settings that are flags or keys of the config file of this job.
    Raises `ConfigError` for what contradicts servers.
    """
    if not config.ps_servers:
        given = [name for name in ONLY_WITH_SERVERS if name in flags]
        if given:
            flag = given[0].removesuffix("_seconds").replace("_", "-")
            raise ConfigError(f"--{flag} needs --ps-servers: this job has no server")
        return None
    if elastic:
        raise ConfigError(
            "--ps-servers contradicts --min-np and --host-discovery-script: give --ps-workers "
            "independent for workers that may be lost and return"
        )
    if launcher == MPIRUN:
        raise ConfigError(
            "--ps-servers contradicts --mpi and --launcher mpirun: agents start servers again, "
            "which an MPI job cannot. Leave out flags of MPI"
        )
    if in_pods:
        raise ConfigError(
            "--ps-servers: each pod starts its own ranks here; start scheduler, servers and "
            "workers as roles, as deploy/kubernetes/jobset.yaml does"
        )
    return ClusterOptions(
        servers=config.ps_servers,
        independent=config.ps_workers == "independent",
        restarts=config.ps_restarts,
    )


def host_scheduler(
    cluster: ClusterOptions, num_workers: int, hosts: Iterable[Host], environ: Mapping[str, str],
    start_seconds: float,
) -> HostedScheduler:  # fmt: skip
    from hvdlite.ps.cluster.settings import read_settings
    from hvdlite.ps.scheduler.hosted import HostedScheduler

    variables = {
        **environ,
        "HVDLITE_ROLE": "scheduler",
        "HVDLITE_SCHEDULER": f"{_address(hosts)}:1",  # Any port that is free will be its own.
        "HVDLITE_NUM_SERVERS": str(cluster.servers),
        "HVDLITE_NUM_WORKERS": str(num_workers),
        "HVDLITE_PS_WORKERS": "independent" if cluster.independent else "mpi",
        "HVDLITE_PS_TOKEN": environ.get("HVDLITE_PS_TOKEN") or os.urandom(16).hex(),
        "HVDLITE_START_TIMEOUT": f"{start_seconds:g}",
    }
    settings = read_settings(variables)
    assert settings is not None
    return HostedScheduler(settings)


def variables_of(settings: ClusterSettings) -> dict[str, str]:
    """Return what the workers of a cluster are told by their environment."""
    return {
        "HVDLITE_ROLE": "worker",
        "HVDLITE_SCHEDULER": settings.scheduler,
        "HVDLITE_NUM_SERVERS": str(settings.num_servers),
        "HVDLITE_NUM_WORKERS": str(settings.num_workers),
        "HVDLITE_PS_TOKEN": settings.token.decode(),
        "HVDLITE_PS_WORKERS": "independent" if settings.independent else "mpi",
    }


def _address(hosts: Iterable[Host]) -> str:
    """Return the address of this host on the way to the first other one that it can resolve."""
    from hvdlite.ps.cluster.settings import address_towards

    names = [host.name for host in hosts if host.remote]
    for name in names:
        try:
            return address_towards(f"{name}:22")
        except OSError:
            continue  # Only ssh knows it, by its configuration.
    return socket.gethostname() if names else LOOPBACK
