"""The launch that Slurm's variables describe: `srun` has started this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address
from hvdlite.common.meeting.launch import RENDEZVOUS, SLURM, Launch, first_set, launch_with
from hvdlite.common.plain.nodelist import expand_nodelist

# Above the ports that Linux gives to programs that ask for any. A job takes the first free one of
# PORTS, and each rank finds it by trying them all.
FIRST_PORT, LAST_PORT, PORTS = 61440, 65535, 16
# Slurm numbers a batch script and the shell of salloc from here on as steps.
NO_STEP = 0xFFFFFFF0


def task_of_step(environ: Mapping[str, str]) -> Launch | None:
    """Return the rank of a process that is a task of a step of several: `srun` has started it."""
    step = environ.get("SLURM_STEP_ID", "")
    size = first_set(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if not step.isdecimal() or int(step) >= NO_STEP or not (environ.get("SLURM_PROCID") and size):
        return None
    launch = launch_with(environ, SLURM, "SLURM_PROCID", size)
    if launch.size == 1:
        return None
    job = environ.get("SLURM_JOB_ID", "0")
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "")
    first_node = next(iter(expand_nodelist(environ.get("SLURM_STEP_NODELIST", ""))), "")
    host = "localhost" if nodes == "1" else first_node
    if not host:
        raise ConfigError(
            f"{' and '.join(launch.evidence)} say that this is a task of Slurm, but "
            f"SLURM_STEP_NODELIST does not say on which nodes: set {RENDEZVOUS}=host:port"
        )
    local = environ.get("SLURM_LOCALID", "")
    return replace(
        launch,
        local_rank=int(local) if local.isdecimal() else -1,
        job=f"{environ.get('SLURM_CLUSTER_NAME', '')}:{job}.{step}",
        addresses=tuple(Address(host, port) for port in _ports(job, int(step))),
        rank_0_serves=True,
        incarnation=environ.get("SLURM_RESTART_COUNT", ""),
    )


def _ports(job: str, step: int) -> range:
    """Return the ports of a step; neighbours in time have others."""
    number = (int(job) if job.isdecimal() else 0) * PORTS + step * 7
    first = FIRST_PORT + number % (LAST_PORT - FIRST_PORT - PORTS + 1)
    return range(first, first + PORTS)
