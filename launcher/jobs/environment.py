"""The environment of the ranks: the user's own, less what belongs to another job."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from hvdlite.common.base.networks import BRIDGE, USUAL_BRIDGES, has_fabric
from hvdlite.common.meeting.nodelist import expand_nodelist
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.host_report import network_of
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.jobs.passed_variables import of_another_job
from hvdlite.launcher.mpirun.commands import build_environment, keep_alive_arguments
from hvdlite.launcher.mpirun.mpi import (
    HYDRA,
    OPENMPI,
    SLURM,
    Mpi,
    library_of,
    own_agent,
    parameter_given,
)
from hvdlite.launcher.platforms.batch_systems import is_task

if TYPE_CHECKING:
    from hvdlite.ps.scheduler.running import HostedScheduler

# Python prints the stack of a rank that dies by SIGSEGV where this is not empty; "0" would count.
FAULT_HANDLER = "PYTHONFAULTHANDLER"
# What Open MPI leaves out by itself, the overlay of pods, and bridges.
NOT_BETWEEN_HOSTS = ("127.0.0.1/8", "sppp", "flannel.1", *USUAL_BRIDGES)
LOOPBACK = "127.0.0.1"


def rank_environment(
    environ: Mapping[str, str], mpi: Mpi | None, options: LaunchOptions
) -> dict[str, str]:
    """Return the ranks' environment: `environ`, flags and config file, and defaults.

    `mpi` is None where agents start the ranks.
    """
    passed = {name: value for name, value in environ.items() if not of_another_job(name)}
    passed |= options.variables
    if mpi is not None:
        passed = _with_library(passed, mpi)
    if options.as_horovod:
        from hvdlite.as_horovod import environment

        passed |= environment(passed)
    # Output before a crash must not be lost in a pipe's buffer.
    defaults = {"PYTHONUNBUFFERED": "1"}
    given = passed.get(FAULT_HANDLER, "1")
    passed[FAULT_HANDLER] = "" if given == "0" else given
    if mpi is not None:
        defaults |= _openmpi_defaults(environ, mpi, options) | build_environment(mpi, options)
        if mpi.kind == OPENMPI and options.remote and not own_agent(options.mpi_args, environ):
            name = "PRTE_MCA_plm_ssh_args" if mpi.major >= 5 else "OMPI_MCA_plm_rsh_args"
            defaults[name] = shlex.join(keep_alive_arguments(options))
        if is_task(environ):  # The other tasks have the other nodes: mpirun must not take them.
            defaults |= {"PRTE_MCA_ras": "^slurm", "PRTE_MCA_plm": "ssh"}
    elif options.tcp:
        defaults["HVDLITE_TRANSPORT"] = "tcp"
    if options.network_interfaces:
        defaults |= _interface_variables(options)
    return passed | {name: value for name, value in defaults.items() if not passed.get(name)}


def _interface_variables(options: LaunchOptions) -> dict[str, str]:
    """Return what tells hvdlite, NCCL and scripts for Horovod which interfaces to use."""
    given = options.network_interfaces
    variables = {"HVDLITE_NETWORK_INTERFACES": ",".join(given)}
    if names := [name for name in given if not network_of(name)]:  # All that NCCL knows.
        variables["NCCL_SOCKET_IFNAME"] = ",".join(names)
        if options.elastic is not None and options.as_horovod:
            variables["HOROVOD_GLOO_IFACE"] = names[0]
    return variables


def _with_library(passed: Mapping[str, str], mpi: Mpi) -> dict[str, str]:
    """Return `passed` with the path of the MPI library in the place of the name of its ABI.

    Given MPI4PY_MPIABI, mpi4py imports the module for that ABI without looking for the library
    first, and the dynamic linker does not look inside a Python environment, where wheels put it.
    """
    library = passed.get("MPI4PY_LIBMPI") or library_of(mpi)
    if not passed.get("MPI4PY_MPIABI") or not library:
        return dict(passed)
    others = {name: value for name, value in passed.items() if name != "MPI4PY_MPIABI"}
    return others | {"MPI4PY_LIBMPI": library}


def _openmpi_defaults(
    environ: Mapping[str, str], mpi: Mpi, options: LaunchOptions
) -> dict[str, str]:
    """Return the parameters of Open MPI that are set where the user has not set them.

    btl/ofi carries only one-sided operations over a fabric, and opening libfabric for it costs a
    second of every start; mtl/ofi, which carries messages over a fabric, stays. The osc component
    of UCX prints lines about its priority, and hvdlite does not use it. Between hosts, bridges that
    have one address on all of them (docker0) crash btl/tcp, and without its detector Open MPI never
    notices that a link is cut.
    """
    if HYDRA in (mpi.kind, mpi.library):
        return {}
    defaults = {"osc": "^ucx"}
    if not has_fabric():
        defaults["btl"] = "^ofi"
    if options.remote:
        defaults["mpi_ft_detector"] = "1"
    if options.remote or mpi.kind == SLURM:
        defaults |= _without_bridges(environ, mpi, options)
    return {
        f"OMPI_MCA_{name}": value
        for name, value in defaults.items()
        if not parameter_given(name, environ, options.mpi_args, mpi.program)
    }


def _without_bridges(
    environ: Mapping[str, str], mpi: Mpi, options: LaunchOptions
) -> dict[str, str]:
    """Return what keeps Open MPI off bridges inside a host; it takes a list to use, or not to."""
    include = "btl_tcp_if_include"
    chosen = parameter_given(include, environ, options.mpi_args, mpi.program)
    if chosen or options.network_interfaces:
        return {}
    names = {name for _, name in socket.if_nameindex()}
    inner = sorted(name for name in names if BRIDGE.fullmatch(name))
    if not names.difference(inner, ("lo",)):  # The only link of a container may have such a name.
        inner = []
    return {"btl_tcp_if_exclude": ",".join(dict.fromkeys((*NOT_BETWEEN_HOSTS, *inner)))}


# --torchrun-env: variables by which torch.distributed finds the ranks, as torchrun sets them.


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


# The scheduler of a parameter server, which hvdlite-run runs itself.


@contextmanager
def hosted_scheduler(
    options: LaunchOptions, environ: Mapping[str, str]
) -> Iterator[tuple[HostedScheduler | None, dict[str, str]]]:
    """Run it where the job has one; yield it, and what workers are told by their environment."""
    cluster = options.cluster
    if cluster is None:
        yield None, {}
        return
    from hvdlite.ps.cluster.settings import read_settings
    from hvdlite.ps.scheduler.running import HostedScheduler

    variables = {
        "HVDLITE_NUM_SERVERS": str(cluster.servers),
        "HVDLITE_NUM_WORKERS": str(options.num_proc),
        "HVDLITE_PS_WORKERS": "independent" if cluster.independent else "mpi",
        "HVDLITE_PS_TOKEN": environ.get("HVDLITE_PS_TOKEN") or os.urandom(16).hex(),
    }
    settings = read_settings({
        **environ, **variables,
        "HVDLITE_ROLE": "scheduler",
        "HVDLITE_SCHEDULER": f"{_address(options.hosts)}:1",  # Its own will be one that is free.
        "HVDLITE_START_TIMEOUT": f"{options.start_timeout_seconds:g}",
    })  # fmt: skip
    assert settings is not None
    with closing(HostedScheduler(settings)) as scheduler:
        where = {"HVDLITE_ROLE": "worker", "HVDLITE_SCHEDULER": scheduler.settings.scheduler}
        yield scheduler, variables | where


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
