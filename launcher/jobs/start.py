"""From checked options to a finished job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.agents.agent_connection import AgentHost
from hvdlite.launcher.agents.agents_job import AgentsJob
from hvdlite.launcher.command_line.launcher_choice import GROUPS, MPIRUN
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions.lines import listed
from hvdlite.launcher.elastic.job import ElasticJob
from hvdlite.launcher.hosts.check_hosts import check_hosts
from hvdlite.launcher.hosts.host_report import HostReport
from hvdlite.launcher.jobs.environment import hosted_scheduler, rank_environment, torchrun_variables
from hvdlite.launcher.jobs.job import FixedJob
from hvdlite.launcher.jobs.outcome import NOT_STARTED_CODE, JobOutcome, signal_outcome
from hvdlite.launcher.jobs.passed_variables import CALL_VARIABLE
from hvdlite.launcher.mpirun.mpi import HYDRA, OPENMPI, Mpi, find_mpi, own_agent, parameter_given
from hvdlite.launcher.mpirun.mpirun import MpirunJob
from hvdlite.launcher.platforms.kubernetes import names_without_address
from hvdlite.launcher.processes.console import say
from hvdlite.launcher.processes.signals import SignalInbox

TOKEN = "HVDLITE_PS_TOKEN"  # A secret that is not printed.
PORTS = re.compile(r"(\d+)-(\d+)")


def run_job(options: LaunchOptions, environ: Mapping[str, str]) -> JobOutcome:
    """Run the job; raises `ConfigError` before anything is started."""
    if options.elastic is not None:
        return _run_elastic(options, environ)
    if options.launcher_pod is not None:
        failure = _wait_for_names(options)
        if failure is not None:
            return failure
    mpi = _mpi(options, environ)
    report = _check_before_start(options, environ, mpi)
    if report is not None:
        for warning in report.warnings:
            say(f"warning: {warning}")
        if report.problems:
            return JobOutcome(NOT_STARTED_CODE, "\nhvdlite-run: ".join(report.problems))
        options = _use_networks(options, environ, mpi, report)
    passed = rank_environment(environ, mpi, options)
    options = replace(options, command=_command(options, passed))
    with (
        torchrun_variables(options, environ) as variables,
        hosted_scheduler(options, passed) as (scheduler, cluster),
    ):
        passed |= variables | cluster
        if options.call is not None:
            passed[CALL_VARIABLE] = options.call  # Agents replace it by a folder of their own.
        job: FixedJob
        if mpi is not None:
            job = MpirunJob(options, passed, mpi)
        else:
            job = AgentsJob(options, passed, agent_hosts(options), environ, scheduler)
        if options.verbose:
            say(f"{job.name}, {options.num_proc} ranks")
            say(f"sets {_changes(passed, environ)}")
            for line in job.describe():
                say(f"runs {line}")
        return job.run()


def _run_elastic(options: LaunchOptions, environ: Mapping[str, str]) -> JobOutcome:
    assert options.elastic is not None
    script = options.elastic.discovery_script
    if script is not None and Path(script).is_file():
        if not os.access(script, os.X_OK):
            remedy = f"chmod +x {shlex.quote(script)}"
            raise ConfigError(f"--host-discovery-script: {script} is not executable: {remedy}")
    # What a line for a shell does is seen later.
    elif script and len(script.split()) == 1 and not shutil.which(script, path=environ.get("PATH")):
        raise ConfigError(
            f"--host-discovery-script: there is no program {script} in the folder {os.getcwd()} or "
            "in PATH: give the full path"
        )
    passed = rank_environment(environ, None, options)
    options = replace(options, command=_command(options, passed))
    if options.verbose:
        say(f"sets {_changes(passed, environ)}")
    return ElasticJob(options, passed, environ).run()


def _wait_for_names(options: LaunchOptions) -> JobOutcome | None:
    """Wait until each host of a launcher pod has an address; return why the job ends instead."""
    seconds = options.start_timeout_seconds
    names = [host.name for host in options.hosts if host.remote]
    with SignalInbox() as signals:
        missing = names_without_address(names, seconds, signals)
    if signals.received is not None:
        return signal_outcome(signals.received)
    if not missing:
        return None
    return JobOutcome(
        NOT_STARTED_CODE,
        f"{len(missing)} of {len(options.hosts)} hosts have no address after {seconds:g} seconds "
        f"(--start-timeout): {listed(missing)}. Remedy: see with kubectl get pods why these pods "
        "are not ready, or let the launcher start when they are "
        "(launcherCreationPolicy: WaitForWorkersReady)",
    )


def report_hosts(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Print what is found on the hosts; returns the exit code: 0 where a job can run on them."""
    if not options.hosts:
        raise ConfigError(
            "--check-hosts needs hosts, such as: hvdlite-run --check-hosts -H a:2,b:2"
        )
    report = _find(options, environ, _mpi(options, environ))
    for line in report.lines():
        print(line)
    return 1 if report.problems else 0


def _check_before_start(
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
    return _find(options, environ, mpi)


def _use_networks(
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


def _find(options: LaunchOptions, environ: Mapping[str, str], mpi: Mpi | None) -> HostReport:
    ports = [0]  # Any, unless the user has limited those that the job will listen on.
    passed = {**environ, **options.variables}
    first = passed.get("OMPI_MCA_btl_tcp_port_min_v4", "")
    count = passed.get("OMPI_MCA_btl_tcp_port_range_v4", "")
    if match := PORTS.fullmatch(passed.get("HVDLITE_TCP_PORTS", "")):
        ports = list(range(int(match[1]), int(match[2]) + 1))
    elif mpi is not None and first.isdecimal() and count.isdecimal():
        ports = list(range(int(first), int(first) + int(count)))
    return check_hosts(options.hosts, options, environ, mpi=mpi is not None, ports=ports)


def _mpi(options: LaunchOptions, environ: Mapping[str, str]) -> Mpi | None:
    """Return the MPI that starts the ranks; None where agents do."""
    return find_mpi(environ, bool(options.hosts)) if options.launcher == MPIRUN else None


def agent_hosts(options: LaunchOptions) -> tuple[AgentHost, ...]:
    """Return the hosts that get ranks, filled in their order."""
    if not options.hosts:
        return (AgentHost(socket.gethostname(), False, tuple(options.ranks)),)
    hosts, first = [], 0
    for host, count in zip(options.hosts, options.counts, strict=True):
        if count:
            # What srun starts on this host is as far away as elsewhere: it has no pipe to us.
            remote = host.remote or options.launcher in GROUPS
            hosts.append(AgentHost(host.name, remote, tuple(range(first, first + count))))
        first += count
    return tuple(hosts)


def _changes(passed: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return what ranks get beside the environment of the user."""
    changed = {k: v for k, v in sorted(passed.items()) if v != environ.get(k) and k != TOKEN}
    return shlex.join(f"{name}={value}" for name, value in changed.items())


def _command(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that can be run: a script is run by the Python that runs this."""
    command = options.command[0]
    if shutil.which(command, path=environ.get("PATH")):
        return options.command
    script = command.endswith(".py")
    if script and Path(command).is_file():
        return (sys.executable, *options.command)
    if options.remote:
        return options.command
    where = "there is no such file" if script else "it is not found, or cannot be executed"
    if Path(command).is_dir():
        where = "it is a folder: name the script or program in it"
    raise ConfigError(f"the command {command!r}: {where}")
