"""Agents that one program starts on all hosts, srun or jsrun; they connect back."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdlite.launcher.agents.agent_connection import AgentConnection
from hvdlite.launcher.agents.agent_starters import AgentStarter
from hvdlite.launcher.agents.call_back import NAMED_BY_VARIABLE, Listener
from hvdlite.launcher.hosts.ssh import agent_command, agent_path
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.leading_process import LeadingProcess

# How srun tells, before all agents are there, that one will not come.
GONE = re.compile(r"error: (\S+): (tasks? [\d,-]+: (?:Exited|Killed|Terminated|Out Of Memory).*)")


@dataclass(frozen=True)
class Group:
    """The program that starts one agent on each host."""

    name: str  # for people
    command: Callable[[Sequence[str]], list[str]]  # from an agent's command line to the program's
    environ: Mapping[str, str]
    named_by: str  # the variable by whose text agents call themselves
    names: tuple[str, ...]  # these texts, in the order of the hosts
    noise: str = "(?!)"  # a pattern of lines that say nothing to the user
    clean_up: Callable[[], None] = lambda: None  # when all agents are there; may come twice


class GroupAgents(AgentStarter):
    """See `AgentStarter`."""

    def __init__(self, agents: Sequence[AgentConnection], group: Group, loop: EventLoop) -> None:
        self._agents, self._group, self._loop = agents, group, loop
        self._listener: Listener | None = None
        self._program: LeadingProcess | None = None
        self._stopped = False

    def describe(self) -> list[str]:
        return [shlex.join(self._group.command([*agent_command(), "HOST:PORT"]))]

    def start(self) -> None:
        hosts = [agent.host.name for agent in self._agents]
        self._listener = Listener(self._loop, hosts, self._called)
        environ = {
            **self._group.environ,
            **self._listener.variables,
            NAMED_BY_VARIABLE: self._group.named_by,
            "PYTHONPATH": agent_path(self._group.environ),
        }
        command = self._group.command([*agent_command(), *self._listener.addresses])
        self._program = LeadingProcess(command, environ, self._loop, signal.SIGTERM)

    def _called(self, connection: socket.socket, name: str) -> None:
        agent = dict(zip(self._group.names, self._agents, strict=True)).get(name)
        if agent is None or agent.channel is not None:
            connection.close()
            return
        fd = connection.detach()
        agent.connect(fd, os.dup(fd))
        if not self._absent():
            self._group.clean_up()

    def _absent(self) -> list[str]:
        return [agent.host.name for agent in self._agents if agent.channel is None]

    def stop(self) -> None:
        self._stopped = True
        if self._listener is not None:
            self._listener.close()
        if self._program is not None and self._absent():
            self._program.signal(signal.SIGTERM)

    def busy(self) -> bool:
        """Where the program ended too early, `failure` is yet to be asked."""
        if self._program is None or not self._absent():
            return False
        return not self._stopped or self._program.code is None

    def failure(self) -> str | None:
        absent = self._absent()
        if not absent or self._program is None:
            return None
        said = re.sub(self._group.noise, "", self._program.said_so_far())
        gone = GONE.search(said)
        if gone is None and self._program.code is None:
            return None
        lines = [line for line in self._program_said(said) if line]
        host, why = (gone[1], gone[2]) if gone else (absent[0], lines[-1] if lines else "nothing")
        return (
            f"host {host} cannot be used: {self._group.name} has started no agent there, and said: "
            f"{why.strip()}. Remedy: make the same Python environment at the same path on all "
            "hosts; --verbose prints the command line, to try it by hand"
        )

    def _program_said(self, said: str) -> list[str]:
        """Return the lines of a program that has ended, with its last words."""
        if self._program is not None and self._program.code is not None:
            said = re.sub(self._group.noise, "", self._program.said())
        return [line.strip() for line in said.splitlines()]

    def abandon(self) -> None:
        if self._program is not None:
            self._program.signal(signal.SIGKILL)

    def finish(self, seconds: float) -> None:
        if self._program is not None:
            self._program.wait(seconds)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._program is not None:
            self._program.close()
        self._group.clean_up()
