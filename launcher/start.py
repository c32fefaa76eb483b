"""From checked options to a finished job."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping

from hvdlite.common.errors import ConfigError
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
        changed = {name: passed[name] for name in sorted(passed) if passed[name] != environ.get(name)}
        print(f"hvdlite-run: {mpi.name}, {options.num_proc} ranks", file=sys.stderr)
        print(f"hvdlite-run: sets {shlex.join(f'{k}={v}' for k, v in changed.items())}",
              file=sys.stderr)  # fmt: skip
        print(f"hvdlite-run: runs {shlex.join(job.command_line())}", file=sys.stderr, flush=True)
    return job.run()


def _check_command(options: Options, environ: Mapping[str, str]) -> None:
    command = options.command[0]
    if options.remote or shutil.which(command, path=environ.get("PATH")):
        return
    hint = f"; to run a script say: python {command}" if command.endswith(".py") else ""
    raise ConfigError(f"the command {command!r} is not found, or cannot be executed{hint}")
