"""The flags of hvdlite-run; those of settings are derived from `hvdlite.common.settings.config`."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import settings
from hvdlite.common.settings.setting import Setting

BY_ITSELF = "choose with --allreduce and --data-plane, or leave it out"
# Flags of horovodrun that have no meaning here: the number of their values, and what to do instead.
IGNORED = {
    "--disable-cache": (0, "nothing is cached between runs"),
    "--hierarchical-allgather": (0, BY_ITSELF),
    "--no-hierarchical-allgather": (0, BY_ITSELF),
    "--torus-allreduce": (0, BY_ITSELF),
    "--no-torus-allreduce": (0, BY_ITSELF),
    "--num-nccl-streams": (1, "there is one stream per rank"),
    "--gloo-timeout-seconds": (1, "use --start-timeout, or --stall-check-shutdown-time-seconds"),
}
# Old spellings of horovodrun: the flag of today, the setting, and its value.
RENAMED = {
    "--log-hide-timestamp": ("--log-without-timestamp", "log_hide_time", "1"),
    "--no-log-hide-timestamp": ("--log-with-timestamp", "log_hide_time", "0"),
}


# Flags that hardly any command has, so that one after a command is likely to be misplaced.
UNMISTAKABLE = {"-np", "--num-proc", "-H", "--hosts", "-hostfile", "--hostfile", "--min-np"}
UNRECOGNIZED = "unrecognized arguments: "  # how argparse begins a message


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """No abbreviations: argparse allows those of flags with one dash all the same."""
        return []

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it exits."""
        message = message.removeprefix("argument ")
        if message.startswith(UNRECOGNIZED):
            raise self.unknown(message.removeprefix(UNRECOGNIZED).split()[0])
        if message.endswith("expected one argument"):
            message += "; one that starts with a dash is given as FLAG=VALUE"
        raise ConfigError(message)

    def unknown(self, flag: str) -> ConfigError:
        """Return the error for a flag that there is not, with the one that may be meant."""
        known = [
            name for name, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]  # fmt: skip
        close = difflib.get_close_matches(flag.partition("=")[0].lower(), known, n=1, cutoff=0.75)
        hint = f"did you mean {close[0]}?" if close else "hvdlite-run --help lists the flags"
        return ConfigError(f"unknown flag {flag}: {hint}")


class Ignore(argparse.Action):
    """A flag that only leaves a note."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *args: Any
    ) -> None:
        """Note that the flag has no meaning."""
        flag = self.option_strings[0]
        namespace.notes.append(f"{flag} has no meaning here, and is ignored: {IGNORED[flag][1]}")


class Rename(argparse.Action):
    """A flag that stands for another one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *args: Any
    ) -> None:
        """Set what the other flag sets, and note its name."""
        flag = self.option_strings[0]
        today, name, value = RENAMED[flag]
        setattr(namespace, name, value)
        namespace.notes.append(f"{flag} is deprecated: use {today}")


def make_parser() -> Parser:
    """Make the parser of hvdlite-run's command line."""
    parser = Parser(
        prog="hvdlite-run",
        usage="hvdlite-run [-np N] [flags] command [arguments]",
        description="Run a command on N ranks: hvdlite-run -np 4 python train.py",
        allow_abbrev=False,
    )
    _add_job_flags(parser)
    _add_host_flags(parser)
    _add_elastic_flags(parser)
    _add_mpi_flags(parser)
    _add_output_flags(parser)
    _add_setting_flags(parser)
    # The flags of horovodrun that hvdlite-run does not have.
    parser.set_defaults(notes=[])
    hidden: dict[str, Any] = {"dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag, (values, _) in IGNORED.items():
        parser.add_argument(flag, action=Ignore, nargs=values, **hidden)
    for flag in RENAMED:
        parser.add_argument(flag, action=Rename, nargs=0, **hidden)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs")
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; raises `ConfigError` with one sentence that names the flag.

    `notes` of the result are warnings for the user.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command and args.command[0] == "--":
        del args.command[0]
    elif args.command and args.command[0].startswith("-"):
        raise parser.unknown(args.command[0])
    if args.num_proc is None:
        args.notes += _misplaced(args.command)
    return args


def _misplaced(command: Sequence[str]) -> list[str]:
    """Return a note where a command begins with flags that are like those of hvdlite-run."""
    if len(command) < 2 or command[1].partition("=")[0] not in UNMISTAKABLE:
        return []
    first, *words = command
    end = 1 if "=" in words[0] else 2
    right = shlex.join(["hvdlite-run", *words[:end], first, *words[end:]])
    return [f"{words[0]} after the command is for {first}: did you mean {right}?"]


def _add_job_flags(parser: Parser) -> None:
    add = parser.add_argument_group("job").add_argument
    add("-v", "--version", action="store_true", help="print the version and exit")
    add("-cb", "--check-build", action="store_true",
        help="print the frameworks, MPIs and data planes that are found, and exit")  # fmt: skip
    add("-np", "--num-proc", type=positive, metavar="N", help="ranks; default: one per core")
    add("--config-file", metavar="YAML", help="settings; flags that are given win")
    add("--as-horovod", action="store_true", help="the ranks find hvdlite when they import horovod")
    add("--torchrun-env", action="store_true",
        help="set RANK, WORLD_SIZE, MASTER_ADDR and so on, as torchrun does")  # fmt: skip
    add("--debug-rank", type=rank_number, metavar="N",
        help="rank N gets this terminal, so that breakpoint() works there")  # fmt: skip
    add("--verbose", action="store_true", help="print what is started, and how")


def _add_host_flags(parser: Parser) -> None:
    group = parser.add_argument_group("hosts")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="h1:2,h2:4", help="hosts and their slots")
    hosts.add_argument(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="lines of: name slots=number, or name:number",
    )
    hosts.add_argument("--host-discovery-script", metavar="FILE",
        help="prints lines of name:slots, once a second; makes the job elastic")  # fmt: skip
    group.add_argument("-p", "--ssh-port", type=positive, metavar="PORT")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE")
    group.add_argument(
        "--network-interface", action="append", metavar="a",
        help="one of --network-interfaces; may be repeated",
    )  # fmt: skip
    check = group.add_mutually_exclusive_group()
    check.add_argument("--check-hosts", action="store_true",
        help="print what is found on the hosts and between them, and exit")  # fmt: skip
    check.add_argument("--no-check-hosts", action="store_true",
        help="start on several hosts without looking at them first")  # fmt: skip


