"""Clusters of real processes, forked from one that has imported PyTorch already: that is quick."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from tests.limits import patient
from tests.ps.sites import Site, enter_host

LIMIT_SECONDS = patient(60.0)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.ps.preloaded"])


def preload(module: str) -> None:
    """Let all processes be forked from one that has imported this module."""
    _FORKS.set_forkserver_preload([module])


# What other parameter servers call the role, the scheduler's host and port, and the counts.
DIALECTS = {
    "MindSpore": (
        ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_SERVER_NUM", "MS_WORKER_NUM"),
        {"scheduler": "MS_SCHED", "server": "MS_PSERVER", "worker": "MS_WORKER"},
    ),
    "ps-lite": (
        (
            "DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER",
            "DMLC_NUM_WORKER",
        ),
        {"scheduler": "scheduler", "server": "server", "worker": "worker"},
    ),
}  # fmt: skip


class Cluster:
    """Processes that run `main(folder, *words)`, each with the environment of its role."""

    def __init__(
        self, site: Site, ports: tuple[int, int], servers: int, workers: int,
        main: Callable[..., None], *words: object, dialect: str = "", **variables: str,
    ) -> None:  # fmt: skip
        self.site, self.folder = site, site.folder
        scheduler_port, self._port = ports
        self.variables = {
            "HVDLITE_SCHEDULER": f"{site.address('scheduler')}:{scheduler_port}",
            "HVDLITE_PS_TOKEN": "a secret",
            "HVDLITE_NUM_SERVERS": str(servers), "HVDLITE_NUM_WORKERS": str(workers), **variables,
        }  # fmt: skip
        self.dialect = dialect
        self._main, self._words = main, (site.inside, *words)
        self.processes: dict[str, ForkServerProcess] = {}
        self.killed: list[ForkServerProcess] = []

    def start(self, role: str, number: int = 0, **variables: str) -> None:
        """Start a process; `variables` come on top of those of all."""
        name = f"{role}{number}"
        environ = self.variables | {"HVDLITE_ROLE": role, "HVDLITE_NODE_ID": name} | variables
        if role == "worker" and environ.get("HVDLITE_PS_WORKERS") == "mpi":
            environ |= {
                "HVDLITE_RANK": str(number), "HVDLITE_SIZE": environ["HVDLITE_NUM_WORKERS"],
                "HVDLITE_RENDEZVOUS": f"{self.site.address('worker')}:{self._port}",
                "HVDLITE_SECRET": "another",
            }  # fmt: skip
        host = self.site.first_process(role, number)
        words = self._spelt(environ), self._log(name), host, self._main, self._words
        self.processes[name] = _FORKS.Process(target=_run, args=words)
        self.processes[name].start()

    def _spelt(self, environ: dict[str, str]) -> dict[str, str]:
        """Return the environment with the names of another parameter server, and the token."""
        if not self.dialect:
            return environ
        names, roles = DIALECTS[self.dialect]
        host, _, port = environ["HVDLITE_SCHEDULER"].partition(":")
        own = (
            roles[environ["HVDLITE_ROLE"]], host, port, environ["HVDLITE_NUM_SERVERS"],
            environ["HVDLITE_NUM_WORKERS"],
        )  # fmt: skip
        token = {"HVDLITE_PS_TOKEN": environ["HVDLITE_PS_TOKEN"]}  # Others have none.
        return dict(zip(names, own, strict=True)) | token

    def wait(self, name: str) -> int:
        """Return the exit code of a process when it has ended; it is negative for a signal."""
        process = self.processes[name]
        process.join(LIMIT_SECONDS)
        sys.stdout.write(f"-- {name} --\n{self.said(name)}")
        if process.exitcode is None:
            said = "".join(f"-- {each} --\n{self.said(each)}" for each in self.processes)
            raise AssertionError(f"{name} goes on\n{said}")
        return process.exitcode

    def wait_for_all(self) -> dict[str, int]:
        """Return the exit codes that are not 0."""
        codes = {name: self.wait(name) for name in self.processes}
        return {name: code for name, code in codes.items() if code}

    def said(self, name: str) -> str:
        """Return what a process has printed."""
        log = self._log(name)
        return log.read_text() if log.exists() else ""

    def weights(self, worker: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / f"worker{worker}.pt")
        return found

    def times(self, worker: int) -> list[float]:
        """Return when the first step of the worker of this name has begun, and all have ended."""
        found: list[float] = json.loads((self.folder / f"worker{worker}.json").read_text())
        return found

    def wait_for_file(self, pattern: str) -> None:
        """Wait until a process has made a file in the folder."""
        self.wait_until(lambda: any(self.folder.glob(pattern)))

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something has come true, while no process fails but for those of `kill`."""
        limit = time.monotonic() + LIMIT_SECONDS
        while not holds():
            others = {k: v for k, v in self.processes.items() if v not in self.killed}
            codes = {each: process.exitcode for each, process in others.items()}
            said = "".join(map(self.said, self.processes))
            assert time.monotonic() < limit and not any(codes.values()), (codes, said)
            time.sleep(0.002)

    def pid(self, name: str) -> int:
        """Return the number that a process has here."""
        pid = self.processes[name].pid
        assert pid is not None
        return self.site.program_of(pid)

    def kill(self, name: str) -> None:
        """Kill a process by SIGKILL."""
        self.killed.append(self.processes[name])
        os.kill(self.pid(name), signal.SIGKILL)
        self.processes[name].join()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def _run(
    variables: dict[str, str], log: Path, host: int | None, main: Callable[..., None],
    words: tuple[object, ...],
) -> None:  # fmt: skip
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(variables)
    if host is not None:
        enter_host(host)
    main(*words)


@contextlib.contextmanager
def cluster(
    site: Site, servers: int, workers: int, main: Callable[..., None], *words: object,
    dialect: str = "", **variables: str,
) -> Iterator[Cluster]:  # fmt: skip
    """Start a scheduler, servers and workers; what is left of them is killed at the end."""
    with site.port() as one, site.port() as other:
        ports = one, other
        made = Cluster(site, ports, servers, workers, main, *words, dialect=dialect, **variables)
        try:
            made.start("scheduler")
            for number in range(servers):
                made.start("server", number)
            for number in range(workers):
                made.start("worker", number)
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                process.join()
