"""Agents that one program starts on all hosts, srun or jsrun; they connect back."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.agents.agent_connection import AgentConnection
from hvdlite.launcher.agents.call_back import NAMED_BY_VARIABLE, SECRET_VARIABLE, Listener
from hvdlite.launcher.agents.host_agents import AgentUser, HostAgents
from hvdlite.launcher.agents.job_description import JobDescription
from hvdlite.launcher.command_line.launcher_choice import SRUN
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.ssh import agent_command, agent_path
from hvdlite.launcher.jobs.job import Job
from hvdlite.launcher.platforms.batch_systems import (
    NODE_NAME,
    NOISE,
    TASK_NUMBER,
    agents_command,
    agents_environment,
    resource_file,
)
from hvdlite.launcher.processes.child import LeadingProcess

# How srun tells, before all agents are there, that one will not come.
GONE = re.compile(r"error: (\S+): (tasks? [\d,-]+: (?:Exited|Killed|Terminated|Out Of Memory).*)")
SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")


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


class GroupAgents(HostAgents):
    """Agents that the program of a `group` starts."""

    def __init__(
        self, group: Group, job: Job, description: JobDescription, environ: Mapping[str, str],
        user: AgentUser,
    ) -> None:  # fmt: skip
        super().__init__(job, description, environ, user)
        self._group, self._loop = group, job.loop
        self._listener: Listener | None = None
        self._program: LeadingProcess | None = None
        self._stopped = False

    def describe(self) -> list[str]:
        return [shlex.join(self._group.command([*agent_command(), "HOST:PORT"]))]

    def start(self) -> None:
        if self._program is not None:
            return
        self._listener = Listener(self._loop, list(self.present), self._called)
        environ = {
            **self._group.environ,
            SECRET_VARIABLE: self._listener.secret,
            NAMED_BY_VARIABLE: self._group.named_by,
            "PYTHONPATH": agent_path(self._group.environ),
        }
        command = self._group.command([*agent_command(), *self._listener.addresses])
        self._program = LeadingProcess(command, environ, self._loop, signal.SIGTERM)

    def _called(self, connection: socket.socket, name: str) -> None:
        agent = dict(zip(self._group.names, self.present.values(), strict=True)).get(name)
        if agent is None or agent.channel is not None:
            connection.close()
            return
        fd = connection.detach()
        agent.connect(fd, os.dup(fd))
        if not self._absent():
            self._group.clean_up()

    def _absent(self) -> list[str]:
        return [name for name, agent in self.present.items() if agent.channel is None]

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
        if self._program.code is not None:  # With its last words.
            said = re.sub(self._group.noise, "", self._program.said())
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        host, why = (gone[1], gone[2]) if gone else (absent[0], lines[-1] if lines else "nothing")
        return (
            f"host {host} cannot be used: {self._group.name} has started no agent there, and said: "
            f"{why.strip()}. Remedy: make the same Python environment at the same path on all "
            "hosts; --verbose prints the command line, to try it by hand"
        )

    def abandon(self) -> None:
        super().abandon()
        if self._program is not None:
            self._program.signal(signal.SIGKILL)

    def finish(self, seconds: float) -> None:
        if self._program is not None:
            self._program.wait(seconds)

    def clean_up(self, agent: AgentConnection, groups: list[int], *, there: bool = True) -> None:
        agent.close()  # No ssh leads to the host.

    def close(self) -> None:
        super().close()
        if self._listener is not None:
            self._listener.close()
        if self._program is not None:
            self._program.close()
        self._group.clean_up()


# The programs that start an agent on each host of an allocation: srun and jsrun.


def make_group(
    launcher: str, hosts: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]
) -> Group:
    """Return what starts the agents of a job: `launcher` is SRUN or JSRUN, `hosts` get ranks.

    Raises `ConfigError` where the program is not there.
    """
    program = shutil.which(launcher, path=environ.get("PATH"))
    if program is None:
        raise ConfigError(f"--launcher {launcher}: there is no {launcher} in PATH")
    if launcher == SRUN:
        return Group(
            name="srun",
            command=lambda agent: agents_command(program, hosts, options.mpi_args, agent),
            environ=agents_environment(environ),
            named_by=NODE_NAME,
            names=tuple(hosts),
            noise=NOISE.pattern,
        )
    used = [host for host in options.hosts if host.name in hosts]
    descriptor, path = tempfile.mkstemp(prefix="hvdlite-jsrun-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(resource_file(used, threads_per_core()))
    return Group(
        name="jsrun",
        command=lambda agent: [program, "--erf_input", path, *agent],  # One for each line there.
        environ=environ,
        named_by=TASK_NUMBER,
        names=tuple(map(str, range(len(used)))),
        clean_up=lambda: Path(path).unlink(missing_ok=True),
    )


def threads_per_core(siblings: Path = SIBLINGS) -> int:
    """Return how many logical processors a core of this host has; those of a job are alike."""
    try:
        text = siblings.read_text(encoding="ascii")
    except OSError:
        return 1
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return max(1, sum(int(last or first) - int(first) + 1 for first, last in ranges))
