"""The command line hvdlite-run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.launcher.command_line.options import resolve
from hvdlite.launcher.jobs.outcome import NOT_STARTED_CODE
from hvdlite.launcher.jobs.start import report_hosts, run_job
from hvdlite.launcher.processes.console import open_missing_descriptors, say
from hvdlite.launcher.processes.error_text import spell_os_error

USAGE_CODE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the flags describe, and return its exit code.

    That is the exit code of the first rank that failed, 128 + N after signal N, 2 for wrong usage.
    """
    open_missing_descriptors()
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        say(str(error))
        return USAGE_CODE
    except OSError as error:  # Such as a full disk; nothing of the job runs any more.
        say(f"this host cannot run the job: {spell_os_error(error)}")
        return NOT_STARTED_CODE
    except KeyboardInterrupt:  # while hosts are checked, before the job handles signals
        say("ended by SIGINT")
        return 128 + signal.SIGINT


def _main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if args.version:
        from hvdlite import __version__

        print(__version__)
        return 0
    if args.check_build:
        from hvdlite.launcher.check_build import report

        print(report(os.environ))
        return 0
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working directory has been deleted: change into one that exists"
        ) from None
    options = resolve(args, os.environ)
    for note in options.notes:
        say(f"warning: {note}")
    if args.check_hosts:
        return report_hosts(options, os.environ)
    pod = options.launcher_pod
    if pod is not None:
        say(f"{options.num_proc} ranks on the hosts of {pod.hostfile}, which {pod.source} tells of")
    elif options.torch_pod is not None:
        say(f"ranks {options.ranks[0]} to {options.ranks[-1]} of {options.size}, as PET_... say")
    elif options.allocation is not None:
        say(f"{options.num_proc} ranks on {options.allocation}")
    elif not args.num_proc and not options.hosts and options.num_proc > 1:
        say(f"{options.num_proc} ranks, as many as there are cores: -np sets the number")
    outcome = run_job(options, os.environ)
    if outcome.sentence:
        say(outcome.sentence)
    return outcome.code
