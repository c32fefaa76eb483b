"""Starts ranks without MPI, as by hand: python -m tests.parallel.start_ranks SIZE COMMAND

    --hosts NAMESPACE:ADDRESS:SLOTS,...   on simulated hosts, of which the first serves the meeting

The exit code is that of the first rank that failed. Ranks that are left go on when one has died.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
from typing import NamedTuple

from hvdlite.launcher.processes.signals import die_with_parent
from tests.ports import LOOPBACK, free_port


class Host(NamedTuple):
    """A host with `slots` ranks; a network namespace, or "" for this one."""

    namespace: str
    address: str
    slots: int

    def command(self, command: list[str]) -> list[str]:
        """The command line that runs `command` there."""
        if not self.namespace:
            return command
        script = f'hostname {self.namespace}; exec "$@"'
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", script, "sh", *command]


def read_host(text: str) -> Host:
    """Parse one element of --hosts."""
    namespace, address, slots = text.split(":")
    return Host(namespace, address, int(slots))


def main() -> int:
    """Start all ranks, and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="")
    parser.add_argument("size", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    given = [read_host(text) for text in filter(None, options.hosts.split(","))]
    hosts = given or [Host("", LOOPBACK, options.size)]
    common = {
        "HVDLITE_SIZE": str(options.size),
        "HVDLITE_RENDEZVOUS": f"{hosts[0].address}:{free_port()}",
        "HVDLITE_SECRET": secrets.token_hex(16),
    }
    where = [host for host in hosts for _ in range(host.slots)]
    ranks = [
        subprocess.Popen(
            host.command(options.command),
            env={**os.environ, **common, "HVDLITE_RANK": str(rank)},
            preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - it makes one system call
        )
        for rank, host in enumerate(where)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
