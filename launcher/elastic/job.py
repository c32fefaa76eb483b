"""Runs an elastic job: what the driver decides is done here, and it is told what occurs.

One thread waits for everything: the agents, the discovery script, signals, and the times at which
the driver has something to decide.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions import endings
from hvdlite.launcher.decisions.endings import Plan
from hvdlite.launcher.elastic.workers import ElasticWorkers
from hvdlite.launcher.hosts.hosts import parse_discovery
from hvdlite.launcher.hosts.ssh import spell_end
from hvdlite.launcher.jobs.job import Job
from hvdlite.launcher.jobs.outcome import JobOutcome, signal_outcome
from hvdlite.launcher.processes.child import LeadingProcess
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import signal_group

# Workers that wait for a world have been told of the end; whoever trains on is not needed any more.
AFTER_FINISH: Plan = ((0.5, endings.TERMINATE), (2.5, endings.KILL), (1.0, endings.ABANDON))
LAST_SECONDS = 5.0  # How long agents without workers may take to end.
POLL_SECONDS = 0.02  # Between two looks whether their processes have ended.
EVERY_SECONDS = 1.0  # From the start of a run of the script to that of the next one.
LONGEST_SECONDS = 10.0  # A run that takes longer is killed.
MOST_BYTES = 1 << 20  # Of the output that is kept.


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
                lambda text: self.driver.discovery_failed(text, self.loop.now()),
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


# Runs the discovery script of an elastic job, in the background and again and again.


class DiscoveryScript:
    """Calls ``found(hosts)`` after each run that went well, and ``failed(text)`` after others.

    `script` is a path or a line for a shell; `look` starts a run when it is time.
    """

    def __init__(
        self, script: str, default_slots: int, environ: Mapping[str, str], loop: EventLoop,
        found: Callable[[dict[str, int]], None], failed: Callable[[str], None],
        longest_seconds: float = LONGEST_SECONDS,
    ) -> None:  # fmt: skip
        self._script, self._default_slots = script, default_slots
        self._environ, self._loop = environ, loop
        self._found, self._failed = found, failed
        self._longest_seconds = longest_seconds
        self._run: _Run | None = None
        self._next_at = 0.0
        self._kill_at = 0.0

    @property
    def due(self) -> float:
        """When `look` is to be called, in monotonic seconds."""
        return self._kill_at if self._run is not None else self._next_at

    def look(self, now: float) -> None:
        """Start a run that is due, or end one that takes too long."""
        if now < self.due:
            return
        if self._run is not None:
            self._run.close()
            self._run = None
            self._next_at = now
            self._failed(f"the discovery script {self._script} has not ended within "
                         f"{self._longest_seconds:g} seconds, and was killed")  # fmt: skip
            return
        self._next_at = now + EVERY_SECONDS
        self._kill_at = now + self._longest_seconds
        line = self._script
        if os.path.isfile(line):  # A path may lack the ``./``, and have spaces.
            line = shlex.quote(os.path.abspath(line))
        try:
            self._run = _Run(line, self._environ, self._loop, self._conclude)
        except OSError as error:
            self._failed(f"the discovery script {self._script} cannot be run: {error.strerror}")

    def _conclude(self, run: _Run) -> None:
        err = run.said()  # It reads what is left of the output, too.
        code, out = run.code, run.found.decode(errors="replace")
        run.close()
        self._run = None
        if code:
            lines = [line.strip() for line in err.splitlines() if line.strip()]
            last = f" and said: {lines[-1]}" if lines else ""
            self._failed(f"the discovery script {self._script} {spell_end(code)}{last}")
            return
        try:
            hosts = parse_discovery(out, self._default_slots)
        except ConfigError as error:
            self._failed(f"{error} (of {self._script})")
        else:
            self._found(hosts)

    def close(self) -> None:
        """Leave no process behind."""
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run(LeadingProcess):
    """One run; `ended` is called when the script has ended, whatever its children do."""

    def __init__(
        self, command: str, environ: Mapping[str, str], loop: EventLoop,
        ended: Callable[[_Run], None],
    ) -> None:  # fmt: skip
        self.found = b""  # Its output.
        shell = ["/bin/sh", "-c", command]
        super().__init__(shell, environ, loop, signal.SIGKILL, folder=None, printed=self._add)
        self.close_input()
        self._end_fd = os.pidfd_open(self.pid)
        loop.listen(self._end_fd, lambda _fd: ended(self))

    def _add(self, data: bytes) -> None:
        self.found = (self.found + data)[:MOST_BYTES]

    def close(self) -> None:
        """Kill the script and its children, and close what belongs to it."""
        signal_group(self.pid, signal.SIGKILL)
        super().close()
        self._loop.forget(self._end_fd)
        os.close(self._end_fd)
