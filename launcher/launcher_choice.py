"""What starts the ranks: agents (here and over ssh, or by srun), or an mpirun."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.plain.config import Config

AUTO, SSH, SRUN, MPIRUN = "auto", "ssh", "srun", "mpirun"


def choose_launcher(
    config: Config, flags: Mapping[str, bool], hosts_given: bool, environ: Mapping[str, str]
) -> str:
    """Return SSH, SRUN or MPIRUN; `flags` are those of the command line, with whether it is given.

    Raises `ConfigError` for flags that contradict the launcher that the user has named.
    """
    wishes = [name for name, given in flags.items() if given]
    of_mpi = [name for name in wishes if name in ("--mpi", "--mpi-args")]
    if config.launcher == SSH and of_mpi:
        raise ConfigError(f"{of_mpi[0]} contradicts --launcher ssh: give one of them")
    if config.launcher != AUTO:
        return config.launcher
    if _asks_for_mpi(config, wishes):
        return MPIRUN
    if in_allocation(environ) and not hosts_given:
        return SRUN
    return MPIRUN


def _asks_for_mpi(config: Config, wishes: list[str]) -> bool:
    settings = (config.allreduce, config.data_plane, getattr(config, "transport", ""))
    return bool(wishes) or "mpi" in settings


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this is a Slurm allocation whose srun can be called."""
    return bool(environ.get("SLURM_JOB_ID") and shutil.which("srun", path=environ.get("PATH")))
