"""A worker of an elastic job: it speaks by membership/frames.py, and trains a number."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdlite.common.driver_link.checks import Checks
from hvdlite.common.driver_link.frames import read_world
from tests.simulation.elastic.laws import ORDER
from tests.simulation.elastic.states import WorkerState
from tests.simulation.start.net import Node
from tests.simulation.world import BrokenError

if TYPE_CHECKING:
    from tests.simulation.elastic.hosts import AgentProcess
    from tests.simulation.elastic.job import ElasticJob
    from tests.simulation.elastic.wires import Connection

FIRST_PID = 1000  # Of the worker 0.


class Worker:
    """A process that trains. Has the methods of `RankProcess`, for its agent."""

    def __init__(self, job: ElasticJob, home: AgentProcess, number: int, secret: str) -> None:
        self.number, self.host, self.slot = number, home.host, job.launcher.slots[number]
        self.home = home
        self.pid = FIRST_PID + number
        self.code: int | None = None  # That its agent may know.
        self.name = f"worker {number}"
        self.lives = True
        self.stopped = False  # It does nothing, and has not ended,
        self.stopped_by_signal = False  # as a signal has stopped it,
        self.never_goes_on = False  # and no other one will let it go on.
        self.silent_since: float | None = None
        self.backlog: list[Callable[[], None]] = []  # What it does when it goes on.
        self.ended = False  # It was told to end, or is done, or raises.
        self.state = WorkerState()
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.world: list[Any] = []
        self.left = 0  # The last epoch that it has left.
        self.secret = secret.encode()
        self.connection: Connection | None = None
        self.opened: Node | None = None  # What it has open, where connections are real.
        if job.wires is not None:
            self.opened = Node(job.wires, self.name, job.wires.host(self.host))
        self._job = job
        self._checks = Checks()

    # -- what the driver says

    def hear(self, frame: list[Any]) -> None:
        self.act(lambda: self._obey(frame))

    def act(self, action: Callable[[], None]) -> None:
        """Let it do something, now or when it goes on."""
        if self.stopped:
            self.backlog.append(action)
        elif self.lives:
            action()

    def stop(self, *, by_signal: bool, for_good: bool = False) -> None:
        """Do nothing any more, until it goes on."""
        self.stopped, self.stopped_by_signal = True, by_signal
        self.never_goes_on |= for_good
        self.silent_since = self._job.world.now

    def go_on(self) -> None:
        """Go on after a stop."""
        if self.never_goes_on:
            return
        self.stopped = self.stopped_by_signal = False
        self.silent_since = None
        backlog, self.backlog = self.backlog, []
        for action in backlog:
            self.act(action)

    def _obey(self, frame: list[Any]) -> None:
        match frame:
            case ["newcomer", *_]:
                self._soon(lambda: self.say("ready", 0, self.commit))
            case ["world", int(epoch), *_] if epoch > self.epoch:
                self._begin(frame)
            case ["bodies", int(epoch), 0, _] if epoch == self.epoch > self.left:
                self._soon(lambda: self._sync(epoch))
            case ["regroup", int(epoch), *_] if epoch == self.epoch:
                self.lose(epoch)
            case ["notice", int(counter), int()]:
                self._checks.hold(counter)
                self.say("checks", counter, self._checks.passed)
            case ["raise", int(counter), int(check), int(kind)]:
                self._checks.decide(counter, check, kind)
                self._job.collectives.look(self)
            case ["end", int(code), _]:
                self.ended = True
                self._soon(lambda: self._job.exit(self, code))

    def say(self, *frame: Any) -> None:
        if self.lives and not self.stopped:
            self.home.server.hear(self, list(frame))

    def greet(self) -> None:
        """Connect with the agent, and say hello."""
        self.home.server.connect(self)
        if self._job.wires is None:
            self.say_hello()

    def say_hello(self) -> None:
        self.say("hello", self.pid)

    def lose_driver(self) -> None:
        """End soon: without a driver there is no next world."""
        self.ended = True
        self._soon(lambda: self._job.exit(self, 1))

    # -- what its agent does with the process

    def signal(self, number: int) -> None:
        """End by a signal; after SIGTERM that may take its time."""
        if number == signal.SIGKILL:
            self._job.exit(self, -number)
        elif self.lives:
            self.ended = True
            pause = self._job.world.lot.choice((0.0, 5.0))
            end = lambda: self.act(lambda: self._job.exit(self, -number))  # noqa: E731
            self._job.world.after(pause, end)

    def end_group(self) -> None:
        """End; it has no children."""
        if self.lives:
            self.signal(signal.SIGKILL)
        self.pid = 0

    def drain(self) -> None:
        """Nothing is printed."""

    # -- a world

    def _begin(self, frame: list[Any]) -> None:
        _, self.epoch, members, *_ = frame
        self.world = frame
        self.members = tuple(number for number, _ in members)
        self._checks = Checks()
        if self.number not in self.members:
            raise BrokenError(ORDER, f"{self.name} is told a world of {self.members}")
        self.say("gather", self.epoch, 0, b"")

    def _sync(self, epoch: int) -> None:
        if epoch != self.epoch or self.left >= epoch:
            return
        world = read_world(self.world, self.number)
        root = self._job.workers[self.members[world.root]].state

        def sync() -> None:
            self.state.sync_in(world, self.members.index(self.number), root)
            self._train(epoch)

        if world.behind:
            self._job.collectives.meet(self, "sync", sync)
        else:
            sync()

    @property
    def commit(self) -> int:
        """The number of the commit that it holds; 0 before the first sync."""
        return self.state.number

    @property
    def total(self) -> int:
        """The sum of its steps."""
        return self.state.total

    def _train(self, epoch: int) -> None:
        if self.ended or epoch != self.epoch or self.left >= epoch:
            return
        if self.state.step == self._job.program.steps:
            self.leave_job()
            return
        pause = self._job.program.step_seconds * self._job.world.lot.random()
        self._soon(lambda: self._reduce(epoch), pause)

    def leave_job(self) -> None:
        """Return from the script."""
        self.ended = True
        self._job.tell(self.name, f"is done, with {self.total}")
        self.say("bye")
        self._job.collectives.depart(self)
        self._soon(lambda: self._job.exit(self, 0))

    def _reduce(self, epoch: int) -> None:
        if not self.ended and epoch == self.epoch > self.left:
            self._job.collectives.meet(
                self, f"step {self.state.step + 1}", lambda: self._stepped(epoch)
            )

    def _stepped(self, epoch: int) -> None:
        self.state.step += 1
        self.state.total += self.state.step
        if self.state.step % self._job.program.commit_every:
            self._soon(lambda: self._train(epoch))
            return
        self._soon(lambda: self._commit(epoch))

    def _commit(self, epoch: int) -> None:
        if self.ended or epoch != self.epoch or self.left >= epoch:
            return
        self.state.save()
        self._job.tell(self.name, f"holds commit {self.commit}, of step {self.state.step}")
        self._check(epoch)

    def _check(self, epoch: int) -> None:
        if self.ended or epoch != self.epoch or self.left >= epoch:
            return
        if self._checks.held:
            self._job.collectives.wait(
                self, lambda: not self._checks.held, lambda: self._check(epoch)
            )
        elif self._checks.enter() is None:
            self._train(epoch)
        else:
            self._job.collectives.depart(self)
            self._leave(epoch)

    def lose(self, epoch: int) -> None:
        """See that the world is over: go back to the last commit."""
        self.act(lambda: self._lose(epoch))

    def _lose(self, epoch: int) -> None:
        if self.lives and not self.ended and epoch == self.epoch > self.left:
            self.state.restore()
            self._job.collectives.note_left(self, epoch)
            self._leave(epoch)

    def _leave(self, epoch: int) -> None:
        self.left = epoch
        self._soon(lambda: self.say("ready", epoch, self.commit))

    def _soon(self, action: Callable[[], None], pause: float = 0.0) -> None:
        world = self._job.world
        world.after(pause + world.soon(), partial(self.act, action))
