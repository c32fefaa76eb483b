"""Starts ranks without MPI, as by hand: python -m tests.parallel.start_ranks SIZE COMMAND

    --hosts NAMESPACE:ADDRESS:SLOTS,...   on simulated hosts, of which the first serves the meeting
    --preload MODULE,...                  once for all ranks, which are forked then and run COMMAND:
                                          python -m MODULE ... or python -c PROGRAM ...
    --jobs FILE                           in place of SIZE COMMAND: jobs after --preload, one after
                                          the other; JSON of [[name, size, command, variables], ...]

A framework takes seconds of a core to import, and so would each rank. The exit code is that of the
first rank that failed. Ranks that are left go on when one has died. After each job of a FILE comes
a line ``JOB name ended with code``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from hvdlite.launcher.processes.signals import die_with_parent
from tests.ports import LOOPBACK, free_port

CLONE_NEWUTS, CLONE_NEWNET = 0x4000000, 0x40000000


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

    def enter(self) -> None:
        """Let this process, which has one thread, be there."""
        if self.namespace:
            system = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{self.namespace}") as namespace:
                failed = system.setns(namespace.fileno(), CLONE_NEWNET)
            if failed or system.unshare(CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"no way into {self.namespace}")
            socket.sethostname(self.namespace)


def read_host(text: str) -> Host:
    """Parse one element of --hosts."""
    namespace, address, slots = text.split(":")
    return Host(namespace, address, int(slots))


HERE = Host("", LOOPBACK, 1)
follow_parent = die_with_parent(signal.SIGKILL)


def fork(command: list[str], variables: dict[str, str], host: Host = HERE) -> Callable[[], int]:
    """Start a rank that has what this process has imported; return what waits for its exit code."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return lambda: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    follow_parent()
    host.enter()
    os.environ.update(variables)
    run_python(*command[1:])


def run_python(flag: str, program: str, *arguments: str) -> NoReturn:
    """Run a module or a program as Python does after its start."""
    sys.argv = [flag, *arguments]
    if flag == "-m":
        sys.modules.pop(program, None)  # runpy warns of a module that is there.
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    sys.exit()  # Not os._exit(): the engine serves other ranks until they have left, too.


def start(command: list[str], variables: dict[str, str], host: Host = HERE) -> Callable[[], int]:
    """Start a rank; return what waits for its exit code."""
    return subprocess.Popen(
        host.command(command),
        env={**os.environ, **variables},
        preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - it makes one system call
    ).wait


def run_job(
    begin: Callable[[list[str], dict[str, str], Host], Callable[[], int]],
    command: list[str],
    hosts: Sequence[Host],
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run a command on all ranks, of which the first serves the meeting; return the exit code.

    `begin` is `start` or `fork`.
    """
    places = [host for host in hosts for _ in range(host.slots)]
    common = {
        **(variables or {}),
        "HVDLITE_SIZE": str(len(places)),
        "HVDLITE_RENDEZVOUS": f"{hosts[0].address}:{free_port()}",
        "HVDLITE_SECRET": secrets.token_hex(16),
    }
    ranks = [
        begin(command, {**common, "HVDLITE_RANK": str(rank)}, host)
        for rank, host in enumerate(places)
    ]
    codes = [wait() for wait in ranks]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def main() -> int:
    """Start all ranks, and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="")
    parser.add_argument("--preload", default="")
    parser.add_argument("--jobs", type=Path)
    parser.add_argument("size", type=int, nargs="?", default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    hosts = [read_host(text) for text in filter(None, options.hosts.split(","))]
    for module in filter(None, options.preload.split(",")):
        import_module(module)
    gc.collect()
    gc.freeze()  # Collections of ranks would look through it, and copy it.
    if options.jobs:
        return run_jobs(json.loads(options.jobs.read_text()))
    begin = fork if options.preload else start
    return run_job(begin, options.command, hosts or on_this_host(options.size))


def on_this_host(size: int) -> list[Host]:
    return [HERE._replace(slots=size)]


def run_jobs(jobs: list[tuple[str, int, list[str], dict[str, str]]]) -> int:
    """Run jobs one after the other; the exit code is that of the first that failed."""
    codes = []
    for name, size, command, variables in jobs:
        codes.append(run_job(fork, command, on_this_host(size), variables))
        os.write(1, f"\nJOB {name} ended with {codes[-1]}\n".encode())
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
