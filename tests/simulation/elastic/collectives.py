"""What the ranks of the worlds of an elastic job do together, and how they lose each other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping

from tests.simulation.elastic.programs import SILENCE_SECONDS
from tests.simulation.elastic.workers import Worker
from tests.simulation.world import World

Action = Callable[[], None]


class Collectives:
    """Collectives of the members of worlds, and waits; `workers` are those of the job."""

    def __init__(self, world: World, workers: Mapping[int, Worker]) -> None:
        self._world, self._workers = world, workers
        self._meetings: dict[tuple[int, str], dict[int, Action]] = {}
        self._departed: dict[int, set[int]] = defaultdict(set)
        self._waits: dict[int, tuple[Callable[[], bool], Action]] = {}
        self._parted: dict[frozenset[str], float] = {}  # Hosts without a connection -> until then.

    def part(self, one: str, other: str, seconds: float) -> None:
        """Let the ranks of two hosts not reach each other for a while."""
        self._parted[frozenset((one, other))] = self._world.now + seconds

    # -- losses

    def end(self, worker: Worker, seen_after: float) -> None:
        """End a process: the other ranks of its world see it."""
        worker.lives = False
        self._waits.pop(worker.number, None)
        if worker.number not in self._departed[worker.epoch]:
            self.note_left(worker, worker.epoch, seen_after)

    def note_left(self, worker: Worker, epoch: int, seen_after: float = 1e-3) -> None:
        """Let the others of a world see that a member has left it."""
        if not epoch:
            return
        self._waits.pop(worker.number, None)
        for number in worker.members:
            peer = self._workers[number]
            if number != worker.number and peer.epoch == epoch:
                delay = seen_after * (0.5 + self._world.lot.random())
                self._world.after(delay, lambda each=peer: each.lose(epoch))  # type: ignore[misc]

    def depart(self, worker: Worker) -> None:
        """Let a worker leave its world in order: only those fail that need it."""
        epoch = worker.epoch
        self._departed[epoch].add(worker.number)
        for (of, _), meeting in self._meetings.items():
            if of == epoch:
                for number in meeting:
                    self._fail(self._workers[number], epoch)

    def _fail(self, worker: Worker, epoch: int) -> None:
        self._world.after(1e-3 * (0.5 + self._world.lot.random()), lambda: worker.lose(epoch))

    # -- collectives and waits

    def meet(self, worker: Worker, what: str, then: Action) -> None:
        """Let a worker take part in a collective of its world, and go on when all have come."""
        meeting = self._meetings.setdefault((worker.epoch, what), {})
        meeting[worker.number] = then
        if self._departed[worker.epoch]:
            self._fail(worker, worker.epoch)
        if meeting.keys() >= set(worker.members):
            self._complete(worker.epoch, what, worker.members)

    def _complete(self, epoch: int, what: str, members: tuple[int, ...]) -> None:
        """Let all go on, unless some of them do not reach each other."""
        cuts: dict[frozenset[str], float] = {}
        if self._parted:
            hosts = dict.fromkeys(self._workers[number].host for number in members)
            pairs = map(frozenset, itertools.combinations(hosts, 2))
            cuts = {each: self._parted.get(each, 0.0) - self._world.now for each in pairs}
        longest = max(cuts.values(), default=0.0)
        if longest > SILENCE_SECONDS:
            lost = frozenset().union(*(each for each, left in cuts.items() if left > 0))
            for number in members:
                if self._workers[number].host in lost:
                    self._lose_later(self._workers[number], epoch)
        elif longest > 0:
            again = lambda: self._complete(epoch, what, members)  # noqa: E731
            self._world.after(longest + 1e-6, again)
        else:
            meeting = self._meetings.pop((epoch, what), {})
            for number in members:
                self._go_on(self._workers[number], epoch, meeting)

    def _lose_later(self, worker: Worker, epoch: int) -> None:
        seconds = SILENCE_SECONDS * (1 + 0.2 * self._world.lot.random())
        self._world.after(seconds, lambda: worker.lose(epoch))

    def _go_on(self, worker: Worker, epoch: int, meeting: dict[int, Action]) -> None:
        def act() -> None:
            if worker.lives and not worker.ended and worker.epoch == epoch > worker.left:
                meeting[worker.number]()

        self._world.after(self._world.soon(), lambda: worker.act(act))

    def wait(self, worker: Worker, ready: Callable[[], bool], then: Action) -> None:
        """Let a worker go on when `look` finds that it is ready."""
        self._waits[worker.number] = ready, then

    def look(self, worker: Worker) -> None:
        """Let a worker go on if what it waits for has come."""
        ready, then = self._waits.get(worker.number, (lambda: False, lambda: None))
        if ready():
            del self._waits[worker.number]
            then()
