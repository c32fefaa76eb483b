"""The options of elastic jobs, and of those with a parameter server, checked before a start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import Config
from hvdlite.launcher.command_line.launcher_choice import MPIRUN
from hvdlite.launcher.decisions.commands import READY, WAIT, ElasticPlan
from hvdlite.launcher.decisions.failures import LONGEST_SECONDS

# Flags that mean nothing without one of those that make a job elastic.
ONLY_ELASTIC = {
    "max_np": "--max-np",
    "slots_per_host": "--slots-per-host",
    "elastic_timeout_seconds": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown": "--blacklist-cooldown-range",
}
WITHOUT_MPI = "an elastic job runs without MPI, since its ranks outlive the loss of others"
NOT_ELASTIC = {
    "mpi": ("--mpi", WITHOUT_MPI),
    "mpi_args": ("--mpi-args", WITHOUT_MPI),
    "torchrun_env": ("--torchrun-env", "WORLD_SIZE and RANK change in an elastic job"),
    "debug_rank": ("--debug-rank", "no rank of an elastic job keeps its number"),
}


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(ElasticPlan):
    """What makes a job elastic. Times are in seconds; None is no limit, or none was given."""

    discovery_script: str | None = None
    slots_per_host: int = 1  # of hosts that the script prints without a number
    worker_timeout_seconds: float = 10.0


def check_not_elastic(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a flag of elastic jobs in a job that is none."""
    for name, flag in ONLY_ELASTIC.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"{flag} needs --min-np or --host-discovery-script, which make a job "
                              "elastic")  # fmt: skip


def elastic_options(args: argparse.Namespace, config: Config, num_proc: int) -> ElasticOptions:
    """Return the options of an elastic job that starts with `num_proc` ranks.

    Raises `ConfigError` for flags that contradict each other.
    """
    for name, (flag, reason) in NOT_ELASTIC.items():
        if getattr(args, name) is not None and getattr(args, name) is not False:
            raise ConfigError(f"{flag} contradicts --min-np and --host-discovery-script: {reason}")
    if "mpi" in (config.transport, config.allreduce, config.data_plane):
        raise ConfigError(f"--transport, --allreduce and --data-plane must not be mpi: "
                          f"{WITHOUT_MPI}")  # fmt: skip
    if config.launcher not in ("auto", "ssh"):
        raise ConfigError(f"--launcher {config.launcher}: the agents of an elastic job are started "
                          "by ssh; leave --launcher out")  # fmt: skip
    min_np = args.min_np or num_proc
    if min_np > num_proc:
        raise ConfigError(f"--min-np {min_np} is more than -np {num_proc}, with which the job "
                          "starts: give at least as many to -np")  # fmt: skip
    if args.max_np is not None and args.max_np < num_proc:
        raise ConfigError(f"--max-np {args.max_np} is less than -np {num_proc}, with which the job "
                          "starts: give at most as many to -np")  # fmt: skip
    return ElasticOptions(
        num_proc=num_proc,
        min_np=min_np,
        max_np=args.max_np,
        discovery_script=args.host_discovery_script,
        slots_per_host=args.slots_per_host or 1,
        reset_limit=args.reset_limit,
        cooldown=None if args.cooldown is None
        else check_cooldown(args.cooldown, "--blacklist-cooldown-range "),
        elastic_timeout=config.elastic_timeout_seconds,
        # Horovod gives up the whole host of a failed process.
        failures_by_host=args.as_horovod or args.cooldown is not None,
        host_timeout_seconds=config.elastic_host_timeout_seconds,
        worker_timeout_seconds=config.elastic_worker_timeout_seconds,
        admit=WAIT if args.as_horovod else READY,
    )  # fmt: skip


def check_cooldown(given: Sequence[int], source: str) -> tuple[int, int]:
    """Return the range of a cool-down. Raises `ConfigError` that names its `source`."""
    if len(given) == 2 and 1 <= given[0] <= given[1] <= LONGEST_SECONDS:
        return given[0], given[1]
    raise ConfigError(
        f"{source}{' '.join(map(str, given))}: must be two numbers of seconds, the second not "
        f"below the first, from 1 to {LONGEST_SECONDS}"
    )


# The options of a job with a parameter server.


# Settings that mean nothing without servers.
ONLY_WITH_SERVERS = (
    "ps_workers", "ps_snapshot", "ps_snapshot_every", "ps_restarts", "ps_timeout_seconds",
    "ps_worker_timeout_seconds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What makes a job one with a parameter server."""

    servers: int
    independent: bool  # Workers are no ranks: they may be lost, and have no collectives.
    restarts: int  # Of each process that is killed.


def cluster_options(
    args: argparse.Namespace, config: Config, launcher: str, elastic: bool, in_pods: bool
) -> ClusterOptions | None:
    """Return the options of the cluster; None without servers.

    Raises `ConfigError` for what contradicts servers.
    """
    if not config.ps_servers:
        given = [name for name in ONLY_WITH_SERVERS if getattr(args, name, None) is not None]
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
