"""Where a job is shown while it runs."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.setting import output_file

LOOPBACK = "127.0.0.1"
HIGHEST_PORT = 65535
PORT, ADDRESS = re.compile("[0-9]{1,5}"), re.compile(r"[\w.:%-]+")


@dataclass(frozen=True)
class LiveOptions:
    """What is shown of the numbers of the ranks."""

    metrics_port: int | None = None  # None: nothing is served; 0: any free port.
    metrics_address: str = LOOPBACK
    show: bool = False  # As a table on the terminal.
    page: tuple[str, int] | None = None  # Address and port of the page; 0: any free port.
    report: str | None = None  # The file for the page at the end of the job.
    title: str = ""  # Of the page.

    @property
    def counts(self) -> bool:
        return self.show or self.has_page or self.metrics_port is not None

    @property
    def has_page(self) -> bool:
        """Whether there is a page, served or as a file."""
        return self.page is not None or self.report is not None


NOT_SHOWN = LiveOptions()


def live_options(args: argparse.Namespace) -> LiveOptions:
    """Return the options. Raises `ConfigError` for flags that contradict each other."""
    port = args.metrics_port
    if args.metrics_address is not None and port is None:
        raise ConfigError("--metrics-address needs --metrics-port")
    if port is not None and port > HIGHEST_PORT:
        raise ConfigError(f"--metrics-port {port}: ports go up to {HIGHEST_PORT}")
    if args.show_live and args.debug_rank is not None:
        raise ConfigError("--live contradicts --debug-rank, which gives the terminal to a rank")
    page = None if args.live_page is None else _place(args.live_page)
    report = args.live_report
    if report is not None:
        try:
            report = output_file(report)
        except ValueError as error:
            raise ConfigError(f"--live-report {report}: {error}") from None
    scripts = [word for word in args.command if word.endswith(".py")]
    return LiveOptions(
        port,
        args.metrics_address or LOOPBACK,
        args.show_live,
        page,
        report,
        # The name of the script, without arguments, which may be secret.
        Path([*scripts, *args.command, "hvdlite"][0]).name,
    )


def _place(text: str) -> tuple[str, int]:
    """Return address and port of ``[ADDRESS:]PORT``."""
    address, colon, port = text.rpartition(":")
    bare = address.removeprefix("[").removesuffix("]") if colon else LOOPBACK
    if (
        not (port.isdecimal() and len(port) < 6 and int(port) <= HIGHEST_PORT and bare)
        or " " in text
    ):
        raise ConfigError(
            f"--live-page {text}: must be a port (0: any that is free), ADDRESS:PORT or [IPv6]:PORT"
        )
    return bare, int(port)
