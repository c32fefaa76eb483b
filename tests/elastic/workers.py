"""Workers as processes, and what they print."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.elastic.fake_driver import FakeDriver
from tests.forks import NUMPY, TORCH, forks

ROOT = Path(__file__).parents[2]
Line = dict[str, Any]


class Workers:
    """Processes by number; each writes to a file of its own."""

    def __init__(self, folder: Path, driver: FakeDriver, *, forked: bool) -> None:
        self.folder, self.driver, self._forked = folder, driver, forked
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._parsed: dict[int, tuple[list[Line], int]] = {}

    def start(self, number: int, module: str, **variables: str) -> None:
        """Start a worker that runs a module of this folder."""
        place = self.driver.environment(number, number, max(number + 1, self.driver.size))
        with open(self.folder / f"worker{number}", "w") as output:
            modules = TORCH if "torch" in module else NUMPY
            popen = forks(*modules) if self._forked else subprocess.Popen
            self.processes[number] = popen(
                [sys.executable, "-m", f"tests.elastic.{module}"],
                env={**os.environ, "OMP_NUM_THREADS": "1", **place, **variables}, cwd=ROOT,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self, number: int) -> float:
        """Kill -9; the time of it."""
        now = time.monotonic()
        self.processes[number].kill()
        return now

    def output(self, number: int) -> str:
        """All that a worker has written."""
        return (self.folder / f"worker{number}").read_text()

    def lines(self, number: int) -> list[Line]:
        """The whole lines of JSON that a worker has written."""
        parsed, end = self._parsed.setdefault(number, ([], 0))
        with open(self.folder / f"worker{number}", "rb") as output:
            output.seek(end)
            new = output.read()
        whole = new[: new.rfind(b"\n") + 1]
        parsed += [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]
        self._parsed[number] = parsed, end + len(whole)
        return parsed

    def wait_for(self, number: int, fits: Callable[[Line], bool], seconds: float = 20.0) -> Line:
        """The first line of a worker that fits, as soon as there is one."""
        end = time.monotonic() + seconds
        seen = 0
        while time.monotonic() < end:
            lines = self.lines(number)
            for line in lines[seen:]:
                if fits(line):
                    return line
            seen = len(lines)
            assert self.processes[number].poll() in (None, 0), self.output(number)
            time.sleep(0.002)
        raise AssertionError(f"worker {number} did not write it: {self.output(number)[-2000:]}")

    def codes(self, seconds: float = 20.0) -> dict[int, int]:
        """The exit codes of all, when they have ended."""
        end = time.monotonic() + seconds
        return {
            number: process.wait(max(0.1, end - time.monotonic()))
            for number, process in self.processes.items()
        }


@contextlib.contextmanager
def job(
    folder: Path, size: int, module: str = "", *, forked: bool = True, **variables: str
) -> Iterator[Workers]:
    """A job with a fake driver, and with `size` workers that run `module` if one is given.

    They are started anew, or `forked` from a process that has imported what they need.
    """
    hosts = variables.pop("hosts", "")
    where = dict(enumerate(hosts.split(",")))
    driver = FakeDriver(folder, size, hosts=lambda number: where.get(number, "a") or "a")
    workers = Workers(folder, driver, forked=forked)
    try:
        if module:
            for number in range(size):
                workers.start(number, module, **variables)
            driver.wait_for_world(1)
        yield workers
    finally:
        for process in workers.processes.values():
            process.kill()
            process.wait()
        driver.close()
