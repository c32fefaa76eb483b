"""From checked options to a finished job."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.environment import rank_environment
from hvdlite.launcher.job import Job, Outcome
from hvdlite.launcher.mpi import find_mpi
from hvdlite.launcher.options import Options


def run_job(options: Options, environ: Mapping[str, str]) -> Outcome:
    """Run the job; raises `ConfigError` before anything is started."""
    mpi = find_mpi(environ, bool(options.hosts))
    passed = rank_environment(environ, mpi, options)
    _check_command(options, passed)
    job = Job(mpi, options, passed)
    if options.verbose:
        _explain(job, environ)
    return job.run()


def _explain(job: Job, environ: Mapping[str, str]) -> None:
    changed = {k: v for k, v in sorted(job.environ.items()) if v != environ.get(k)}
    command = ["<rank shell>" if "\n" in word else word for word in job.command_line()]
    for line in (
        f"{job.mpi.name}, {job.options.num_proc} ranks",
        f"sets {shlex.join(f'{name}={value}' for name, value in changed.items())}",
        f"runs {shlex.join(command)}",
    ):
        print(f"hvdlite-run: {line}", file=sys.stderr, flush=True)


def _check_command(options: Options, environ: Mapping[str, str]) -> None:
    command = options.command[0]
    if options.remote or shutil.which(command, path=environ.get("PATH")):
        return
    hint = f"; to run a script say: python {command}" if command.endswith(".py") else ""
    raise ConfigError(f"the command {command!r} is not found, or cannot be executed{hint}")
