"""The processes of a parameter server's job that may be started again: servers, and workers that
are no ranks. Agents run them beside the ranks.

A process that a signal has ended is started again under its name, on the same host. One that has
failed by itself would fail again: its error ends the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdlite.launcher.agents.agent_connection import AgentConnection
from hvdlite.launcher.agents.job_description import JobDescription
from hvdlite.launcher.command_line.job_kinds import ClusterOptions
from hvdlite.launcher.decisions.endings import Failure, signal_name
from hvdlite.launcher.jobs.job import FixedJob

if TYPE_CHECKING:
    from hvdlite.ps.scheduler.running import HostedScheduler

LAST_SECONDS = 4.0  # How long servers may go on when all workers have ended well.


@dataclass
class _Process:
    """A server or a worker, however often it is started."""

    key: int  # Of its output: the rank of a worker, and what comes after ranks for a server.
    name: str  # for people
    server: int | None  # Its number; None: it is a worker.
    agent: AgentConnection
    number: int  # Of its last start, as the agent knows it.
    restarts: int = 0
    running: bool = False
    raised: str = ""  # The exception that ends it, in one line.


class ClusterProcesses:
    """What `AgentsJob` asks about processes that are no ranks of an ordinary job."""

    def __init__(
        self, job: FixedJob, cluster: ClusterOptions, scheduler: HostedScheduler,
        agents: Sequence[AgentConnection], description: JobDescription,
    ) -> None:  # fmt: skip
        self._job, self._cluster, self._scheduler = job, cluster, scheduler
        self._description = description
        self._codes: dict[int, int] = {}  # Of workers that have failed and are not started again.
        self.failure = ""  # How the first server failed that is not started again.
        self._ending = False
        self._end_at: float | None = None  # When servers are not waited for any more.
        first = job.options.num_proc
        servers = [
            _Process(first + n, f"server {n}", n, agents[n % len(agents)], first + n)
            for n in range(cluster.servers)
        ]
        for server in servers:
            job.output.add(server.key, server.name)
        workers = [
            _Process(rank, f"worker {rank}", None, agent, rank)
            for agent in agents for rank in agent.host.ranks
        ] if cluster.independent else []  # fmt: skip
        self._processes = {process.number: process for process in [*workers, *servers]}
        self._next_number = first + cluster.servers

    def owns(self, number: int) -> bool:
        return number in self._processes

    def start_servers(self) -> None:
        """Start all servers; the workers are started as ranks are."""
        for process in self._processes.values():
            if process.server is not None:
                self._start(process)

    def _start(self, process: _Process) -> None:
        describe = self._description
        if process.server is None:
            fields = describe.for_rank(process.agent.host, process.key)
        else:
            fields = describe.for_server(process.key, process.server)
        process.running, process.raised = True, ""
        process.agent.send("start", process.number, fields)

    # -- what agents tell

    def received(self, kind: str, number: int, words: Sequence[Any]) -> None:
        """Take a message of an agent about one of these processes."""
        process = self._processes[number]
        if kind == "output":
            self._job.output.feed(process.key, *words)
        elif kind == "raised":
            process.raised = words[0].partition(" ")[2]  # Before it: whose fault it is.
        elif kind == "started":
            process.running = True
            if process.server is None:
                self._job.first_failure.started[process.key] = words[0]
        elif kind == "exit":
            process.running = False
            self._exit(process, words[0])

    def _exit(self, process: _Process, code: int) -> None:
        ended = self._job.first_failure.codes
        needed = process.server is None or len(ended) < self._job.options.num_proc
        killed = code < 0 and not self._ending
        if killed and needed and process.restarts < self._cluster.restarts:
            self._restart(process, code)
        elif process.server is None:
            self._end_worker(process, code)
        else:
            why = f"{process.name} {self._why_it_ended(process, code)}"
            # Workers that need no server may have ended before one fails.
            if (code and not self._ending) or (code > 0 and not self._scheduler.formed):
                self.failure = self.failure or why
            if not self._ending and (code or not self._scheduler.formed):  # All members raise.
                self._scheduler.fail(why)

    def _restart(self, process: _Process, code: int) -> None:
        process.restarts += 1
        count = f"{process.restarts} of {self._cluster.restarts}"
        name = signal_name(-code)
        self._job.say(
            f"{process.name} was killed by {name}: it is started again ({count}, --ps-restarts)"
        )
        del self._processes[process.number]
        process.number, self._next_number = self._next_number, self._next_number + 1
        self._processes[process.number] = process
        self._start(process)

    def _end_worker(self, process: _Process, code: int) -> None:
        """Take note of the end of a worker; the others go on without one that has failed."""
        heard = self._job.first_failure
        if code and not self._ending:
            self._codes[process.key] = code
            why = Failure(process.key, code if code > 0 else 128 - code)
            self._job.say(f"{why}: the other workers go on".replace("rank", "worker", 1))
        else:
            heard.end(process.key, code)
        if len(heard.codes) + len(self._codes) == self._job.options.num_proc:
            failed, self._codes = self._codes, {}
            for rank, each in failed.items():
                heard.end(rank, each)

    def _why_it_ended(self, process: _Process, code: int) -> str:
        if code == 0:
            return (
                "has ended before all were there: each process runs the same script, which must "
                "call ps.init() and ps.DistributedOptimizer(...)"
            )
        if code < 0:
            name = signal_name(-code)
            return f"was killed by {name}, and no restart is left (--ps-restarts)"
        cause = self._job.output.causes().get(process.key) or process.raised
        return f"failed: {cause} (exit code {code})" if cause else f"failed with exit code {code}"

    # -- the end

    def begin_end(self, why: str) -> None:
        """Start nothing again; let all members raise, with the reason `why` if there is one."""
        self._ending = True
        if why:
            self._scheduler.fail(why)

    def hold_up(self, now: float) -> bool:
        """Return whether servers may still end by themselves, when all workers have ended."""
        if self._end_at is None:
            self._end_at = now + LAST_SECONDS
        serving = any(p.running for p in self._processes.values() if p.server is not None)
        return serving and now < self._end_at
