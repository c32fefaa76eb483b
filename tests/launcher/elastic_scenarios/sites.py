"""Where the jobs of the scenarios run: on this host, or on hosts of a lab (tests/hosts/sites.py).

The fixture `site` of a folder's conftest.py says which it is, so a scenario is written once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.forks import NUMPY, TORCH
from tests.launcher.elastic.jobs import SCRIPT, Watch
from tests.launcher.elastic.jobs import Place as Worker
from tests.launcher.elastic_scenarios.jobs import OTHERS, Fault, Outcome
from tests.launcher.jobs import IMPATIENT, MARK, processes, start
from tests.parallel.jobs import environment

TORCH_SCRIPTS = ("train_torch", "train_features", "torch_script.py")
SEEN_SECONDS = 10.0  # In which a discovery script is run that is due five times a second.


class Site:
    """The hosts of a test, and a folder that all of them see."""

    hosts: tuple[str, ...]  # Three names.
    used = 1  # The number of hosts over which a job is spread, unless it needs more.

    def __init__(self, folder: Path, inside: Path) -> None:
        """`inside` is the path by which workers see `folder`."""
        self.folder, self.inside = folder, inside

    # -- what each kind of site does in its own way

    def launch(self, *words: str, **variables: str) -> AbstractContextManager[Watch]:
        """Start hvdlite-run; at the end nothing of the job may be left."""
        raise NotImplementedError

    def beside(self, host: str, *command: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """Start a command in a host; at the end it is killed."""
        raise NotImplementedError

    def outside(self, host: str, pid: int) -> int:
        """Return the number here of a process of a host. Raises `ProcessLookupError`."""
        raise NotImplementedError

    def signal_launcher(self, watch: Watch, number: int) -> None:
        """Send a signal to hvdlite-run."""
        raise NotImplementedError

    def workers(self) -> dict[str, dict[int, str]]:
        """Return the processes that run, by host: number here, and command line."""
        raise NotImplementedError

    # -- processes

    def signal(self, host: str, pid: int, number: int) -> None:
        """Send a signal to a process, as its host numbers it. Raises `ProcessLookupError`."""
        os.kill(self.outside(host, pid), number)

    def kill(self, worker: Worker) -> None:
        """Kill a worker."""
        self.signal(worker.host, worker.pid, signal.SIGKILL)

    def agent(self, worker: Worker) -> int:
        """Return the number here of the agent of a worker: of its parent."""
        status = Path(f"/proc/{self.outside(worker.host, worker.pid)}/status").read_text()
        return int(status.partition("PPid:")[2].split()[0])

    # -- flags

    def spread(self, size: int, hosts: int = 1) -> str:
        """Return hosts with so many slots together."""
        count = min(size, max(hosts, self.used))
        slots = [size // count + (at < size % count) for at in range(count)]
        return ",".join(f"{host}:{n}" for host, n in zip(self.hosts, slots, strict=False))

    def flags(self, size: int, hosts: int = 1) -> tuple[str, ...]:
        """Ask for a job of so many ranks, on at least so many hosts."""
        return ("-np", str(size), "--min-np", "1", "-H", self.spread(size, hosts))

    def discovery(self, *lines: str) -> tuple[str, ...]:
        """Write a discovery script that shows these lines at first; return its flags."""
        hosts, asked = (shlex.quote(str(self.inside / name)) for name in ("hosts", "asked"))
        (self.folder / "asked").touch()
        self.show(*lines)
        return self.script(f"cat {hosts}\nstatus=$?\necho >>{asked}\nexit $status")

    def script(self, text: str) -> tuple[str, ...]:
        """Write a discovery script for the shell; return its flags."""
        path = self.folder / "hosts.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return ("--host-discovery-script", str(self.inside / path.name))

    def show(self, *lines: str) -> None:
        """Let discovery show these lines."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.folder / "hosts")

    def wait_until_seen(self) -> None:
        """Wait until the driver has read what discovery shows."""
        # The run that ends next may have begun before, and the driver reads what a run has printed
        # before it begins another one.
        asked = self.folder / "asked"
        wanted, deadline = asked.stat().st_size + 3, time.monotonic() + SEEN_SECONDS
        while asked.stat().st_size < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    # -- jobs

    @contextlib.contextmanager
    def elastic(self, *flags: str, **variables: str) -> Iterator[Watch]:
        """Start a job that trains until `end` is called."""
        (self.folder / "train.py").write_text(SCRIPT)
        words = ("python", str(self.inside / "train.py"), str(self.inside / "end"))
        with self.launch(*flags, *words, **variables) as watch:
            yield watch

    def end(self, watch: Watch) -> int:
        """Let the workers of `elastic` return; return the exit code of the job."""
        (self.folder / "end").touch()
        return watch.finish()

    def run(
        self,
        script: str,
        *flags: str,
        faults: Sequence[Fault] = (),
        timeout: float = 120,
        **variables: Any,
    ) -> Outcome:
        """Run a script of this folder to its end."""
        module = f"tests.launcher.elastic_scenarios.{script}"
        texts = {name: str(value) for name, value in variables.items()}
        texts["FAULTS"] = json.dumps(list(faults))
        texts["FIRST_WORKERS"] = flags[flags.index("-np") + 1]
        texts["SCENARIO_HOSTS"] = str(self.inside / "hosts")
        with self.launch(*flags, "python", "-m", module, **texts) as watch:
            code = watch.finish(timeout)
        return Outcome.of(code, watch.out, watch.err)


class OneHost(Site):
    """This machine. Between its names TCP is used, so that they are as different hosts."""

    hosts = ("localhost", "127.0.0.1", socket.gethostname())

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder)
        self._mark = str(folder)

    @contextlib.contextmanager
    def launch(self, *words: str, **variables: str) -> Iterator[Watch]:
        """See `Site.launch`."""
        variables[MARK] = self._mark
        forked = TORCH if any(word.endswith(TORCH_SCRIPTS) for word in words) else NUMPY
        how: dict[str, Any] = {"may_leave": OTHERS, "program": IMPATIENT, "forked": forked}
        with start(*words, **how, **variables) as process:
            watch = Watch(process)
            try:
                yield watch
            finally:
                watch.close()

    @contextlib.contextmanager
    def beside(self, host: str, *command: str) -> Iterator[subprocess.Popen[str]]:
        """See `Site.beside`."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    def outside(self, host: str, pid: int) -> int:
        """See `Site.outside`."""
        return pid

    def signal_launcher(self, watch: Watch, number: int) -> None:
        """See `Site.signal_launcher`."""
        watch.process.send_signal(number)

    def workers(self) -> dict[str, dict[int, str]]:
        """See `Site.workers`."""
        return {self.hosts[0]: processes(self._mark)}
