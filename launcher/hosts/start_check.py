"""The check of all hosts: by itself (``--check-hosts``), and before a job starts on several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.check_hosts import check_hosts
from hvdlite.launcher.hosts.host_report import HostReport
from hvdlite.launcher.mpirun.mpi import HYDRA, OPENMPI, Mpi
from hvdlite.launcher.mpirun.user_arguments import own_agent, parameter_given

PORTS = re.compile(r"(\d+)-(\d+)")


def print_report(options: LaunchOptions, environ: Mapping[str, str], mpi: Mpi | None) -> int:
    """Print what is found on the hosts; returns the exit code: 0 where a job can run on them."""
    if not options.hosts:
        raise ConfigError(
            "--check-hosts needs hosts, such as: hvdlite-run --check-hosts -H a:2,b:2"
        )
    report = _check(options, environ, mpi)
    for line in report.lines():
        print(line)
    return 1 if report.problems else 0


def check_before_start(
    options: LaunchOptions, environ: Mapping[str, str], mpi: Mpi | None
) -> HostReport | None:
    """Return what is found on the hosts, or None where a job does not need it to be looked for.

    `mpi` is what starts the ranks; None: our own agents do. The hosts of an allocation are known to
    be there, and may allow no ssh.
    """
    if not options.remote or not options.check_hosts or options.allocation is not None:
        return None
    if mpi is not None and own_agent(options.mpi_args, environ):
        return None
    return _check(options, environ, mpi)


def use_networks(
    options: LaunchOptions, environ: Mapping[str, str], mpi: Mpi | None, report: HostReport
) -> LaunchOptions:
    """Return the options with the networks that connect all hosts, where some network does not.

    Whatever the user has chosen stays.
    """
    given = ("btl_tcp_if_include", "btl_tcp_if_exclude")
    if options.network_interfaces or not report.bad_networks or not report.networks:
        return options
    if mpi is not None and mpi.kind == OPENMPI:
        if any(parameter_given(name, environ, options.mpi_args, mpi.program) for name in given):
            return options
        old = tuple(each for each in report.networks if ":" not in each)
        return replace(options, network_interfaces=report.common_interfaces or old)
    elif mpi is not None and mpi.kind == HYDRA:  # takes one interface, by its name
        return replace(options, network_interfaces=report.common_interfaces[:1])
    return replace(options, network_interfaces=report.networks)


def _check(options: LaunchOptions, environ: Mapping[str, str], mpi: Mpi | None) -> HostReport:
    ports = _ports({**environ, **options.variables}, mpi)
    return check_hosts(options.hosts, options, environ, mpi=mpi is not None, ports=ports)


def _ports(environ: Mapping[str, str], mpi: Mpi | None) -> list[int]:
    """Return the ports that the job will listen on, where the user has limited them; else [0]."""
    if match := PORTS.fullmatch(environ.get("HVDLITE_TCP_PORTS", "")):
        return list(range(int(match[1]), int(match[2]) + 1))
    first = environ.get("OMPI_MCA_btl_tcp_port_min_v4", "")
    count = environ.get("OMPI_MCA_btl_tcp_port_range_v4", "")
    if mpi is not None and first.isdecimal() and count.isdecimal():
        return list(range(int(first), int(first) + int(count)))
    return [0]
