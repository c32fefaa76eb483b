"""Runs an elastic job: what the driver decides is done here, and it is told what occurs.

One thread waits for everything: the agents, the discovery script, signals, and the times at which
the driver has something to decide.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Mapping

from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.elastic.decisions.plan import ElasticPlan
from hvdlite.launcher.elastic.discovery_script import DiscoveryScript
from hvdlite.launcher.elastic.host_agents import HostAgents
from hvdlite.launcher.elastic.output import ElasticOutput
from hvdlite.launcher.jobs import termination_plan as ending
from hvdlite.launcher.jobs.first_failure import FirstFailure
from hvdlite.launcher.jobs.outcome import JobOutcome, signal_outcome
from hvdlite.launcher.jobs.runner import JobContext
from hvdlite.launcher.jobs.termination_plan import Ending, Plan
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import SignalInbox

# Workers that wait for a world have been told of the end; whoever trains on is not needed any more.
AFTER_FINISH: Plan = ((0.5, ending.TERMINATE), (2.5, ending.KILL), (1.0, ending.ABANDON))
LAST_SECONDS = 5.0  # How long agents without workers may take to end.
POLL_SECONDS = 0.02  # Between two looks whether their processes have ended.


def make_plan(options: LaunchOptions) -> ElasticPlan:
    """Return what the driver must know of the user's options."""
    elastic = options.elastic
    assert elastic is not None
    return ElasticPlan(
        num_proc=options.num_proc,
        min_np=elastic.min_np,
        max_np=elastic.max_np,
        reset_limit=elastic.reset_limit,
        cooldown=elastic.cooldown,
        elastic_timeout=elastic.timeout_seconds,
        start_timeout=options.start_timeout_seconds,
        admit=elastic.admit,
        # Horovod gives up the whole host of a failed process.
        failures_by_host=options.as_horovod or elastic.cooldown is not None,
    )


def fixed_hosts(options: LaunchOptions) -> dict[str, int]:
    """Return the slots of the hosts that the user has named, or of this one."""
    if not options.hosts:
        return {socket.gethostname(): options.num_proc}
    return {host.name: host.slots for host in options.hosts}


class ElasticJob:
    """One elastic run of one command; `environ` is that of the workers."""

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str],
        launcher_environ: Mapping[str, str],
    ) -> None:  # fmt: skip
        assert options.elastic is not None
        self.signals = SignalInbox()
        self.loop = EventLoop()
        self.output = ElasticOutput(
            options.num_proc, options.output_filename, options.prefix_timestamp,
            Console(give_up=self._reader_is_slow), self.signals.note_broken_pipe,
        )  # fmt: skip
        context = JobContext(options, environ, self.loop, FirstFailure(), self.output)
        self.agents = HostAgents(
            make_plan(options), context, self.output, lambda host: self._hosts[host],
            launcher_environ,
        )  # fmt: skip
        self.driver = self.agents.driver
        self._hosts: dict[str, int] = {}  # The slots of all hosts that were ever discovered.
        self._script: DiscoveryScript | None = None
        if options.elastic.discovery_script is not None:
            self._script = DiscoveryScript(
                options.elastic.discovery_script, options.elastic.slots_per_host,
                launcher_environ, self.loop, self._discovered, self._discovery_failed,
            )  # fmt: skip
        else:
            self._hosts = fixed_hosts(options)
        self._ending: Ending | None = None

    def run(self) -> JobOutcome:
        """Run to the end. When this returns, no process and no file of the job is left."""
        try:
            with self.signals:
                self.loop.listen(self.signals.fileno(), self.signals.drain)
                self.driver.tick(time.monotonic())
                if self._script is None:
                    self.driver.discovered(self._hosts, time.monotonic())
                while self.agents.finish is None or self.agents.workers:
                    self._turn()
                self._let_agents_end()
                with contextlib.suppress(BrokenPipeError):
                    self.output.finish()
        finally:
            if self._script is not None:
                self._script.close()
            self.agents.close()
            self.loop.close()
            self.output.close()
        if self.signals.received is not None:
            return signal_outcome(self.signals.received)
        finish = self.agents.finish
        assert finish is not None
        return JobOutcome(finish.code, finish.sentence, results=finish.results)

    def _reader_is_slow(self) -> bool:
        """Return whether a reader of our output who does not read is not waited for any more."""
        self.agents.keep_alive()
        return self.signals.received is not None

    # -- discovery

    def _discovered(self, hosts: dict[str, int]) -> None:
        self._hosts |= hosts
        self.driver.discovered(hosts, time.monotonic())

    def _discovery_failed(self, text: str) -> None:
        self.driver.discovery_failed(text, time.monotonic())

    # -- the loop

    def _turn(self) -> None:
        """Wait for what comes next, let the driver decide, and do what it wants."""
        now = self.agents.wait(*self._due())
        if self._script is not None and self.agents.finish is None:
            self._script.look(now)
        self.driver.tick(now)
        self._act_on_signals(now)
        self.agents.carry_out()
        self._go_on_ending(now)

    def _due(self) -> list[float]:
        times = []
        if self._ending is not None:
            times.append(self._ending.due)
        if self._script is not None and self.agents.finish is None:
            times.append(self._script.due)
        return times

    def _act_on_signals(self, now: float) -> None:
        number = self.signals.take()
        if number is None:
            return
        if number != ending.REPEATED:
            self.driver.stop(128 + number, f"ended by {signal.Signals(number).name}", now)
        self._ending = Ending.begin(ending.AFTER_SIGNAL.get(number, ending.AFTER_SIGTERM), now)

    # -- the end

    def _go_on_ending(self, now: float) -> None:
        if self.agents.finish is None:
            return
        if self._ending is None:
            self._ending = Ending.begin(AFTER_FINISH, now)
        while step := self._ending.next_step(now):
            if step == ending.ABANDON:
                self.agents.let_end()
                self.agents.close()
            else:
                self.agents.signal_all(ending.SIGNALS[step])

    def _let_agents_end(self) -> None:
        """Wait for the agents; what they have to say is read meanwhile."""
        self.agents.let_end()
        deadline = time.monotonic() + LAST_SECONDS
        while self.agents.running() and (left := deadline - time.monotonic()) > 0:
            if self.signals.take() == ending.REPEATED:
                return
            self.loop.run_once(min(left, POLL_SECONDS))
            self.agents.look(time.monotonic())
