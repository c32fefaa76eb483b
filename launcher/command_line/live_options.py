"""Where a job is shown while it runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hvdlite.common.base.errors import ConfigError

LOOPBACK = "127.0.0.1"
HIGHEST_PORT = 65535


@dataclass(frozen=True)
class LiveOptions:
    """What is shown of the numbers of the ranks."""

    metrics_port: int | None = None  # None: nothing is served; 0: any free port.
    metrics_address: str = LOOPBACK
    show: bool = False  # As a table on the terminal.

    @property
    def counts(self) -> bool:
        return self.show or self.metrics_port is not None


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
    return LiveOptions(port, args.metrics_address or LOOPBACK, args.show_live)
