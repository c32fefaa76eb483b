"""What starts the ranks: agents (here and over ssh, or by srun or jsrun), or an mpirun."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import Config
from hvdlite.launcher.platforms.batch_systems import LSF, SLURM, Allocation

AUTO, SSH, SRUN, JSRUN, MPIRUN = "auto", "ssh", "srun", "jsrun", "mpirun"
GROUPS = (SRUN, JSRUN)  # One program starts all agents of an allocation.
CONTRADICTS = {
    SSH: ("--mpi", "--mpi-args"),
    SRUN: ("--mpi",),
    JSRUN: ("--mpi", "--mpi-args"),
    MPIRUN: ("--gloo",),
}


def choose_launcher(
    config: Config, flags: Mapping[str, bool], allocation: Allocation | None,
    environ: Mapping[str, str],
) -> str:  # fmt: skip
    """Return SSH, SRUN, JSRUN or MPIRUN; `flags` tells of those about MPI whether each is given.

    `allocation` is None where the user has named hosts. Raises `ConfigError` for a flag that
    contradicts the launcher that the user has named.
    """
    given = [flag for flag, is_given in flags.items() if is_given]
    contradicting = [flag for flag in given if flag in CONTRADICTS.get(config.launcher, ())]
    if contradicting:
        raise ConfigError(f"{contradicting[0]} contradicts --launcher {config.launcher}: "
                          "give one of them")  # fmt: skip
    in_slurm = allocation is not None and allocation.system == SLURM
    if config.launcher == SRUN and not in_slurm:
        raise ConfigError("--launcher srun needs an allocation of Slurm, and no hosts: "
                          "call salloc or sbatch first, and name no hosts")  # fmt: skip
    in_lsf = allocation is not None and allocation.system == LSF
    if config.launcher == JSRUN and not in_lsf:
        raise ConfigError("--launcher jsrun needs a job of LSF, and no hosts: "
                          "call bsub first, and name no hosts")  # fmt: skip
    if config.launcher != AUTO:
        return config.launcher
    of_mpi = set(given) - {"--gloo"}
    if of_mpi or "mpi" in (config.allreduce, config.data_plane, config.transport):
        return MPIRUN
    if in_slurm and shutil.which("srun", path=environ.get("PATH")):
        return SRUN
    if in_lsf and shutil.which("jsrun", path=environ.get("PATH")):
        return JSRUN
    return SSH
