"""The launcher pod of a Kubernetes job: which hosts its operator names, and how ssh reaches them.

The MPI operator (MPIJob) and Kubeflow Trainer (TrainJob with an mpi policy) write a hostfile and
set variables of the MPI that they expect. Open MPI 5 reads none of them, so the launcher does. The
names of pods have an address only when the pods are ready.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.loop import readable
from hvdlite.launcher.decisions.lines import listed
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.processes.console import say
from hvdlite.launcher.processes.signals import SignalInbox

ROLE = "K_MPI_JOB_ROLE"  # set by the MPI operator in each pod
MOUNTED_HOSTFILE = "/etc/mpi/hostfile"
# The variable that names the hostfile, and the one that has arguments for ssh: of Open MPI (the
# operator sets those of version 4), Intel MPI and MPICH.
VARIABLES = (
    ("OMPI_MCA_orte_default_hostfile", "OMPI_MCA_plm_rsh_args"),
    ("I_MPI_HYDRA_HOST_FILE", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    ("HYDRA_HOST_FILE", "HYDRA_LAUNCH_EXTRA_ARGS"),
)
PAUSE_SECONDS = 0.5
VARIABLES_BEGIN = "PET_"
NODES, NODE_RANK, PER_NODE = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
ADDRESS, PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"


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
            ssh_args = words_of(environ.get(ssh_variable, ""), ssh_variable)
            return LauncherPod(path, file_variable, ssh_args)
    if environ.get(ROLE) == "launcher" and names_hosts(MOUNTED_HOSTFILE):
        given = (words_of(environ.get(name, ""), name) for _, name in VARIABLES)
        return LauncherPod(MOUNTED_HOSTFILE, ROLE, next((words for words in given if words), ()))
    return None


def words_of(text: str, source: str) -> tuple[str, ...]:
    """Split arguments of a program as a shell does; raises `ConfigError` that names `source`."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{source}={text!r}: {error}") from None


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


def has_address(name: str) -> bool:
    """Ask the system's resolver, which may take a few seconds where no server answers."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # the latter: no name of DNS at all
        return False


def names_without_address(
    names: Sequence[str],
    timeout_seconds: float,
    signals: SignalInbox,
    has_address: Callable[[str], bool] = has_address,
) -> list[str]:
    """Return the names that have no address after `timeout_seconds`, or when a signal comes.

    That is an empty list as soon as each name has had one.
    """
    deadline = time.monotonic() + timeout_seconds
    told = False
    missing = list(names)
    while True:
        missing = [name for name in missing if signals.received or not has_address(name)]
        left = deadline - time.monotonic()
        if not missing or signals.received or left <= 0:
            return missing
        if not told:
            told = True
            say(f"waiting up to {timeout_seconds:g} seconds for an address of {listed(missing)}")
        readable(signals.fileno(), min(PAUSE_SECONDS, left))


# A pod of a job that Kubeflow Trainer would start with torchrun: its place, and where ranks meet.
#
# Trainer gives each pod of a runtime with a torch policy the variables that torchrun reads. Without
# PyTorch, ``hvdlite-run python train.py`` in each pod reads them instead. This module only looks at
# variables.


@dataclass(frozen=True)
class TorchPod:
    """A pod that runs `ranks_per_pod` ranks of a job of `pods` pods."""

    pods: int
    index: int  # of this pod
    ranks_per_pod: int
    master: Address  # rank 0 listens there
    secret: str = field(default="", repr=False)  # of the job, if all pods have one

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return self.pods * self.ranks_per_pod


def find_torch_pod(environ: Mapping[str, str], num_proc: int | None) -> TorchPod | None:
    """Return what Trainer tells this pod; None where this is no such pod, or the only one.

    `num_proc` is the number of ranks that the user wants here. Raises `ConfigError` for variables
    that do not say the place of this pod.
    """
    if not all(environ.get(name) for name in (NODES, NODE_RANK, PER_NODE)):
        return None
    pods, index, ranks = (_number(environ, name) for name in (NODES, NODE_RANK, PER_NODE))
    if pods < 1 or ranks < 1 or index >= pods:
        raise ConfigError(
            f"{NODES}={pods}, {NODE_RANK}={index} and {PER_NODE}={ranks} are no place in a job: "
            f"pods are numbered from 0 to {NODES} - 1, and have at least one rank"
        )
    if pods == 1:
        return None
    if num_proc not in (None, ranks):
        raise ConfigError(
            f"-np {num_proc} contradicts {PER_NODE}={ranks}: leave out -np, and set numProcPerNode "
            "of the TrainJob"
        )
    host, port = environ.get(ADDRESS, ""), environ.get(PORT, "")
    if not host or not port:
        raise ConfigError(f"{NODES}={pods}, but not both of {ADDRESS} and {PORT} are set")
    secret = environ.get("HVDLITE_SECRET", "")
    return TorchPod(pods, index, ranks, Address(host, _number(environ, PORT)), secret)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text!r}: hvdlite-run needs a number here; torchrun alone knows other words"
        )
    return int(text)
