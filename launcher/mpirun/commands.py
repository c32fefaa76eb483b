"""The command line of each MPI, by pure functions: nothing here starts, reads or asks anything."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.ssh import ssh_arguments
from hvdlite.launcher.mpirun.mpi import (
    BINDING_FLAGS,
    HYDRA,
    MAPPING_FLAGS,
    OPENMPI,
    SLURM,
    Mpi,
    flags_in,
)

ALIVE_COUNT = 3  # So many questions of ssh in a row get no answer when a host is lost.
MANY_HOSTS = 64  # from here on Open MPI's daemons are all started from the first host


@dataclass(frozen=True)
class Place:
    """What a command line depends on besides the user's options."""

    root: bool  # we are the superuser
    names: tuple[str, ...]  # environment variables to pass to other hosts
    token: str = ""  # of the job, for marks of what its ranks print


def build_command(mpi: Mpi, options: LaunchOptions, place: Place, rank_command: Sequence[str]
                  ) -> list[str]:  # fmt: skip
    """Return the command that starts `rank_command` once for each rank."""
    return [mpi.program, *BUILDERS[mpi.kind](mpi, options, place), *rank_command]


def build_environment(mpi: Mpi, options: LaunchOptions) -> dict[str, str]:
    """Variables that the MPI itself reads; one that the user has set wins."""
    variables: dict[str, str] = {}
    if options.tcp:
        variables |= {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "^uct,ofi,usnic,openib",
            "UCX_TLS": "self,sm,tcp",
            "FI_PROVIDER": "tcp",
        }
    if mpi.kind == HYDRA and ssh_arguments(options):
        variables["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(ssh_arguments(options))
    if mpi.kind == SLURM and options.network_interfaces:
        variables["OMPI_MCA_btl_tcp_if_include"] = ",".join(options.network_interfaces)
    return variables


def openmpi_arguments(mpi: Mpi, options: LaunchOptions, place: Place) -> list[str]:
    """Open MPI 4 and 5."""
    new = mpi.major >= 5
    arguments = ["-np", str(options.num_proc), "--oversubscribe"]
    if place.root:
        arguments.append("--allow-run-as-root")
    # The ranks that are left may say what happened; the launcher ends the job.
    if new:
        arguments += ["--with-ft", "ulfm", "--output", "tag"]
    else:
        arguments += ["--mca", "orte_abort_on_non_zero_status", "0", "--tag-output"]
    given = flags_in(options.mpi_args)
    if not given & BINDING_FLAGS:  # Open MPI refuses an option that comes twice
        arguments += options.binding_args or ("--bind-to", "none")
    if options.hosts:
        arguments += ["--host", ",".join(map(str, options.hosts))]
        arguments += () if given & MAPPING_FLAGS else ("--map-by", "slot")
    daemon = "--prtemca" if new else "--mca"
    arguments += _openmpi_network(options, daemon, new)
    if options.remote:
        for name in place.names:
            arguments += ["-x", name]
    return arguments + list(options.mpi_args)


def keep_alive_arguments(options: LaunchOptions) -> list[str]:
    """Return the flags that let ssh end where the other host is silent for a time.

    mpirun then ends the job; by itself it never notices that a host is cut off.
    """
    seconds = max(1, round(options.peer_timeout_seconds / ALIVE_COUNT))
    return ["-o", f"ServerAliveInterval={seconds}", "-o", f"ServerAliveCountMax={ALIVE_COUNT}"]


def _openmpi_network(options: LaunchOptions, daemon: str, new: bool) -> list[str]:
    arguments = []
    if options.network_interfaces:
        names = ",".join(options.network_interfaces)
        arguments += ["--mca", "btl_tcp_if_include", names]
        # PRRTE crashes when it is given several, and knows only names.
        first = next((name for name in options.network_interfaces if "/" not in name), "")
        if not new:
            arguments += [daemon, "oob_tcp_if_include", names]
        elif first:
            arguments += [daemon, "prte_if_include", first]
    if ssh := ssh_arguments(options):
        words = [*ssh, *keep_alive_arguments(options)]
        arguments += [daemon, "plm_ssh_args" if new else "plm_rsh_args", shlex.join(words)]
    if len(options.hosts) >= MANY_HOSTS:
        prefix = "plm_ssh" if new else "plm_rsh"
        arguments += [daemon, f"{prefix}_no_tree_spawn", "1"]
        arguments += [daemon, f"{prefix}_num_concurrent", str(len(options.hosts))]
    return arguments


def hydra_arguments(mpi: Mpi, options: LaunchOptions, place: Place) -> list[str]:
    """MPICH and Intel MPI; every variable of the environment is passed on."""
    # Without automatic clean-up the ranks that are left may say what happened.
    arguments = ["-np", str(options.num_proc), "-disable-auto-cleanup"]
    # A part of a line is marked as a whole one is, so a mark must be like nothing that ranks print.
    arguments += ["-prepend-pattern", f"[{place.token}.%r] "]
    arguments += options.binding_args
    if options.hosts:
        arguments += ["-hosts", ",".join(map(str, options.hosts))]
    if len(options.network_interfaces) > 1:
        raise ConfigError(f"--network-interfaces: {mpi.name} takes one interface")
    if options.network_interfaces:
        arguments += ["-iface", options.network_interfaces[0]]
    return arguments + list(options.mpi_args)


def srun_arguments(mpi: Mpi, options: LaunchOptions, place: Place) -> list[str]:
    """Slurm's srun, inside an allocation."""
    if ssh_arguments(options):
        raise ConfigError("--ssh-port and --ssh-identity-file: srun does not use ssh")
    arguments = ["--ntasks", str(options.num_proc), "--label", "--unbuffered", "--export=ALL"]
    # The ranks that are left may say what happened; the launcher ends the job.
    arguments += ["--kill-on-bad-exit=0"]
    if not any(word.startswith("--mpi") for word in options.mpi_args):
        arguments.append("--mpi=pmi2" if mpi.library == HYDRA else "--mpi=pmix")
    if not flags_in(options.mpi_args) & BINDING_FLAGS:
        arguments += options.binding_args or ("--cpu-bind=none",)
    return arguments + list(options.mpi_args)


BUILDERS: dict[str, Callable[[Mpi, LaunchOptions, Place], list[str]]] = {
    OPENMPI: openmpi_arguments,
    HYDRA: hydra_arguments,
    SLURM: srun_arguments,
}
