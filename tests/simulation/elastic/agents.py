"""The launcher of an elastic job in a world: its own code, but for what is outside of it.

`ElasticWorkers` and `HostAgents` are the real ones, with their connections to agents. See hosts.py
for the processes at the other ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hvdlite.launcher.agents import host_agents
from hvdlite.launcher.agents.agent_connection import AgentConnection
from hvdlite.launcher.command_line.job_kinds import ElasticOptions
from hvdlite.launcher.decisions.commands import StartWorker
from hvdlite.launcher.elastic import worker_processes
from hvdlite.launcher.elastic.worker_processes import ElasticWorkers
from hvdlite.launcher.hosts.resources import SETTING
from tests.simulation.elastic.hosts import Leader, Removal, stand_ins
from tests.simulation.elastic.laws import SLOTS, Watched, seeded
from tests.simulation.world import BrokenError, in_place

if TYPE_CHECKING:
    from tests.simulation.elastic.job import ElasticJob


class Launcher(Watched, ElasticWorkers):
    """The launcher's part, whose commands are checked."""

    job: ElasticJob
    slots: dict[int, int]  # Of all workers that were started, by number.
    _drops: Counter[str]  # How often the agent of a host was told to end.
    _unable: Counter[tuple[str, int]]  # How often a slot of a host had nothing for a worker.

    def check_world(self, world: list[Any]) -> None:
        self.job.check_world(world)

    def say(self, line: str) -> None:
        self.job.tell("driver", line)

    def start_worker(self, worker: StartWorker) -> None:
        self.slots[worker.number] = worker.slot
        super().start_worker(worker)

    def signal(self, number: int, signal_number: int) -> None:
        self._no_more((number,))
        super().signal(number, signal_number)

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        if frame[0] == "end":
            self._no_more(numbers)
        super().tell(numbers, frame)

    def drop_agent(self, host: str) -> None:
        self._drops[host] += 1
        self._no_more_on(host)
        super().drop_agent(host)

    def _give_up(self, agent: AgentConnection) -> list[int]:
        self._no_more_on(agent.host.name)
        return super()._give_up(agent)

    def said(self, agent: AgentConnection, kind: str, fields: list[Any]) -> None:
        if kind == "unable":
            host, slot = agent.host.name, self.slots[fields[0]]
            self._unable[host, slot] += 1
            if self._unable[host, slot] > 1 + self._drops[host]:
                text = f"slot {slot} of {host} is used again, which had nothing for a worker"
                raise BrokenError(SLOTS, text)
        super().said(agent, kind, fields)

    def _no_more_on(self, host: str) -> None:
        self._no_more([n for n, each in self.job.workers.items() if each.host == host])

    def _no_more(self, numbers: Any) -> None:
        """Count on workers no longer that are told to end."""
        for number in numbers:
            if number in self.job.workers:
                self.job.workers[number].ended = True


def new_launcher(job: ElasticJob, options: ElasticOptions) -> Launcher:
    """Return the launcher of a job."""
    launch = SimpleNamespace(
        command=("train",), as_horovod=False, call=None, start_timeout_seconds=30.0, torch_pod=None,
        size=1, binding_args=(), elastic=options,
    )  # fmt: skip
    nothing = lambda *_: None  # noqa: E731
    outside: Any = SimpleNamespace(
        options=launch, loop=SimpleNamespace(look_every=nothing),
        environ={"OMP_NUM_THREADS": "1"} | ({SETTING: "1"} if job.program.devices else {}),
        live=SimpleNamespace(
            note=nothing, receive=nothing, orders=SimpleNamespace(receive=nothing)
        ),
        say=nothing,
        output=SimpleNamespace(begin=nothing, end=nothing, feed=nothing),
    )  # fmt: skip
    Launcher.job = job
    Launcher.slots, Launcher._drops, Launcher._unable = {}, Counter(), Counter()
    with seeded(job.world.lot.random):
        launcher = Launcher(options, outside, lambda _host: 1, {})
    launcher.watch(job.workers)
    return launcher


@contextmanager
def around(job: ElasticJob) -> Iterator[None]:
    """Be what is outside of the launcher's code."""
    clock = SimpleNamespace(monotonic=job.clock)

    def begin(_agents: object, agent: AgentConnection) -> None:
        leader: Any = Leader(job, agent.host.name)
        agent.follow(leader)

    replaced: list[tuple[Any, str, Any]] = [
        (host_agents, "time", clock), (worker_processes, "time", clock),
        (host_agents.HostAgents, "_begin", begin),
        (host_agents, "ssh_command", lambda host, words, *_: ["ssh", host, words]),
        (host_agents, "LeadingProcess", lambda command, *_: Removal(job, command)),
        *stand_ins(job),
    ]  # fmt: skip
    with in_place(replaced):
        yield
