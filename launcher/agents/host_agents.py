"""The agents of a job, one on each host: how they start, what all are told, and how they end.

An agent is a child process on this host, and behind an ssh on another one. What follows from their
words and their loss is up to the job that they serve: one that keeps its ranks, or an elastic one.
"""

from __future__ import annotations

import math
import shlex
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.agents.agent_connection import AgentConnection, AgentHost
from hvdlite.launcher.agents.channel import VERSION
from hvdlite.launcher.agents.job_description import JobDescription
from hvdlite.launcher.hosts.ssh import MOST_AT_ONCE, agent_command, agent_path, ssh_command
from hvdlite.launcher.jobs.job import Job
from hvdlite.launcher.processes.child import LeadingProcess
from hvdlite.launcher.processes.signals import signal_group

LEAVE_SECONDS = 5.0  # How long an agent that is not needed any more may take to end.
TIDY_SECONDS = 3.0  # How long the end of a job waits for what removes the folders of others.
BEAT_SECONDS = 1.0  # The silence that an agent of this host allows, where it has a limit.


class AgentUser(ABC):
    """Decides what follows from the words and the loss of agents."""

    @abstractmethod
    def supplied(self, agent: AgentConnection) -> None:
        """Note that an agent can start processes: it has the files that they need."""

    @abstractmethod
    def refused(self, agent: AgentConnection, why: str) -> None:
        """Note that a host cannot take part; `why` is a clause about it."""

    @abstractmethod
    def said(self, agent: AgentConnection, kind: str, fields: list[Any]) -> None:
        """Take a message that is about a process or a meeting."""

    @abstractmethod
    def lost(self, agent: AgentConnection) -> None:
        """Note that the channel of an agent has ended; nobody has let it go."""

    def unstarted(self, agent: AgentConnection, error: Exception) -> None:
        """Note that this host cannot start what leads to an agent: most jobs end by that."""
        raise error

    @abstractmethod
    def silent(self, agent: AgentConnection, seconds: float) -> None:
        """Note that nothing has been heard of an agent for so long."""

    def overdue(self, agent: AgentConnection, seconds: float) -> None:  # noqa: B027
        """Note that an agent cannot start processes so long after its own start.

        Nothing follows where the start of the job as a whole has a limit.
        """


