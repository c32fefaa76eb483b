"""The hosts of an elastic job in a world: real agents, and what they take from outside.

The agent that runs on a host is the launcher's own (`agent_process.agent`): it starts workers and
passes their words on, tells of those that are stopped or silent, and ends them where it hears
nothing of the launcher. Its channel, its folder and its workers are played.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hvdlite.common.connections.frames import unpack
from hvdlite.launcher.agent_process import system
from hvdlite.launcher.agent_process.agent import Agent
from hvdlite.launcher.agents import agent_connection
from tests.simulation.elastic.channels import End, Way
from tests.simulation.elastic.programs import FROM_LAUNCHER, SILENCE_SECONDS, TO_LAUNCHER
from tests.simulation.elastic.wires import Loop, Server
from tests.simulation.elastic.workers import FIRST_PID, Worker
from tests.simulation.start.net import Node

if TYPE_CHECKING:
    from tests.simulation.elastic.job import ElasticJob

BROKEN = 255  # How ssh ends when the process at its other end was killed.
REMOVAL_SECONDS = 0.1
EVENTS = -1  # The descriptor of the pipe in which workers say what occurs.


class Leader:
    """The process that leads to an agent, as ssh does. Has the methods of `LeadingProcess`."""

    def __init__(self, job: ElasticJob, host: str) -> None:
        self.way = Way(job, host)
        self.code: int | None = None
        self._said = ""
        self.closed = False
        job.leaders.append(self)
        job.world.after(0.2 * job.world.lot.random(), self._arrive)

    def take_streams(self) -> tuple[Any, int]:
        return self.way, FROM_LAUNCHER

    def _arrive(self) -> None:
        """Come to the host, and start the agent, or tell that this cannot be done."""
        if self.code is not None:
            return
        job, host = self.way.job, self.way.host
        if job.network.reaches(host):
            AgentProcess(self, dict(job.program.devices).get(host))
        else:
            self._said = "ssh: No route to host"
            self.end(255)

    def end(self, code: int) -> None:
        """End, by itself or with the agent."""
        if self.code is None:
            self.code = code
            self.way.job.wake(self.way.ends[FROM_LAUNCHER].lose)

    def said(self) -> str:
        """Return what it has printed."""
        return self._said

    def signal(self, number: int) -> None:
        self.code = -number if self.code is None else self.code

    def wait(self, _seconds: float) -> None:
        """It has ended, or is closed next."""

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.closed = True


class Removal:
    """What removes the remains of an agent on its host. Has the methods of a `LeadingProcess`."""

    def __init__(self, job: ElasticJob, command: Sequence[str]) -> None:
        self.code: int | None = None
        self._job = job
        *_, self._host, words = command
        *self._kills, removal = words.split("; ")
        self._path = removal.removeprefix("rm -rf ")
        job.world.after(REMOVAL_SECONDS, self._arrive)

    def _arrive(self) -> None:
        job, host = self._job, self._host
        if not job.network.reaches(host):
            self.code = BROKEN
            job.unreached.add((host, self._path))
            return
        for kill in self._kills:
            group = int(kill.split()[3].removeprefix("-"))
            job.exit(job.workers[group - FIRST_PID], -signal.SIGKILL)
        job.folders.discard((host, self._path))
        self.code = 0

    def wait(self, seconds: float) -> None:
        until = self._job.world.now + seconds
        self._job.world.run(lambda: self.code is not None or self._job.world.now > until)

    def close(self) -> None:
        """Nothing is left of it."""


class AgentProcess:
    """The process of an agent; its host has `devices` for ranks, None: as many as there are."""

    def __init__(self, leader: Leader, devices: int | None) -> None:
        self.leader, self.way = leader, leader.way
        self.job, self.host = self.way.job, self.way.host
        self.lives = True
        self.workers: dict[int, Worker] = {}
        self.signals: list[int] = []  # To the agent.
        self.events: list[tuple[str, int, str]] = []
        self.on_events: Callable[[int], object] = lambda _fd: None
        self.server: Any = None
        self.environ: dict[str, str] = {}
        if devices is not None:
            self.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(devices)))
        self.is_fit = devices != 0
        self._look_at = 0.0
        self.opened: Node | None = None  # What it has open, where connections are real.
        if (net := self.job.wires) is not None:
            self.opened = Node(net, f"agent of {self.host}", net.host(self.host))
        self.way.agent = self
        self.job.here = self
        self.job.agents.append(self)
        inbox: Any = SimpleNamespace(fileno=lambda: -2, take=self._signal, drain=lambda _fd: None)
        between: Any = self.way
        self.agent = Agent(between, TO_LAUNCHER, inbox)
        self.agent.begin()
        self.turn()

    @property
    def is_given_up(self) -> bool:
        """Whether the launcher hears nothing of its end, for which it gives it time."""
        return self.lives and not self.way.ends[FROM_LAUNCHER].open

    def _signal(self) -> int | None:
        return self.signals.pop(0) if self.signals else None

    def act(self, action: Callable[[], object]) -> None:
        """Let something happen to it."""
        if self.lives:
            self.job.here = self
            action()
            self.turn()

    def turn(self) -> None:
        """Let the agent do what follows from what has come."""
        self.job.here = self
        if self.job.wires is not None:
            self.job.wires.turn = self.opened
        self.agent.turn()
        if not self.agent.goes_on():
            self.agent.end()
            self.lives = False
            self.close()
            self.job.network.carry(self.way, self.host, TO_LAUNCHER, lambda: self.leader.end(0))
            return
        world = self.job.world
        look_at = world.now + self.agent.patience()
        if self._look_at <= world.now or look_at < self._look_at:
            self._look_at = look_at
            world.at(look_at, lambda: self._look(look_at))

    def close(self) -> None:
        """Let the system close what it has open."""
        if self.opened is not None:
            self.opened.end()

    def _look(self, look_at: float) -> None:
        if self.lives and look_at == self._look_at:
            self.turn()

    def soon(self, seconds: float, action: Callable[[], object]) -> None:
        """Let something happen to it after about so many seconds."""

        happen = lambda: self.act(action)  # noqa: E731
        self.job.world.after(seconds * (0.5 + self.job.world.lot.random()), happen)

    def say(self, event: str, number: int, text: str) -> None:
        """Take what a worker says in the pipe of events."""
        self.events.append((event, number, text))
        self.soon(1e-3, lambda: self.on_events(EVENTS))

    def be_killed(self) -> None:
        """End without a word to anybody; its workers are killed with it by the kernel."""
        self.lives = False
        self.close()
        for worker in self.workers.values():
            if worker.lives:
                self.job.collectives.end(worker, 1e-3)
        end = lambda: self.leader.end(BROKEN)  # noqa: E731
        self.job.network.carry(self.way, self.host, TO_LAUNCHER, end)

    def lose_host(self) -> None:
        """End with the host, of which nobody hears."""
        self.lives, self.way.lost_at = False, self.job.world.now
        self.close()
        for worker in self.workers.values():
            if worker.lives:
                self.job.collectives.end(worker, SILENCE_SECONDS)


class _Folder:
    """Has the methods of `AgentFolder`."""

    events_fd = EVENTS

    def __init__(self, process: AgentProcess) -> None:
        self.path = f"/a{len(process.job.agents):04d}"
        self.socket, self.events = f"{self.path}/meeting", f"{self.path}/events"
        self._process = process
        process.job.folders.add((process.host, self.path))
        self._ended: list[int] = []

    def said(self) -> Iterator[tuple[str, int, str]]:
        events, self._process.events = self._process.events, []
        yield from events

    def remove(self) -> None:
        self._process.job.folders.discard((self._process.host, self.path))

    def begin_answer(self, number: int) -> None:
        self._ended.append(number)

    def next_answer_part(self, most_bytes: int) -> tuple[int | None, bytes]:
        return (self._ended.pop(0) if self._ended else None), b""


class _Server:
    """Has the methods of `WorkerServer`: the workers of a host, and what they say."""

    def __init__(
        self, process: AgentProcess, said: Callable[[int, list[Any]], None],
        ended: Callable[[int], None], expects: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self.connected: dict[int, Worker] = {}
        self.said, self.expects = said, expects
        self._process, self._ended = process, ended
        process.server = self

    def connect(self, worker: Worker) -> None:
        if self._process.lives and self.expects(worker.number):
            self.connected[worker.number] = worker

    def hear(self, worker: Worker, message: list[Any]) -> None:
        if self._process.lives and worker.number in self.connected:
            self.said(worker.number, message)
            self._process.turn()

    def lose(self, worker: Worker) -> None:
        if self.connected.pop(worker.number, None) is not None:
            self._ended(worker.number)

    def send_head(self, number: int, head: bytes) -> None:
        if number in self.connected:
            self.connected[number].hear(unpack(head))

    def hear_last_words(self, number: int) -> None:
        """All have been heard."""

    def silence(self) -> dict[int, float]:
        now = self._process.job.world.now
        return {number: now - (each.silent_since or now) for number, each in self.connected.items()}


def _enter(job: ElasticJob) -> None:
    if not job.here.is_fit:
        raise FileNotFoundError(2, "No such file or directory")


def _new_process(job: ElasticJob, environ: Mapping[str, str]) -> Worker:
    worker = Worker(job, job.here, int(environ["HVDLITE_WORKER"]), environ["HVDLITE_SECRET"])
    job.here.workers[worker.number] = job.workers[worker.number] = worker
    job.world.after(job.world.lot.choice((0.05, 2.0)), lambda: worker.act(worker.greet))
    return worker


def _new_loop(job: ElasticJob) -> Any:
    def listen(fd: int, handler: Callable[[int], object]) -> None:
        if fd == EVENTS:
            job.here.on_events = handler

    if job.here.opened is not None:
        loop = Loop(job.here.opened, job.here.act)
        loop.listen = listen  # type: ignore[attr-defined]
        return loop
    return SimpleNamespace(listen=listen, awake_seconds=job.world.clock)


def stand_ins(job: ElasticJob) -> list[tuple[Any, str, Any]]:
    """Return what is outside of agents, and of the launcher's connections with them."""

    def serve(loop: Any, path: str, secret: bytes, *calls: Any) -> Any:
        if job.wires is not None:
            return Server(job.here, loop, path.encode(), secret, *calls)
        return _Server(job.here, *calls)

    def state_of(number: int) -> str:
        return "T" if job.workers[number - FIRST_PID].stopped_by_signal else "S"

    return [
        (system, "now", job.world.clock), (system, "environ", lambda: job.here.environ),
        (system, "enter", lambda _path: _enter(job)),
        (system, "EventLoop", lambda: _new_loop(job)),
        (system, "Channel", End), (system, "AgentFolder", lambda: _Folder(job.here)),
        (system, "RankProcess", lambda _, environ, *_2, **_3: _new_process(job, environ)),
        (system, "serve_workers", serve), (system, "state_of", state_of),
        (system, "tidy", lambda: None),
        (agent_connection, "Channel", End),
    ]  # fmt: skip
