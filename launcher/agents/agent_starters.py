"""How agents are started, one by one: as a child process on this host, by ssh on others.

And how what one may leave that could not end well is removed: process groups, and its folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from hvdlite.launcher.agents.agent_connection import AgentConnection
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.ssh import agent_command, agent_path, remote_agent_command, ssh_command
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.leading_process import LeadingProcess

TIDY_SECONDS = 3.0
MOST_AT_ONCE = 32  # So many ssh connect at the same time: each costs some memory and CPU here.


class AgentStarter:
    """Starts the agents of a job. What is not overridden does nothing."""

    def describe(self) -> list[str]:
        """Return the command lines."""
        return []

    def start(self) -> None:
        """Begin to start the agents."""

    def agent_came(self) -> None:
        """Take note that one more agent has come."""

    def stop(self) -> None:
        """Start nothing more."""

    def busy(self) -> bool:
        """Return whether something is running or waiting that is no agent's own."""
        return False

    def failure(self) -> str | None:
        """Return why agents that have not come will never come, where that can be known."""
        return None

    def abandon(self) -> None:
        """Kill what is left of it."""

    def finish(self, seconds: float) -> None:
        """Wait for what is no agent's own, at most `seconds`."""

    def tidy(self, agent: AgentConnection, groups: list[int]) -> None:
        """Remove what an agent that was killed has left: its folder, and process groups."""

    def close(self) -> None:
        """Leave nothing behind."""


class SpawnedAgents(AgentStarter):
    """A process for each agent: itself on this host, an ssh for another one. See `AgentStarter`."""

    def __init__(
        self, agents: Sequence[AgentConnection], options: LaunchOptions,
        environ: Mapping[str, str], loop: EventLoop,
    ) -> None:  # fmt: skip
        self._agents, self._options, self._loop = agents, options, loop
        self._environ = dict(environ)
        self._waiting: deque[AgentConnection] = deque()

    def describe(self) -> list[str]:
        return [shlex.join(self._command(agent)) for agent in self._agents]

    def _command(self, agent: AgentConnection) -> list[str]:
        if not agent.host.remote:
            return agent_command()
        there = remote_agent_command(self._environ)
        return ssh_command(agent.host.name, there, self._options, self._environ.get("PATH"))

    def start(self) -> None:
        """Those of this host cost nothing to wait for, so they come first."""
        self._waiting.extend(sorted(self._agents, key=lambda agent: agent.host.remote))
        for _ in range(MOST_AT_ONCE):
            self.agent_came()

    def agent_came(self) -> None:
        """Another one may start in its place."""
        if self._waiting:
            self.begin(self._waiting.popleft())

    def begin(self, agent: AgentConnection) -> None:
        command = self._command(agent)
        if agent.host.remote:
            agent.follow(LeadingProcess(command, self._environ, self._loop, signal.SIGHUP))
        else:
            environ = self._environ | {"PYTHONPATH": agent_path(self._environ)}
            agent.follow(LeadingProcess(command, environ, self._loop))

    def stop(self) -> None:
        self._waiting.clear()

    def busy(self) -> bool:
        return bool(self._waiting)

    def tidy(self, agent: AgentConnection, groups: list[int]) -> None:
        """Its ranks have died with it, but not their child processes."""
        command = removal_command(agent, groups, self._options, self._environ)
        ssh = LeadingProcess(command, self._environ, self._loop)
        ssh.wait(TIDY_SECONDS)
        ssh.close()


# What an agent that could not end well may leave: process groups, and its folder.


def kill_groups(groups: Iterable[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def remove_here(agent: AgentConnection, groups: Iterable[int]) -> None:
    """Kill the process groups of an agent of this host, and remove its folder."""
    kill_groups(groups)
    shutil.rmtree(agent.folder or os.devnull, ignore_errors=True)


def removal_command(
    agent: AgentConnection,
    groups: Iterable[int],
    options: LaunchOptions,
    environ: Mapping[str, str],
) -> list[str]:
    """Return the ssh command that does the same on another host."""
    kill = "".join(f"kill -KILL -- -{group} 2>/dev/null; " for group in groups)
    there = f"{kill}rm -rf {shlex.quote(agent.folder)}"
    return ssh_command(agent.host.name, there, options, environ.get("PATH"))
