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

    @property
    def counts(self) -> bool:
        """Whether the ranks must count."""
        return self.metrics_port is not None


NOT_SHOWN = LiveOptions()


def live_options(args: argparse.Namespace) -> LiveOptions:
    """Return the options. Raises `ConfigError` for flags that contradict each other."""
    port = args.metrics_port
    if args.metrics_address is not None and port is None:
        raise ConfigError("--metrics-address needs --metrics-port")
    if port is not None and port > HIGHEST_PORT:
        raise ConfigError(f"--metrics-port {port}: ports go up to {HIGHEST_PORT}")
    return LiveOptions(port, args.metrics_address or LOOPBACK)