def _add_elastic_flags(parser: Parser) -> None:
    add = parser.add_argument_group("elastic training").add_argument
    add("--min-np", "--min-num-proc", dest="min_np", type=positive, metavar="N",
        help="fewest ranks to train with; makes the job elastic; default: -np")  # fmt: skip
    add("--max-np", "--max-num-proc", dest="max_np", type=positive, metavar="N",
        help="most ranks; default: all slots")  # fmt: skip
    add("--slots-per-host", type=positive, metavar="N",
        help="slots of hosts that the discovery script prints without a number; default: 1",
    )  # fmt: skip
    add("--reset-limit", type=rank_number, metavar="N",
        help="how often the ranks may change; default: without a limit")  # fmt: skip
    add("--blacklist-cooldown-range", dest="cooldown", type=int, nargs=2, metavar=("LOW", "HIGH"),
        help="a failed host comes back after so many seconds; failures count against the host",
    )  # fmt: skip


def _add_mpi_flags(parser: Parser) -> None:
    either = parser.add_argument_group("MPI or TCP").add_mutually_exclusive_group()
    either.add_argument("--mpi", action="store_true", help="the same as --launcher mpirun")
    either.add_argument("--gloo", action="store_true",
        help="the same as --launcher ssh (or srun) with --transport tcp")  # fmt: skip
    add = parser.add_argument_group("MPI").add_argument
    add("--jsrun", dest="launcher", action="store_const", const="jsrun",
        help="the same as --launcher jsrun")  # fmt: skip
    add("--mpi-args", metavar="ARGS", help="passed to mpirun (or srun) as they are")
    add("--binding-args", metavar="ARGS",
        help="of mpirun, in place of --bind-to none; agents know --bind-to core")  # fmt: skip
    add("--tcp", action="store_true", help="between hosts, use TCP only")


def _add_output_flags(parser: Parser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--output-filename", metavar="DIR", help="write DIR/rank.<N>/stdout and stderr, too")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        dest="prefix_timestamp", help="put the time before each line of output")  # fmt: skip
    add = parser.add_argument_group("the job while it runs").add_argument
    add("--live", action="store_true", dest="show_live",
        help="show what the ranks do as a table below their output")  # fmt: skip
    add("--metrics-port", type=rank_number, metavar="PORT",
        help="serve the ranks' numbers to Prometheus; 0: any free port")  # fmt: skip
    add("--metrics-address", metavar="ADDRESS",
        help="of this host, for --metrics-port; default: 127.0.0.1")  # fmt: skip
    add("--live-page", metavar="[ADDRESS:]PORT",
        help="serve a page with what the ranks do; 0: any free port")  # fmt: skip
    add("--live-report", metavar="FILE", help="write that page at the end, as one HTML file")


def _add_setting_flags(parser: Parser) -> None:
    group = parser.add_argument_group("settings (each has an environment variable, too)")
    for entry in settings():
        if entry.flag and entry.no_flag:
            pair = group.add_mutually_exclusive_group()
            _add_switch(pair, entry, entry.flag, "1", entry.help)
            opposite = f"the opposite of {entry.flag}; the default"
            _add_switch(pair, entry, entry.no_flag, "0", opposite)
        elif entry.flag:
            text = entry.help
            if entry.has_default:  # In the unit of the flag.
                scale, value = entry.flag_scale, entry.default
                value = value / scale if scale != 1 else value
                number = isinstance(value, int | float)
                text += f" Default: {value:g}." if number else f" Default: {value}."
            group.add_argument(entry.flag, dest=entry.name, metavar="VALUE", help=_percent(text))


def _add_switch(group: Any, entry: Setting, flag: str, value: str, text: str) -> None:
    group.add_argument(
        flag, dest=entry.name, action="store_const", const=value, help=_percent(text)
    )


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _whole_number(text, 1)


def rank_number(text: str) -> int:
    """Parse a whole number of at least 0."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
    return value
