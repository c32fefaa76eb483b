"""From checked options to a finished job."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.console import say
from hvdlite.launcher.environment import rank_environment
from hvdlite.launcher.job import Job
from hvdlite.launcher.mpi import find_mpi
from hvdlite.launcher.names import listed, names_without_address
from hvdlite.launcher.options import LaunchOptions
from hvdlite.launcher.outcome import NOT_STARTED_CODE, JobOutcome, signal_outcome
from hvdlite.launcher.signals import SignalInbox
from hvdlite.launcher.torchrun import torchrun_variables


def run_job(options: LaunchOptions, environ: Mapping[str, str]) -> JobOutcome:
    """Run the job; raises `ConfigError` before anything is started."""
    if options.launcher_pod is not None:
        failure = _wait_for_names(options)
        if failure is not None:
            return failure
    mpi = find_mpi(environ, bool(options.hosts))
    passed = rank_environment(environ, mpi, options)
    options = replace(options, command=_command(options, passed))
    with torchrun_variables(options, environ) as variables:
        job = Job(mpi, options, passed | variables)
        if options.verbose:
            _explain(job, environ)
        return job.run()


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


def _explain(job: Job, environ: Mapping[str, str]) -> None:
    changed = {k: v for k, v in sorted(job.environ.items()) if v != environ.get(k)}
    command = ["<rank shell>" if "\n" in word else word for word in job.command_line()]
    say(f"{job.mpi.name}, {job.options.num_proc} ranks")
    say(f"sets {shlex.join(f'{name}={value}' for name, value in changed.items())}")
    say(f"runs {shlex.join(command)}")


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
    raise ConfigError(f"the command {command!r}: {where}")
