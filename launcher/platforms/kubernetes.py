"""The launcher pod of a Kubernetes job: which hosts its operator names, and how ssh reaches them.

The MPI operator (MPIJob) and Kubeflow Trainer (TrainJob with an mpi policy) write a hostfile and
set variables of the MPI that they expect. Open MPI 5 reads none of them, so the launcher does. This
module only looks at variables, and asks which files there are.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.hosts import Host

ROLE = "K_MPI_JOB_ROLE"  # set by the MPI operator in each pod
MOUNTED_HOSTFILE = "/etc/mpi/hostfile"
# The variable that names the hostfile, and the one that has arguments for ssh: of Open MPI (the
# operator sets those of version 4), Intel MPI and MPICH.
VARIABLES = (
    ("OMPI_MCA_orte_default_hostfile", "OMPI_MCA_plm_rsh_args"),
    ("I_MPI_HYDRA_HOST_FILE", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    ("HYDRA_HOST_FILE", "HYDRA_LAUNCH_EXTRA_ARGS"),
)


@dataclass(frozen=True)
class LauncherPod:
    """What the operator of a job tells the pod that starts the ranks."""

    hostfile: str
    source: str  # the variable that tells of the hostfile
    ssh_args: tuple[str, ...] = ()


def names_hosts(path: str) -> bool:
    """Return whether `path` is a readable file with content.

    The hostfile of a job without workers is empty: its ranks run in the launcher pod.
    """
    return os.path.isfile(path) and os.access(path, os.R_OK) and os.path.getsize(path) > 0


def find_launcher_pod(
    environ: Mapping[str, str], names_hosts: Callable[[str], bool] = names_hosts
) -> LauncherPod | None:
    """Return what the operator tells this pod; None where this is no launcher pod.

    Raises `ConfigError` for arguments of ssh that cannot be split into words.
    """
    for file_variable, ssh_variable in VARIABLES:
        path = environ.get(file_variable)
        if path and names_hosts(path):
            return LauncherPod(path, file_variable, _words(environ, ssh_variable))
    if environ.get(ROLE) == "launcher" and names_hosts(MOUNTED_HOSTFILE):
        given = (_words(environ, ssh_variable) for _, ssh_variable in VARIABLES)
        return LauncherPod(MOUNTED_HOSTFILE, ROLE, next((words for words in given if words), ()))
    return None


def _words(environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    text = environ.get(variable, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{variable}={text!r}: {error}") from None


def with_own_pod_local(hosts: tuple[Host, ...], hostname: str) -> tuple[Host, ...]:
    """Return `hosts` with the launcher pod itself, where it is one of them, as ``localhost``.

    The hostfile has names such as ``train-launcher.train.default.svc``, and the pod knows itself by
    the first part. No ssh server listens in a launcher pod.
    """
    own = hostname.partition(".")[0]
    return tuple(
        Host("localhost", host.slots) if host.name.partition(".")[0] == own else host
        for host in hosts
    )
