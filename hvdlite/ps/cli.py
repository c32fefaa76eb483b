"""The command line hvdlite-ps: ``hvdlite-ps scheduler`` is the scheduler of a cluster, alone."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.ps.cluster.settings import read_settings
from hvdlite.ps.scheduler.running import run_scheduler

USAGE_CODE = 2
FLAGS = {
    "--address": ("HVDLITE_SCHEDULER", "HOST:PORT", "the address that all processes are told"),
    "--servers": ("HVDLITE_NUM_SERVERS", "N", "how many servers there are"),
    "--workers": ("HVDLITE_NUM_WORKERS", "N", "how many workers there are"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Be the scheduler until all workers have left; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="hvdlite-ps", description="The scheduler of a parameter server, alone.",
        epilog="What is not given is read from the environment, by the names in "
        "docs/parameter_server.md.",
    )  # fmt: skip
    parser.add_argument("role", choices=["scheduler"])
    for flag, (variable, metavar, text) in FLAGS.items():
        parser.add_argument(flag, dest=variable, metavar=metavar, help=text)
    given = {name: text for name, text in vars(parser.parse_args(argv)).items() if text}
    del given["role"]
    try:
        settings = read_settings({**os.environ, **given, "HVDLITE_ROLE": "scheduler"})
        assert settings is not None
        run_scheduler(settings)
    except (ConfigError, HorovodInternalError) as error:
        print(f"hvdlite-ps: {error}", file=sys.stderr)
        return USAGE_CODE if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
