"""A job whose ranks agents run: one on each host, which starts the ranks of that host."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hvdlite.launcher.agents.agent_connection import AgentConnection, AgentHost
from hvdlite.launcher.agents.channel import squeeze
from hvdlite.launcher.agents.cluster_processes import ClusterProcesses
from hvdlite.launcher.agents.group_agents import GroupAgents, make_group
from hvdlite.launcher.agents.host_agents import AgentUser, HostAgents
from hvdlite.launcher.agents.job_description import JobDescription
from hvdlite.launcher.command_line.launcher_choice import GROUPS
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions.merged_meeting import MergedMeeting
from hvdlite.launcher.hosts.ssh import explain_agent, has_not_answered, spell_end
from hvdlite.launcher.jobs.job import FixedJob
from hvdlite.launcher.jobs.outcome import NOT_STARTED_CODE, JobOutcome
from hvdlite.launcher.live.job_view import STALL
from hvdlite.launcher.processes.signals import signal_group

if TYPE_CHECKING:
    from hvdlite.ps.scheduler.running import HostedScheduler

ABOUT_PROCESSES = {"started", "output", "raised", "part", "exit"}
LAST_SECONDS = 1.0  # How long processes that have closed their output may take to end.


class AgentsJob(FixedJob, AgentUser):
    """See `FixedJob`."""

    name = "the agents"

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str], hosts: tuple[AgentHost, ...],
        launcher_environ: Mapping[str, str], scheduler: HostedScheduler | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options, environ)
        self._description = description = JobDescription(options, environ, hosts)
        self._hands: HostAgents
        if options.launcher in GROUPS:
            names = [host.name for host in hosts]
            group = make_group(options.launcher, names, options, launcher_environ)
            self._hands = GroupAgents(group, self, description, launcher_environ, self)
        else:
            self._hands = HostAgents(self, description, launcher_environ, self)
        self.agents = [self._hands.add(host) for host in hosts]
        self._cluster: ClusterProcesses | None = None  # Servers, and workers that are no ranks.
        if scheduler is not None and options.cluster is not None:
            self._cluster = ClusterProcesses(
                self, options.cluster, scheduler, self.agents, description
            )
        self._meeting = meeting = MergedMeeting(options.size)
        self._finished: list[int] = []  # Ranks that ended with code 0, which agents do not know.
        self._started = False
        self._ending = False
        self._failing = False
        self._failure: JobOutcome | None = None
        self._handlers: dict[str, Callable[..., None]] = {
            "gathered": self._gathered,
            "came": lambda agent, among, n, came: meeting.note(among, n, agent.host.ranks, came),
            "withdrawn": lambda agent, among, n: meeting.withdraw(among, n, agent.host.ranks),
        }
        # What is said of a rank, whichever agent has it.
        self._of_ranks: dict[str, Callable[..., None]] = {
            "started": self.first_failure.started.__setitem__, "output": self.output.feed,
            "raised": lambda rank, words: self.first_failure.receive("raised", rank, words.split()),
            "part": description.keep_answer, "exit": self._exit,
            "stall": lambda _, text: self.live.note(STALL, text),
            "answer": self.live.orders.receive,
        }  # fmt: skip

    def describe(self) -> list[str]:
        return [*self._hands.describe(), shlex.join(self.options.command)]

    # -- the start

    def start(self) -> None:
        self._hands.start()

    def supplied(self, agent: AgentConnection) -> None:
        """Start all ranks once each agent has the files that they need."""
        if not self._late and not self._ending:
            self._started = True
            for each in self.agents:
                for rank in each.host.ranks:
                    each.send("start", rank, self._description.for_rank(each.host, rank))
            if self._cluster is not None:
                self._cluster.start_servers()

    def refused(self, agent: AgentConnection, why: str) -> None:
        self._fail(f"host {agent.host.name} {why}")

    def _fail(self, sentence: str) -> None:
        """End the start of the job: no rank runs yet."""
        if self._failure is None:
            self._failure = JobOutcome(NOT_STARTED_CODE, sentence)
        self._stop_start()

    def _stop_start(self) -> None:
        self._ending = True
        self._hands.stop()
        for agent in self.agents:
            agent.dismiss()

    # -- while ranks run

    def running(self) -> bool:
        return self._hands.busy() or any(agent.connected for agent in self.agents)

    def look(self, now: float) -> None:
        if not self._started and (why := self._hands.failure()):
            self._fail(why)
        self._tell_of_failure()
        if self._cluster is not None and not self._ending:
            self._look_for_end()
        # At once would be too often: each host tells all others.
        for members, missing in self._meeting.news():
            for agent in self._agents_of(members):
                agent.send("missing", members, missing)
        # Ranks that still run may wait for one that has ended. At the end of a large job, a message
        # for each rank would be too many.
        finished, self._finished = self._finished, []
        for agent in self.agents if finished else ():
            if self._left(agent):
                agent.send("finished", finished)
        self._hands.look(now)

    def silent(self, agent: AgentConnection, seconds: float) -> None:
        agent.kill()
        self._lose(agent, has_not_answered(seconds))

    def keep_alive(self) -> None:
        self._hands.keep_alive()

    def said(self, agent: AgentConnection, kind: str, fields: list[Any]) -> None:
        cluster = self._cluster
        if cluster is not None and kind in ABOUT_PROCESSES and cluster.owns(fields[0]):
            cluster.received(kind, fields[0], fields[1:])
            self._look_for_end()
            return
        if kind in self._of_ranks:
            self._of_ranks[kind](*fields)
        elif kind in self._handlers:
            self._handlers[kind](agent, *fields)

    def order(self, number: int, line: str) -> str:
        for agent in self._agents_of([number]):
            agent.send("order", number, line)
        return ""

    def let_count(self) -> None:
        self._hands.let_count()

    def _exit(self, rank: int, code: int) -> None:
        self.first_failure.end(rank, code)
        if not code:
            self._finished.append(rank)
        self._look_for_end()

    def _gathered(
        self, _agent: AgentConnection, members: list[int], number: int, bodies: dict[int, bytes]
    ) -> None:
        merged = self._meeting.add(members, number, bodies)
        if merged is not None:
            data = squeeze(merged)
            for agent in self._agents_of(members):
                agent.send_data("deliver", members, number, data=data)

    def _agents_of(self, members: list[int]) -> list[AgentConnection]:
        wanted = set(members or self.options.ranks)
        return [each for each in self.agents if wanted.intersection(each.host.ranks)]

    def lost(self, agent: AgentConnection) -> None:
        """Look whether the channel of an agent has ended as it should, or too early."""
        if self._ending and not self._left(agent):
            return
        said, code = agent.last_words()
        if not self._started:
            self._fail(explain_agent(agent.host.name, said, code))
        elif agent.host.remote:
            agent.gone = True
            self._lose(agent, f"closed its connection: {said or 'its agent has ended'}")
        else:
            self._lose(agent, f"lost its agent: it {spell_end(code)}")

    def _lose(self, agent: AgentConnection, why: str) -> None:
        left = self._left(agent)
        for rank in left:
            self.first_failure.lose(rank, f"is lost with host {agent.host.name}, which {why}")
        if not agent.host.remote:
            for rank in left:
                if pid := self.first_failure.started.get(rank):
                    signal_group(pid, signal.SIGKILL)
        self._look_for_end()

    def _left(self, agent: AgentConnection) -> list[int]:
        heard = self.first_failure
        return [rank for rank in agent.host.ranks if rank not in heard.codes]

    # -- the end

    def _look_for_end(self) -> None:
        """Let the agents end when no rank runs any more."""
        heard = self.first_failure
        if not self._started or len(heard.codes.keys() | heard.lost) < self.options.num_proc:
            return
        if (
            self._cluster is not None
            and not heard.trouble
            and self._cluster.hold_up(time.monotonic())
        ):
            return
        self._ending = True
        for agent in self.agents:
            if heard.trouble:  # Child processes may have outlived their rank.
                agent.send("signal", int(signal.SIGKILL), [])
            agent.let_end()

    def begin_end(self) -> None:
        self._failing = True
        if self._cluster is not None:
            self._cluster.begin_end(str(self.first_failure.failure() or ""))
        self._tell_of_failure()

    def _tell_of_failure(self) -> None:
        """Let ranks that wait for others in `init` raise, also those that have come meanwhile."""
        failure = self.first_failure.failure() if self._failing else None
        if failure is not None:
            for agent in self.agents:
                agent.send("fail", str(failure), failure.rank)

    @property
    def _late(self) -> list[AgentConnection]:
        return [agent for agent in self.agents if not agent.supplied]

    def signal(self, number: int) -> None:
        if not self._started:
            self._stop_start()
        for agent in self.agents:
            agent.send("signal", int(number), [])

    def abandon(self) -> None:
        self._ending = True
        self._hands.abandon()

    def finish(self) -> None:
        self._hands.finish(LAST_SECONDS)

    def late(self, missing: list[int]) -> list[int]:
        # Ranks start when all agents have their files.
        return [rank for agent in self._late for rank in agent.host.ranks] or missing

    def failure(self) -> JobOutcome | None:
        if self._failure is None and self._cluster is not None and self._cluster.failure:
            return JobOutcome(1, self._cluster.failure)  # Workers may not have noticed.
        return self._failure

    def close(self) -> None:
        heard = self.first_failure
        for agent in self.agents:
            started = {rank: heard.started.get(rank, 0) for rank in agent.host.ranks}
            left = [pid for rank, pid in started.items() if pid and heard.codes.get(rank) != 0]
            self._hands.clean_up(agent, left, there=agent.gone)
        self._hands.close()