class HostAgents:
    """The agents. Each has `start_seconds` until it can start processes, or `user` is told."""

    def __init__(
        self, job: Job, description: JobDescription, environ: Mapping[str, str], user: AgentUser,
        start_seconds: float = math.inf,
    ) -> None:  # fmt: skip
        self.present: dict[str, AgentConnection] = {}  # By host, in the order of their coming.
        self._job, self._description, self._user = job, description, user
        self._environ = dict(environ)
        self._start_seconds = start_seconds
        self._waiting: deque[AgentConnection] = deque()  # To be started.
        self._deadlines: dict[AgentConnection, float] = {}  # Of those that have to come, or to go.
        # Those that are to end, each with the process groups that it must end first.
        self._leaving: dict[AgentConnection, list[int]] = {}
        self._tidying: dict[LeadingProcess, AgentConnection] = {}
        # Whose folders may be left on hosts that could not be reached, by host.
        self._remains: dict[str, list[AgentConnection]] = {}
        self._counts = False  # Whether somebody looks.

    # -- the start

    def describe(self) -> list[str]:
        """Return the command lines."""
        return [shlex.join(self._command(agent)) for agent in self.present.values()]

    def _command(self, agent: AgentConnection) -> list[str]:
        if not agent.host.remote:
            return agent_command()
        variables = f"PYTHONPATH={agent_path(self._environ)}"
        # In the root directory no file of the user's shadows a module.
        there = f"cd / && exec env {shlex.join([variables, *agent_command()])}"
        return ssh_command(agent.host.name, there, self._job.options, self._environ.get("PATH"))

    def add(self, host: AgentHost) -> AgentConnection:
        """Let a host have an agent, which `start` starts; this host comes before others."""
        agent = AgentConnection(host, self._job.loop, self._received, self._lost)
        self.present[host.name] = agent
        (self._waiting.append if host.remote else self._waiting.appendleft)(agent)
        return agent

    def start(self) -> None:
        """Start those that wait, not too many at once, where none of their host is still ending.

        Processes of that one may run, in whose slots others must not start.
        """
        coming = sum(not agent.folder for agent in self._deadlines)
        ending = {agent.host.name for agent in self._leaving}
        unstarted: list[tuple[AgentConnection, Exception]] = []
        for _ in range(len(self._waiting)):
            if coming >= MOST_AT_ONCE:
                break
            agent = self._waiting.popleft()
            if agent.host.name in ending:
                self._waiting.append(agent)
                continue
            self._deadlines[agent] = time.monotonic() + self._start_seconds
            try:
                self._begin(agent)
            except (ConfigError, OSError) as error:
                unstarted.append((agent, error))
            coming += 1
        for agent, why in unstarted:
            self._user.unstarted(agent, why)

    def _begin(self, agent: AgentConnection) -> None:
        command, environ, loop = self._command(agent), self._environ, self._job.loop
        if agent.host.remote:
            agent.follow(LeadingProcess(command, environ, loop, signal.SIGHUP))
        else:
            environ = environ | {"PYTHONPATH": agent_path(environ)}
            agent.follow(LeadingProcess(command, environ, loop))

    def stop(self) -> None:
        """Start nothing more."""
        self._waiting.clear()

    def busy(self) -> bool:
        """Return whether something that is no agent's own runs, or is to be started."""
        return bool(self._waiting)

    def failure(self) -> str | None:
        """Return why agents that have not come will never come, where that can be known."""
        return None

    # -- what agents say

    def _received(self, agent: AgentConnection, kind: str, fields: list[Any]) -> None:
        if agent in self._leaving:
            return
        match kind:
            case "hello":
                self._hello(agent, *fields)
            case "ready":
                agent.ready = True
                if self._counts:
                    agent.send("count")
                files = self._description.messages_of_files(agent.host)
                agent.feed(files, lambda: self._supplied(agent))
            case "refused":
                self._user.refused(agent, *fields)
            case "live":
                self._job.live.receive(agent.host.name, *fields)
            case _:
                self._user.said(agent, kind, fields)

    def _hello(self, agent: AgentConnection, hello: dict[str, Any]) -> None:
        agent.folder = hello["folder"]
        for gone in self._remains.pop(agent.host.name, []):
            self._tidy(gone, [])  # The numbers of its processes may be those of others by now.
        self.start()
        if hello["channel"] != VERSION:
            why = "has another version of hvdlite: install the same on all hosts"
            self._user.refused(agent, why)
            return
        theirs, ours = ("{}.{}".format(*each) for each in (hello["python"], sys.version_info))
        if theirs != ours and self._job.options.call is not None:
            self._user.refused(agent, (
                f"has Python {theirs}, and the function comes from Python {ours}: their bytecode "
                "differs, so install the same minor version"
            ))  # fmt: skip
        else:
            agent.send("job", self._description.for_host(agent.host))

    def _supplied(self, agent: AgentConnection) -> None:
        if self.present.get(agent.host.name) is agent:
            agent.supplied = True
            self._deadlines.pop(agent, None)
            self._user.supplied(agent)

    def _lost(self, agent: AgentConnection) -> None:
        if agent not in self._leaving:  # Such a one ends its processes first, and then itself.
            self._user.lost(agent)

    def let_count(self) -> None:
        """Let all processes count from now on."""
        self._counts = True
        for agent in self.present.values():
            if agent.ready:
                agent.send("count")

    # -- time

    def look(self, now: float) -> None:
        """Send beats, and find what is silent or late."""
        for agent in [*self.present.values()]:
            silence = self._description.silence_of(agent.host)
            if silence and not agent.beat(now, silence):
                self._user.silent(agent, silence)
        for agent in [*self._leaving]:
            ended = agent.leader is None or agent.leader.code is not None
            if ended or now >= self._deadlines[agent]:
                self._finish(agent)
        for agent, deadline in [*self._deadlines.items()]:
            if now >= deadline and agent not in self._leaving:
                self._user.overdue(agent, self._start_seconds)
        for process in [*self._tidying]:
            if process.code is not None:
                process.close()
                gone = self._tidying.pop(process)
                if process.code != 0:
                    self.tidy_later(gone)

    def keep_alive(self) -> None:
        """Send beats while nothing else can be done."""
        for agent in self.present.values():
            silence = self._description.silence_of(agent.host) or BEAT_SECONDS
            agent.beat(time.monotonic(), silence)

    # -- the end

    def drop(self, agent: AgentConnection, groups: list[int]) -> None:
        """Let an agent end its processes, whose groups these are, and itself: it is heard no more.

        What is left some time later is killed.
        """
        self.forget(agent)
        if agent in self._waiting:
            self._waiting.remove(agent)
            return
        self._leaving[agent] = groups
        self._deadlines[agent] = time.monotonic() + LEAVE_SECONDS
        agent.dismiss()

    def forget(self, agent: AgentConnection) -> None:
        """Count on an agent no more; its host may be given another one."""
        if self.present.get(agent.host.name) is agent:
            del self.present[agent.host.name]
        self._deadlines.pop(agent, None)

    def _finish(self, agent: AgentConnection) -> None:
        del self._deadlines[agent]
        self.clean_up(agent, self._leaving.pop(agent))
        self.start()

    def clean_up(self, agent: AgentConnection, groups: list[int], *, there: bool = True) -> None:
        """Remove what an agent may have left that has not ended well: processes, and its folder.

        On another host only if `there`: where it can be reached.
        """
        abandoned = agent.leader is not None and agent.leader.code != 0
        agent.close()
        if not agent.folder or not abandoned:
            return
        if not agent.host.remote:
            for group in groups:
                signal_group(group, signal.SIGKILL)
            shutil.rmtree(agent.folder, ignore_errors=True)
        elif there:
            self._tidy(agent, groups)

    def _tidy(self, agent: AgentConnection, groups: list[int]) -> None:
        """Kill process groups on another host by ssh, and remove the folder of its agent."""
        host, environ = agent.host.name, self._environ
        kill = "".join(f"kill -KILL -- -{group} 2>/dev/null; " for group in groups)
        there = f"{kill}rm -rf {shlex.quote(agent.folder)}"
        try:
            command = ssh_command(host, there, self._job.options, environ.get("PATH"))
            process = LeadingProcess(command, environ, self._job.loop)
        except (ConfigError, OSError) as error:  # The outcome of the job is another one's.
            self._job.say(f"a folder may stay on host {host}: {error}")
        else:
            self._tidying[process] = agent

    def tidy_later(self, agent: AgentConnection) -> None:
        """Remove the folder of an agent when its host has another one, or at the end of the job.

        It cannot be reached now; the agent may have been killed meanwhile, which nobody has seen.
        """
        if agent.folder and agent.host.remote:
            self._remains.setdefault(agent.host.name, []).append(agent)

    @property
    def leaving(self) -> bool:
        """Whether agents that were dropped have not ended."""
        return bool(self._leaving)

    def abandon(self) -> None:
        """Kill what leads to agents; those that still run end their processes themselves."""
        for agent in self.present.values():
            agent.kill()

    def finish(self, seconds: float) -> None:
        """Wait for what leads to agents, which has closed its channel, at most `seconds`."""
        end = time.monotonic() + seconds
        for agent in self.present.values():
            if agent.leader is not None:
                agent.leader.wait(end - time.monotonic())

    def close(self) -> None:
        """Leave nothing behind of agents that were dropped, or cleaned up."""
        self._waiting.clear()
        for agent in [*self._leaving]:
            self._finish(agent)
        for agents in self._remains.values():  # Their hosts may be back.
            for agent in agents:
                self._tidy(agent, [])
        end = time.monotonic() + TIDY_SECONDS
        for process in self._tidying:
            process.wait(end - time.monotonic())
            process.close()
        self._tidying.clear()
