"""The flags of hvdlite-run; those of settings are derived from `hvdlite.common.plain.config`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.plain.config import Setting, settings

NO_ELASTIC = "elastic training is not part of this version; give -np and the hosts"
NO_CACHE = "nothing is cached between runs; leave it out"
BY_ITSELF = "choose with --allreduce and --data-plane, or leave it out"
# Flags of horovodrun that have no meaning here, and what to use instead.
REPLACED = {
    "--gloo": "hvdlite always runs over MPI; leave it out",
    "--jsrun": "inside an LSF allocation, give its hosts with -H and leave it out",
    "--disable-cache": NO_CACHE,
    "--hierarchical-allgather": BY_ITSELF,
    "--no-hierarchical-allgather": BY_ITSELF,
    "--torus-allreduce": BY_ITSELF,
    "--no-torus-allreduce": BY_ITSELF,
    "--num-nccl-streams": "there is one stream per rank; leave it out",
    "--gloo-timeout-seconds": "use --start-timeout, or --stall-check-shutdown-time-seconds",
    "--log-hide-timestamp": "use --log-without-timestamp",
    "--no-log-hide-timestamp": "use --log-with-timestamp",
    "--min-np": NO_ELASTIC,
    "--min-num-proc": NO_ELASTIC,
    "--max-np": NO_ELASTIC,
    "--max-num-proc": NO_ELASTIC,
    "--slots-per-host": NO_ELASTIC,
    "--elastic-timeout": NO_ELASTIC,
    "--reset-limit": NO_ELASTIC,
    "--blacklist-cooldown-range": NO_ELASTIC,
    "--host-discovery-script": NO_ELASTIC,
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """No abbreviations: argparse allows those of flags with one dash all the same."""
        return []

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it exits."""
        message = message.removeprefix("argument ")
        if message.endswith("expected one argument"):
            message += "; one that starts with a dash is given as FLAG=VALUE"
        raise ConfigError(message.replace("unrecognized arguments:", "unknown flag"))


class Refuse(argparse.Action):
    """A flag that is refused with a sentence that says what replaces it."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        flag = self.option_strings[0]
        raise ConfigError(f"{flag}: {REPLACED[flag]}")


def make_parser() -> Parser:
    """The parser of hvdlite-run's command line."""
    parser = Parser(
        prog="hvdlite-run",
        usage="hvdlite-run [-np N] [flags] command [arguments]",
        description="Run a command on N ranks: hvdlite-run -np 4 python train.py",
        allow_abbrev=False,
    )
    _add_job_flags(parser)
    _add_host_flags(parser)
    _add_mpi_flags(parser)
    _add_output_flags(parser)
    _add_setting_flags(parser)
    for flag in REPLACED:
        parser.add_argument(
            flag, action=Refuse, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs")
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; raises `ConfigError` with one sentence that names the flag."""
    args = make_parser().parse_args(argv)
    if args.command and args.command[0] == "--":
        del args.command[0]
    elif args.command and args.command[0].startswith("-"):
        raise ConfigError(f"unknown flag {args.command[0]} (hvdlite-run --help lists the flags)")
    return args


def _add_job_flags(parser: Parser) -> None:
    add = parser.add_argument_group("job").add_argument
    add("-v", "--version", action="store_true", help="print the version and exit")
    add("-cb", "--check-build", action="store_true",
        help="print the frameworks, MPIs and data planes that are found, and exit")  # fmt: skip
    add("-np", "--num-proc", type=positive, metavar="N", help="ranks; default: one per core")
    add("--config-file", metavar="YAML", help="settings; flags that are given win")
    add("--as-horovod", action="store_true", help="the ranks find hvdlite when they import horovod")
    add("--verbose", action="store_true", help="print what is started, and how")


def _add_host_flags(parser: Parser) -> None:
    group = parser.add_argument_group("hosts")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="h1:2,h2:4", help="hosts and their slots")
    hosts.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="lines of: name slots=number"
    )
    group.add_argument("-p", "--ssh-port", type=positive, metavar="PORT")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE")
    group.add_argument(
        "--network-interfaces", metavar="a,b", help="network interfaces that MPI may use"
    )
    group.add_argument(
        "--network-interface", action="append", metavar="a", help="one of them; may be repeated"
    )


def _add_mpi_flags(parser: Parser) -> None:
    add = parser.add_argument_group("MPI").add_argument
    add("--mpi", action="store_true", help="accepted: hvdlite always runs over MPI")
    add("--mpi-args", metavar="ARGS", help="passed to mpirun (or srun) as they are")
    add("--binding-args", metavar="ARGS", help="instead of binding no rank to cores")
    add("--tcp", action="store_true", help="between hosts, use TCP only")


def _add_output_flags(parser: Parser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--output-filename", metavar="DIR", help="write DIR/rank.<N>/stdout and stderr, too")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        dest="prefix_timestamp", help="put the time before each line of output")  # fmt: skip


def _add_setting_flags(parser: Parser) -> None:
    group = parser.add_argument_group("settings (each has an environment variable, too)")
    for entry in settings():
        if entry.flag and entry.no_flag:
            pair = group.add_mutually_exclusive_group()
            _add_switch(pair, entry, entry.flag, "1", entry.help)
            _add_switch(pair, entry, entry.no_flag, "0", f"the opposite of {entry.flag}")
        elif entry.flag:
            group.add_argument(
                entry.flag, dest=entry.name, metavar="VALUE", help=_percent(entry.help)
            )


def _add_switch(group: Any, entry: Setting, flag: str, value: str, text: str) -> None:
    group.add_argument(
        flag, dest=entry.name, action="store_const", const=value, help=_percent(text)
    )


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value
