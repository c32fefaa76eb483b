"""Runs an elastic job: what the driver decides is done here, and it is told what occurs.

One thread waits for everything: the agents, the discovery script, signals, and the times at which
the driver has something to decide.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping

from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions import endings
from hvdlite.launcher.decisions.endings import Plan
from hvdlite.launcher.elastic.discovery_script import DiscoveryScript
from hvdlite.launcher.elastic.worker_processes import ElasticWorkers
from hvdlite.launcher.jobs.job import Job
from hvdlite.launcher.jobs.outcome import JobOutcome, signal_outcome

# Workers that wait for a world have been told of the end; whoever trains on is not needed any more.
AFTER_FINISH: Plan = ((0.5, endings.TERMINATE), (2.5, endings.KILL), (1.0, endings.ABANDON))
LAST_SECONDS = 5.0  # How long agents without workers may take to end.
POLL_SECONDS = 0.02  # Between two looks whether their processes have ended.


class ElasticJob(Job):
    """One elastic run of one command; `environ` is that of the workers."""

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str],
        launcher_environ: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(options, environ)
        assert options.elastic is not None
        self.hands = ElasticWorkers(
            options.elastic, self, lambda host: self._hosts[host], launcher_environ
        )
        self.driver = self.hands.driver
        self._hosts: dict[str, int] = {}  # The slots of all hosts that were ever discovered.
        self._script: DiscoveryScript | None = None
        if options.elastic.discovery_script is not None:
            self._script = DiscoveryScript(
                options.elastic.discovery_script, options.elastic.slots_per_host,
                launcher_environ, self.loop, self._discovered,
                lambda error: self.driver.discovery_failed(str(error), self.loop.now()),
            )  # fmt: skip
        elif options.hosts:
            self._hosts = {host.name: host.slots for host in options.hosts}
        else:
            self._hosts = {socket.gethostname(): options.num_proc}

    def start(self) -> None:
        self.driver.tick(self.loop.now())
        if self._script is None:
            self.driver.discovered(self._hosts, self.loop.now())

    def running(self) -> bool:
        return self.hands.finish is None or bool(self.hands.workers)

    def keep_alive(self) -> None:
        self.hands.agents.keep_alive()

    def order(self, number: int, line: str) -> str:
        self.hands.workers.order(number, line)
        return ""

    def let_count(self) -> None:
        self.hands.agents.let_count()

    # -- discovery

    def _discovered(self, hosts: dict[str, int]) -> None:
        self._hosts |= hosts
        self.driver.discovered(hosts, self.loop.now())

    # -- the loop

    def wait(self, *times: float) -> float:
        script = self._script if self.hands.finish is None else None
        now = self.hands.wait(*times, *([] if script is None else [script.due]))
        if script is not None and self.hands.finish is None:
            script.look(now)
        self.driver.tick(now)
        return now

    def next_plan(self, now: float) -> Plan | None:
        number = self.signals.take()
        if number not in (None, endings.REPEATED):
            self.driver.stop(128 + number, f"ended by {signal.Signals(number).name}", now)
        self.hands.carry_out()
        if number is not None:
            return endings.AFTER_SIGNAL.get(number, endings.AFTER_SIGTERM)
        over = self.hands.finish is not None and self.ending is None
        return AFTER_FINISH if over else None

    # -- the end

    def signal_all(self, number: int) -> None:
        self.hands.signal_all(number)

    def abandon(self) -> None:
        self.hands.let_end()
        self.hands.close()

    def finish(self) -> None:
        """Wait for the agents; what they have to say is read meanwhile."""
        self.hands.let_end()
        deadline = time.monotonic() + LAST_SECONDS
        while self.hands.running() and (left := deadline - time.monotonic()) > 0:
            if self.signals.take() == endings.REPEATED:
                return
            self.loop.run_once(min(left, POLL_SECONDS))
            self.hands.look(time.monotonic())

    def conclude(self) -> JobOutcome:
        if self.signals.received is not None:
            return signal_outcome(self.signals.received)
        finish = self.hands.finish
        assert finish is not None
        return JobOutcome(finish.code, finish.sentence, results=finish.results)

    def close(self) -> None:
        if self._script is not None:
            self._script.close()
        self.hands.close()
