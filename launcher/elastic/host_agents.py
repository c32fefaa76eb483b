"""The agents of an elastic job: they come and go with their hosts, while the job runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hvdlite.launcher.agents.agent_connection import AgentConnection, AgentHost, reason_to_refuse
from hvdlite.launcher.agents.agent_starters import (
    MOST_AT_ONCE,
    SpawnedAgents,
    removal_command,
    remove_here,
)
from hvdlite.launcher.agents.channel import BEATS
from hvdlite.launcher.agents.job_description import JobDescription
from hvdlite.launcher.command_line.elastic_options import ElasticOptions
from hvdlite.launcher.decisions.commands import StartWorker
from hvdlite.launcher.decisions.lines import tells_of_world
from hvdlite.launcher.elastic.driving import Driving
from hvdlite.launcher.elastic.worker_processes import WorkerProcesses
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.hosts.unreachable import (
    explain_agent,
    explain_silence,
    has_not_answered,
    spell_end,
)
from hvdlite.launcher.jobs.job import Job
from hvdlite.launcher.live.job_view import OTHER, WORLD
from hvdlite.launcher.processes.leading_process import LeadingProcess

LEAVE_SECONDS = 5.0  # How long an agent that is not needed any more may take to end.
BEAT_SECONDS = 1.0  # The silence that an agent of this host allows, where it has a limit.


class HostAgents(Driving):
    """Starts and ends agents, and their workers; the driver is told what becomes of them."""

    def __init__(
        self, options: ElasticOptions, job: Job, slots: Callable[[str], int],
        launcher_environ: Mapping[str, str],
    ) -> None:  # fmt: skip
        # So often is looked that the silence of a host is noticed.
        super().__init__(options, job.loop, min(1.0, options.host_timeout_seconds / (2 * BEATS)))
        self._elastic = options
        self._job, self._slots = job, slots
        self._description = JobDescription(job.options, job.environ, ())
        self.workers = WorkerProcesses(job, self._description, self.driver)
        self._environ = launcher_environ
        self._starter = SpawnedAgents((), job.options, launcher_environ, job.loop)
        self._agents: dict[str, AgentConnection] = {}  # The present one of each host.
        self._waiting: deque[AgentConnection] = deque()  # To be started.
        self._deadlines: dict[AgentConnection, float] = {}  # Of those that have to come, or to go.
        # Those that are to end, each with the process groups that it must end first.
        self._leaving: dict[AgentConnection, list[int]] = {}
        self._tidying: list[LeadingProcess] = []
        self._counts = False  # Whether somebody looks.
        self._handlers: dict[str, Callable[..., None]] = {
            "hello": self._hello, "ready": self._ready, "refused": self._refused,
            "leaving": self._leaves, "live": self._live,
        }  # fmt: skip

    # -- commands of the driver

    def start_agent(self, host: str) -> None:
        slots = tuple(range(self._slots(host)))
        known = AgentHost(host, Host(host, 1).remote, slots)
        agent = AgentConnection(known, self._job.loop, self._received, self._lost)
        self._agents[host] = agent
        self._waiting.append(agent)
        self._start_next()

    def _start_next(self) -> None:
        """Start those that wait, not too many at once, where none of their host is still ending.

        Workers of that one may run, in whose slots others must not start.
        """
        coming = sum(not agent.folder for agent in self._deadlines)
        ending = {agent.host.name for agent in self._leaving}
        for _ in range(len(self._waiting)):
            if coming >= MOST_AT_ONCE:
                break
            agent = self._waiting.popleft()
            if agent.host.name in ending:
                self._waiting.append(agent)
                continue
            seconds = self._job.options.start_timeout_seconds
            self._deadlines[agent] = time.monotonic() + seconds
            self._starter.begin(agent)
            coming += 1

    def drop_agent(self, host: str) -> None:
        """End the agent of a host, which ends its workers; nobody is told of their end."""
        agent = self._agents.pop(host, None)
        if agent is None:
            return
        if agent in self._waiting:
            self._waiting.remove(agent)
            return
        self._leaving[agent] = self.workers.forget(agent)
        self._deadlines[agent] = time.monotonic() + LEAVE_SECONDS
        agent.dismiss()

    def start_worker(self, worker: StartWorker) -> None:
        agent = self._agents.get(worker.host)
        if agent is not None:  # Else it was lost a moment ago, of which the driver is told next.
            self.workers.start(worker, agent)

    def signal(self, number: int, signal_number: int) -> None:
        self.workers.signal(number, signal_number)

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        self.workers.tell(numbers, frame)

    def say(self, line: str) -> None:
        """Print a line of hvdlite-run's own."""
        self._job.live.note(WORLD if tells_of_world(line) else OTHER, line)
        self._job.say(line)

    def signal_all(self, signal_number: int) -> None:
        """Signal all workers, and what is still about to start some."""
        self._waiting.clear()
        for agent in list(self._agents.values()):
            if agent.folder:
                agent.send("signal", int(signal_number), [])
            else:
                self.drop_agent(agent.host.name)

    # -- what agents say

    def _received(self, agent: AgentConnection, kind: str, fields: list[Any]) -> None:
        if agent in self._leaving:
            return
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(agent, *fields)
        else:
            self.workers.receive(kind, fields)

    def _hello(self, agent: AgentConnection, hello: dict[str, Any]) -> None:
        agent.folder = hello["folder"]
        self._start_next()
        if why := reason_to_refuse(hello, with_call=self._job.options.call is not None):
            self._refuse(agent, f"it {why}")
        else:
            agent.send("job", self._description.for_host(agent.host) | {
                "elastic": True,
                "silence_seconds": self._silence_seconds(agent),
                "worker_silence_seconds": self._elastic.worker_timeout_seconds,
            })  # fmt: skip

    def _silence_seconds(self, agent: AgentConnection) -> float:
        return self._elastic.host_timeout_seconds if agent.host.remote else 0.0

    def _refused(self, agent: AgentConnection, text: str) -> None:
        self._refuse(agent, f"it {text}")

    def _refuse(self, agent: AgentConnection, why: str) -> None:
        self.drop_agent(agent.host.name)
        self.driver.agent_lost(agent.host.name, why, False, time.monotonic())

    def _ready(self, agent: AgentConnection) -> None:
        agent.ready = True
        if self._counts:
            agent.send("count")
        agent.feed(self._description.messages_of_files(agent.host), lambda: self._supplied(agent))

    def _supplied(self, agent: AgentConnection) -> None:
        if self._agents.get(agent.host.name) is agent:
            agent.supplied = True
            self._deadlines.pop(agent, None)
            self.driver.agent_came(agent.host.name, time.monotonic())

    def _leaves(self, agent: AgentConnection, why: str) -> None:
        self.driver.agent_leaving(agent.host.name, why, time.monotonic())

    def let_count(self) -> None:
        """Let all workers count from now on."""
        self._counts = True
        for agent in self._agents.values():
            if agent.ready:
                agent.send("count")

    def _live(self, agent: AgentConnection, lines: dict[int, str]) -> None:
        self._job.live.receive(agent.host.name, lines)

    # -- the loss of an agent

    def _lost(self, agent: AgentConnection) -> None:
        """Look why the channel of an agent has ended."""
        if agent in self._leaving:  # It ends its workers first, and then itself.
            return
        name, leader = agent.host.name, agent.leader
        said, code = (leader.said(), leader.code) if leader else ("", None)
        if not agent.folder:
            why = _cause(name, explain_agent(name, said, code))
        elif agent.host.remote:
            why = f"it has closed its connection: {said.strip() or 'its agent has ended'}"
        else:
            why = f"its agent {spell_end(code)}"
        self._lose(agent, why)

    def _lose(self, agent: AgentConnection, why: str) -> None:
        groups = self._give_up(agent)
        self._clean_up(agent, groups)
        self._start_next()
        here = not agent.host.remote  # `_clean_up` has killed its workers.
        self.driver.agent_lost(agent.host.name, why, True, time.monotonic(), ended=here)

    def _silence(self, agent: AgentConnection, seconds: float) -> None:
        """Give up an agent that is silent: it ends its workers itself, if it still runs."""
        self._give_up(agent)
        agent.close()
        why = f"it {has_not_answered(seconds)}"
        self.driver.agent_lost(agent.host.name, why, True, time.monotonic())

    def _give_up(self, agent: AgentConnection) -> list[int]:
        """Forget an agent and its workers; return their process groups."""
        self._agents.pop(agent.host.name, None)
        self._deadlines.pop(agent, None)
        return self.workers.forget(agent)

    def _clean_up(self, agent: AgentConnection, groups: list[int]) -> None:
        """Remove what an agent that has ended may have left: process groups, and its folder."""
        abandoned = agent.leader is not None and agent.leader.code != 0
        agent.close()
        if not agent.folder or not abandoned:
            return
        if not agent.host.remote:
            remove_here(agent, groups)
            return
        command = removal_command(agent, groups, self._job.options, self._environ)
        self._tidying.append(LeadingProcess(command, self._environ, self._job.loop))

    # -- time

    def look(self, now: float) -> None:
        """Send beats, and give up agents that are silent or late."""
        for agent in [*self._agents.values()]:
            silence = self._silence_seconds(agent)
            if silence and not agent.beat(now, silence):
                self._silence(agent, silence)
        for agent in [*self._leaving]:
            ended = agent.leader is None or agent.leader.code is not None
            if ended or now >= self._deadlines[agent]:
                self._finish(agent)
        for agent, deadline in [*self._deadlines.items()]:
            if now >= deadline and agent not in self._leaving:
                self._give_up_start(agent)
        for process in [*self._tidying]:
            if process.code is not None:
                process.close()
                self._tidying.remove(process)

    def _finish(self, agent: AgentConnection) -> None:
        del self._deadlines[agent]
        self._clean_up(agent, self._leaving.pop(agent))
        self._start_next()

    def _give_up_start(self, agent: AgentConnection) -> None:
        name, seconds = agent.host.name, self._job.options.start_timeout_seconds
        text = explain_silence(name, seconds, runs=bool(agent.folder))
        self._lose(agent, _cause(name, text))

    def keep_alive(self) -> None:
        """Send beats while nothing else can be done."""
        for agent in self._agents.values():
            agent.beat(time.monotonic(), self._silence_seconds(agent) or BEAT_SECONDS)

    # -- the end

    def let_end(self) -> None:
        for host in list(self._agents):
            self.drop_agent(host)

    def running(self) -> bool:
        return bool(self._agents or self._leaving)

    def close(self) -> None:
        """Leave nothing behind."""
        self._waiting.clear()
        self.let_end()
        for agent in [*self._leaving]:
            self._finish(agent)
        end = time.monotonic() + LEAVE_SECONDS
        for process in self._tidying:
            process.wait(end - time.monotonic())
            process.close()
        self._tidying.clear()


def _cause(name: str, sentence: str) -> str:
    """Return why a host cannot be used, from the sentence that says so."""
    return sentence.removeprefix(f"host {name} cannot be used: ")
