"""The agents of an elastic job in a world, and what starts them: the launcher's own code.

`ElasticWorkers` and `HostAgents` are the real ones. Its connections and agents are played:
an agent starts workers and passes their words on, and ends them where it hears nothing any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hvdlite.common.connections.frames import unpack
from hvdlite.launcher.agents import host_agents
from hvdlite.launcher.agents.agent_connection import AgentHost
from hvdlite.launcher.agents.channel import VERSION, unsqueeze
from hvdlite.launcher.command_line.job_kinds import ElasticOptions
from hvdlite.launcher.decisions.hosts import ORPHAN_SECONDS
from hvdlite.launcher.elastic import workers
from hvdlite.launcher.elastic.workers import ElasticWorkers
from tests.simulation.elastic.laws import Watched, seeded
from tests.simulation.elastic.programs import FROM_LAUNCHER, SILENCE_SECONDS, TO_LAUNCHER
from tests.simulation.elastic.workers import Worker

if TYPE_CHECKING:
    from tests.simulation.elastic.job import ElasticJob


class Leader:
    """The process that leads to an agent, as ssh does: it ends with the agent, and its workers."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.failed = agent, False

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.failed:
            return 255
        agent = self.agent
        return None if agent.lives or any(each.lives for each in agent.workers.values()) else 0


LOOK_SECONDS = 0.1  # Between two looks at what is silent.


class Agent:
    """One agent as the launcher has it (see `AgentConnection`), and its process on a host."""

    job: ElasticJob  # Of all agents, while it runs.

    def __init__(
        self, host: AgentHost, _loop: object,
        received: Callable[[Agent, str, list[Any]], None], ended: Callable[[Agent], None],
    ) -> None:  # fmt: skip
        self.host = host
        self.ready = self.supplied = False
        self.folder = ""
        self.leader = Leader(self)
        self.lives = False  # The process.
        self.workers: dict[int, Worker] = {}
        self._received, self._ended = received, ended
        self._open = True  # The launcher's end.
        self._lost_at: float | None = None  # With its host.
        self._world = self.job.world

    # -- the launcher's end

    def send(self, kind: str, *fields: Any) -> None:
        self._carry(FROM_LAUNCHER, lambda: self._hear(kind, fields))

    def send_data(self, kind: str, *fields: Any, data: bytes) -> None:
        self._carry(FROM_LAUNCHER, lambda: self._hear(kind, (*fields, data)))

    def feed(self, messages: Iterator[tuple[Any, ...]], fed: Callable[[], None]) -> None:
        self._world.after(1e-4, lambda: self._open and self.job.wake(fed))

    def beat(self, now: float, silence_seconds: float) -> bool:
        """Return whether the agent was heard in time: beats come while the way is free."""
        silent = self.job.network.silence(self.host.name, TO_LAUNCHER)
        if self._lost_at is not None:
            silent = max(silent, self._world.now - self._lost_at)
        return not self.ready or silent < silence_seconds

    def last_words(self) -> tuple[str, int | None]:
        return "ssh: No route to host" if self.leader.failed else "", self.leader.code

    def dismiss(self) -> None:
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            if self.lives:
                self._carry(FROM_LAUNCHER, self.lose_launcher)

    # -- the process

    def begin(self) -> None:
        """Come, or tell that the host cannot be reached."""
        name = self.host.name
        if not self._open:
            return
        if self.job.network.reaches(name):
            self.lives = True
            self.job.network.agents.append(self)
            hello = {"channel": VERSION, "python": list(sys.version_info[:3]), "folder": "/agent"}
            self.say("hello", hello)
        else:
            self.leader.failed = True
            self.job.wake(lambda: self._ended(self))

    def say(self, kind: str, *fields: Any, after: float = 0.0) -> None:
        """Tell the launcher something, which the agent learns after about so many seconds."""

        def hear() -> None:
            if self._open:
                self.job.wake(lambda: self._received(self, kind, list(fields)))

        def tell() -> None:
            if self.lives:
                self._carry(TO_LAUNCHER, hear)

        if after:
            self._world.after(after * (0.5 + self._world.lot.random()), tell)
        else:
            tell()

    def _carry(self, way: int, action: Callable[[], None]) -> None:
        self.job.network.carry(self, self.host.name, way, action)

    def _hear(self, kind: str, fields: tuple[Any, ...]) -> None:
        if not self.lives:
            return
        match kind, fields:
            case "job", _:
                self.say("ready")
            case "start", (number, {"local_rank": slot}):
                self.workers[number] = worker = Worker(self.job, self, number, slot)
                self.job.workers[number] = worker
                self.say("started", number, 1000 + number)
                pause = self._world.lot.choice((0.05, 2.0))
                self._world.after(pause, lambda: worker.act(lambda: worker.say("hello", 1)))
            case "signal", (signal_number, numbers):
                for number in numbers:
                    self._signal(self.workers[number], signal_number)
            case "tell", (numbers, data):
                frame = unpack(unsqueeze(data))
                for number in numbers:
                    self.workers[number].hear(frame)

    def _signal(self, worker: Worker, number: int) -> None:
        if worker.lives:
            self.job.end(worker, -number)

    def lose_host(self) -> None:
        """End with the host, of which nobody hears."""
        if self.lives:
            self.lives, self._lost_at = False, self._world.now
            self._end_all(SILENCE_SECONDS)

    def look(self) -> None:
        """Give up the launcher where nothing is heard of it."""
        if (
            self.lives
            and self.job.network.silence(self.host.name, FROM_LAUNCHER) >= SILENCE_SECONDS
        ):
            self.lose_launcher()

    def lose_launcher(self) -> None:
        """End the workers, which may take their time, and then itself."""
        if not self.lives:
            return
        self.lives = False
        for worker in self.workers.values():
            worker.ended = True
        pause = self._world.lot.choice((0.0, 0.0, ORPHAN_SECONDS))
        self._world.after(pause, lambda: self._end_all(1e-3))
        if self._open:
            self._carry(TO_LAUNCHER, self._close)

    def _close(self) -> None:
        if self._open:
            self.job.wake(lambda: self._ended(self))

    def _end_all(self, seen_after: float) -> None:
        for worker in self.workers.values():
            if worker.lives:
                self.job.collectives.end(worker, seen_after)


class Launcher(Watched, ElasticWorkers):
    """The launcher's part, whose commands are checked."""

    job: ElasticJob

    def check_world(self, world: list[Any]) -> None:
        self.job.check_world(world)

    def say(self, line: str) -> None:
        self.job.tell("driver", line)

    def signal(self, number: int, signal_number: int) -> None:
        self._no_more((number,))
        super().signal(number, signal_number)

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        if frame[0] == "end":
            self._no_more(numbers)
        super().tell(numbers, frame)

    def drop_agent(self, host: str) -> None:
        self._no_more([n for n, each in self.job.workers.items() if each.host == host])
        super().drop_agent(host)

    def _give_up(self, agent: Any) -> list[int]:
        self._no_more(agent.workers)
        return super()._give_up(agent)

    def _no_more(self, numbers: Any) -> None:
        """Count on workers no longer that are told to end."""
        for number in numbers:
            if number in self.job.workers:
                self.job.workers[number].ended = True


def new_launcher(job: ElasticJob, options: ElasticOptions) -> Launcher:
    """Return the launcher of a job."""
    launch = SimpleNamespace(command=("train",), as_horovod=False, call=None,
                             start_timeout_seconds=30.0)  # fmt: skip
    nothing = lambda *_: None  # noqa: E731
    outside: Any = SimpleNamespace(
        options=launch, environ={}, loop=SimpleNamespace(look_every=nothing),
        live=SimpleNamespace(
            note=nothing, receive=nothing, orders=SimpleNamespace(receive=nothing)
        ),
        say=nothing,
        output=SimpleNamespace(begin=nothing, end=nothing, feed=nothing),
    )  # fmt: skip
    Agent.job = job
    Launcher.job = job
    with seeded(job.world.lot.random):
        launcher = Launcher(options, outside, lambda _host: 1, {})
    launcher.watch(job.workers)
    return launcher


class _Description:
    """Has the methods of `JobDescription`, without anything to describe."""

    def __init__(self, *_: object) -> None:
        self.keep_answer: Any = None

    def for_host(self, _host: AgentHost) -> dict[str, Any]:
        return {}

    def start(self, rank: int, slot: int, _variables: dict[str, str]) -> dict[str, Any]:
        return {"rank": rank, "local_rank": slot}

    def silence_of(self, host: AgentHost) -> float:
        return SILENCE_SECONDS if host.remote else 0.0

    def messages_of_files(self, _host: AgentHost) -> Iterator[tuple[Any, ...]]:
        return iter(())


def _begin(_agents: object, agent: Agent) -> None:
    world = agent.job.world
    world.after(0.2 * world.lot.random(), agent.begin)


@contextmanager
def around(job: ElasticJob) -> Iterator[None]:
    """Be what is outside of the launcher's code."""
    clock = SimpleNamespace(monotonic=job.clock)
    stand_ins: list[tuple[Any, str, Any]] = [
        (host_agents, "time", clock), (workers, "time", clock),
        (host_agents, "AgentConnection", Agent), (host_agents.HostAgents, "_begin", _begin),
        (workers, "JobDescription", _Description),
        (host_agents, "removal_command", lambda *_: []),
        (host_agents, "LeadingProcess", lambda *_: SimpleNamespace(code=0, close=lambda: None)),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield
