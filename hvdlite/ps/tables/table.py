"""The state of one table on one server: what comes in, and what is answered.

A table is begun by the values of a worker, or by a snapshot. After a snapshot it first hears of all
workers that take part in it, since one of them may have pulled newer values than the snapshot has;
those are taken. A worker that has gone further than even they fails: `rolled_back`. A table that
had a version before, of which neither a snapshot nor a worker has anything, is not begun again with
first values: `TableLostError`. Nor is one that was loaded begun with what was pulled before that.

[Note: failures] The user's own optimizer runs here, and what it had done when it failed nobody
knows: a step may be half made. So the table fails with it, alone: whoever waits for it hears why at
once, and whoever asks later the same. Its values are not sent, saved or moved any more, and the
step is not tried again, but where all of them are replaced by what a snapshot or a checkpoint has.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.settings.logs import log
from hvdlite.ps.connections.messages import LASTS, REPLACES, Answer, Message
from hvdlite.ps.connections.records import OFF
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.tables.clocks import SYNC, Clocks
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.first_values import Start, Starts
from hvdlite.ps.tables.gradient_pieces import LAST, PIECE, Assemblies
from hvdlite.ps.tables.updater import LeavesOut, Updater, add_up, divided

# In the body of a push: a loss scaler has found an overflow, so no update is made; the numbers of
# tensors without a gradient, which is one of zeros where another worker has one.
SKIP, ABSENT = "skip", "absent"


class TableLostError(HorovodInternalError):
    """What a table had is nowhere any more: the job cannot go on."""


class TableFailedError(ValueError):
    """The optimizer of the table has failed here: see [Note: failures]."""


class Saved(NamedTuple):
    """A table between two updates."""

    values: list[Array]
    state: dict[str, Array]
    version: int
    finished: dict[int, int]
    numbers: list[Mapping[str, Any]]


class Table:
    """A table. `workers` says who takes part in the job, as far as this server knows."""

    def __init__(self, described: TableDescription, updater: Updater, *, incarnation: int) -> None:
        self.described, self.name = described, described.name
        self.blocks, self.updater = described.blocks, updater
        self.clocks = Clocks(described.mode)
        self._incarnation = incarnation
        self.begun = False  # The values are there.
        self.failure = ""  # What all hear since its optimizer has failed; empty: it has not.
        self._restored = False
        self.reached = 0  # The version that it had before this server has come.
        self._workers: set[int] = set()
        self._of: int | None = None  # The worker whose first values it has begun with.
        self._starts = Starts()
        self._newcomers: dict[int, bytes] = {}  # Worker -> the process as which it has come first.
        # Worker -> its process that has started here since the last load. What comes of another one
        # was sent before.
        self._started: dict[int, bytes] = {}
        self._left: dict[int, tuple[bytes, int]] = {}  # Lost workers: who they were, their clocks.
        self._pulls: dict[int, tuple[bytes, Message]] = {}  # That wait, by worker.
        # Of sync, by step and worker: the gradients of each block, or None where the worker skips
        # the step, and the tensors of which it has none.
        self._pushes: dict[int, dict[int, tuple[list[Array] | None, set[int]]]] = {}
        self._pieces = Assemblies(self.blocks)
        # Memory for the sum of each block, the same each time: new pages cost more than the sum.
        self._totals: dict[int, Array] = {}
        self._numbers: list[Mapping[str, Any]] = []
        # Version -> a copy of its values, of the two newest ones. A worker that returns may have to
        # do a step again that other servers have not finished.
        self._sent: dict[int, list[Array]] = {}
        self._goes_back = False  # To a snapshot, though workers have newer values.
        self._state_of: int | None = None  # The version of an older state that newer values got.
        self.records = OFF
        self._given: dict[int, int] = {}  # Worker -> the version of the values that it has.
        self.copy_of: Callable[[Array], Array] = np.copy  # Makes copies that are sent.
        # Workers that do not take part in this table, which need not be heard of.
        self.others: Callable[[], Collection[int]] = lambda: ()

    @property
    def version(self) -> int:
        return self.clocks.version

    @property
    def load(self) -> int:
        """The turn of the last load of this table; 0: there was none."""
        return self._starts.load

    @load.setter
    def load(self, turn: int) -> None:
        self._starts.load = turn

    # -- the beginning

    def restore(self, saved: Saved, *, goes_back: bool = False) -> None:
        """Begin with a snapshot; with `goes_back`, whatever newer values workers have."""
        self._take(saved)
        if self.clocks.mode.name == SYNC:
            # A push of a step that is not complete was lost with the server: it is to come again.
            finished = saved.finished.items()
            self.clocks.finished = {worker: min(step, saved.version) for worker, step in finished}
        self._goes_back, self._restored = goes_back, True

    def _take(self, saved: Saved) -> None:
        self.replace(saved.values, saved.state)
        self.clocks.version, self.clocks.finished = saved.version, dict(saved.finished)
        self._numbers = list(saved.numbers)

    def remember(self, saved: Saved) -> None:
        """Keep the values of the version before, for a worker that has to make its step again."""
        if self.clocks.mode.name == SYNC:
            self._sent[saved.version] = saved.values

    def has(self, version: int) -> bool:
        """Return whether a worker can make the steps from this version on, perhaps again.

        What it has pushed of them does not count again.
        """
        return version >= self.version or version in self._sent

    def adopt(self, saved: Saved) -> None:
        """Begin with what this table was on other servers; no worker has to be heard of before."""
        self._take(saved._replace(values=[array.copy() for array in saved.values]))
        self.begun = True

    def replace(self, values: Sequence[Array], state: Mapping[str, Array]) -> None:
        """Have other values and another state from now on, at the same version."""
        self.failure = ""
        with self._failing("taking values and a state"):
            self.updater.begin(values)
            self.updater.load(state)
        self._sent.clear()
        self._state_of = None

    def take_loaded(
        self, values: Sequence[Array], state: Mapping[str, Array], turn: int, version: int,
        clocks: Mapping[int, int], workers: Collection[int],
    ) -> list[Answer]:  # fmt: skip
        """Have what was loaded, and workers at these clocks; no push of before counts any more.

        The table begins with it where it has not begun; in sync it may have been behind `version`.
        All workers start again. In sync, a push that its worker still has is sent again then: it
        counts on all servers, and that of a worker that was lost on none of them.
        """
        self.replace(values, state)
        newcomers = () if self.begun else set(workers).difference(self.others())
        self.clocks.stand(version, clocks, newcomers)
        self.load, self._of, self.begun = turn, None, True
        self._started.clear()
        self._pushes.clear()
        self._pieces = Assemblies(self.blocks)
        pulls, self._pulls = self._pulls.values(), {}
        answers = [self._answer(peer, message.request, "restarted") for peer, message in pulls]
        return answers + self.look(workers)

    def moved(self) -> list[Answer]:
        """Return what workers hear that wait for this table, when other servers keep it."""
        return self._answer_all("moved")

    def _answer_all(self, kind: str, body: Mapping[str, Any] = {}) -> list[Answer]:
        waiting = [(each.peer, each.request) for each in self._starts.waiting.values()]
        waiting += [(peer, message.request) for peer, message in self._pulls.values()]
        self._starts.waiting.clear()
        self._pulls.clear()
        return [self._answer(peer, request, kind, body) for peer, request in waiting]

    def copy(self) -> Saved:
        """Return what `restore` takes. The values are those that are sent, too: never change them.

        The state is in memory of its own. Raises `TableFailedError`.
        """
        self.check()
        with self._failing("copying its state"):
            values, finished = self._values_of(self.version), dict(self.clocks.finished)
            return Saved(values, self._copied_state(), self.version, finished, self._numbers)
        raise self._failed_error()

    def _copied_state(self) -> dict[str, Array]:
        return {name: array.copy() for name, array in self.updater.state().items()}

    def start(
        self, peer: bytes, worker: int, message: Message, workers: Collection[int]
    ) -> list[Answer]:
        """Let a worker take part; `workers` are all that the server has to hear of."""
        body = message.body
        start = Start(
            peer, message.request, body.get("clock"), body.get("version", -1),
            body.get("enters", 0), body.get("first"), body.get("load", 0),
        )  # fmt: skip
        self._starts.add(worker, start)
        # Those of a snapshot are older ones than those of a worker that has lived on.
        if body.get("numbers") and (not self._numbers or (self._restored and not self.begun)):
            self._numbers = list(body["numbers"])
        return self.look(workers)

    def look(self, workers: Collection[int]) -> list[Answer]:
        """Begin if all that is needed for it is here; call it when `workers` have changed."""
        self._workers = set(workers)
        return self._refuse_all() if self.failure else self._look(workers)

    def _look(self, workers: Collection[int]) -> list[Answer]:
        for worker in [*self.clocks.finished]:
            if worker not in workers and self.begun:
                if worker in self._started:
                    self._left[worker] = self._started[worker], self.clocks.finished[worker]
                self.clocks.leave(worker)
        if self.begun:
            return self._welcome() + self._go_on()
        others, starts = self.others(), self._starts
        # Who waits may have left meanwhile, or be lost: it needs no values any more.
        if self._workers.isdisjoint(starts.waiting):
            return []
        if starts.wanted in starts.waiting and starts.wanted in workers:  # It knows that.
            return []
        is_lost = (self.reached > 0 or self.load > 0) and not self._restored
        may_be_newer = self._restored or is_lost
        # In sync the last worker to start may have newer values than the others, and all will come
        # where one has finished steps that this server has forgotten.
        if self.clocks.mode.name == SYNC:
            may_be_newer |= any(start.version >= 0 for start in starts.waiting.values())
        # Those that do not go back have nothing newer that counts, and may ask for nothing here
        # before those that do have made their steps again.
        if may_be_newer and not self._goes_back and starts.missing(workers, others):
            return []
        if is_lost and starts.newest(workers) < 0:
            raise self._lost_error(self.reached)
        if self._restored and (starts.newest(workers) <= self.version or self._goes_back):
            return self._begin()
        start = starts.want(workers, others)
        return [] if start is None else [self._answer(start.peer, start.request, "wanted")]

    def _lost_error(self, version: int) -> TableLostError:
        loaded = " and was loaded" if self.load else ""
        return TableLostError(
            f"the table '{self.name}' had version {version}{loaded}, and its server has come "
            "again: no snapshot and no worker has its values. Go on from a checkpoint (ps.load) in "
            "another job, and give --ps-snapshot so that a server that is lost has something to "
            "return to"
        )

    def offer(self, peer: bytes, worker: int, message: Message) -> list[Answer]:
        """Begin with the values of a worker, unless the table has begun."""
        if self.failure:
            return [self._refusal(peer, message.request)]
        if self.begun:  # The answer was lost, or others had newer values.
            pushed = self.version or any(self.clocks.finished.values()) or self.clocks.present
            is_unread = self._of is not None and not pushed and not self._given
            if message.body.get(REPLACES) and is_unread:
                values = self._first_values_of(worker, message)
                with self._failing("taking first values"):
                    self.updater.begin(values)
                self._sent.clear()
                if self.failure:
                    return [self._refusal(peer, message.request), *self._refuse_all()]
            body = {"clock": self.clocks.enter(worker), "is_known": True, "of": self._of}
            self._started[worker] = peer
            return [self._answer(peer, message.request, "started", body)]
        if worker != self._starts.wanted:
            return []
        values = self._first_values_of(worker, message)
        start = self._starts.waiting[worker]
        start.peer, start.request = peer, message.request
        with self._failing("taking first values"):
            # Nobody has a newer state than the snapshot has.
            state = self._copied_state() if self._restored else {}
            self.updater.begin(values)
            if self._restored:
                self.updater.load(state)
        if self.failure:
            return self._refuse_all()
        if start.version > self.version:
            self._state_of = self.version
        self.clocks.version, self.load = max(start.version, 0), max(start.load, self.load)
        finished, sync = self.clocks.finished, self.clocks.mode.name == SYNC
        if sync:  # The values have all steps before their version: nobody makes one of them again.
            finished.update({each: max(step, self.version) for each, step in finished.items()})
        # No update of sync is made, and ssp lets nobody run ahead, without a worker that has not
        # started yet. Where others have made steps, its clock is known when it starts: their number
        # is not that of updates, but in sync.
        if not self._restored and (sync or start.version < 0):
            for number in self._workers:
                finished.setdefault(number, self.version)
        return self._begin()

    def _first_values_of(self, worker: int, message: Message) -> list[Array]:
        self._of = worker
        return [
            block.view(data).copy()
            for block, data in zip(self.blocks, message.payloads, strict=True)
        ]

    def _begin(self) -> list[Answer]:
        self.begun = True
        return self._welcome() + self._go_on()

    def _welcome(self) -> list[Answer]:
        answers, knew = [], set(self.clocks.finished)
        sync, waiting = self.clocks.mode.name == SYNC, sorted(self._starts.waiting.items())
        for worker, start in waiting:  # First, as others may begin where these are.
            if start.clock is not None:
                peer, clock = self._left.pop(worker, (b"", 0))
                known = self.clocks.finished.get(worker, clock if peer == start.peer else 0)
                # In sync, the version contains all steps before it, and no step after it.
                self.clocks.finished[worker] = max(known, self.version if sync else start.clock)
        for worker, start in waiting:
            is_ahead = sync and start.clock is not None and start.clock > self.version
            kind = "rolled_back" if is_ahead else "started"
            if worker not in knew:
                self._newcomers[worker] = start.peer
            self._started[worker] = start.peer
            is_known = self._newcomers.get(worker) != start.peer  # Else it only asks again.
            body: dict[str, Any] = {
                "clock": self.clocks.enter(worker), "is_known": is_known, "of": self._of
            }  # fmt: skip
            if start.enters > body["clock"]:
                body["clock"] = self.clocks.finished[worker] = start.enters
            answers.append(self._answer(start.peer, start.request, kind, body))
        self._starts.waiting.clear()
        return answers

    # -- steps

    def push(self, peer: bytes, worker: int, message: Message) -> list[Answer]:
        """Take the gradients of a step; one that was here before is answered, and not applied."""
        if not self._has_started(peer, worker):
            return [self._answer(peer, message.request, "restarted")]
        if self.failure:
            return [self._refusal(peer, message.request)]
        expected = self.clocks.finished[worker]
        pieced = PIECE in message.body
        if pieced and not message.body.get(LAST):
            if message.clock == expected:
                self._pieces.add(worker, message)
            return [self._answer(peer, message.request, "pushed")]
        gradients = None
        if message.clock >= expected and not message.body.get(SKIP):
            gradients = (  # Pieces of it that have gone before may not be here.
                self._pieces.take(worker, message) if pieced else self._gradients_of(message)
            )
            if gradients is None:  # The worker then starts again, and sends all of its push.
                return [self._answer(peer, message.request, "restarted")]
        # The updates since the values with which the gradients were computed.
        stale = max(0, self.version - self._given.get(worker, self.version))
        if self.clocks.push(worker, message.clock):
            self._pieces.forget(worker)
            self.records.begin("push", self.name, f"worker {worker}")
            if numbers := message.body.get("numbers"):
                self._numbers = numbers
            absent = set(message.body.get(ABSENT, ()))
            if self.clocks.mode.name == SYNC:
                self._pushes.setdefault(message.clock, {})[worker] = gradients, absent
            else:
                with self._updating():
                    self._update(gradients and self._scaled(gradients), absent)
            self._record("push", worker, message.clock, stale, _nbytes_of(gradients or ()))
        answers = self._go_on()
        if self.failure:  # Whoever waits for nothing hears it, too.
            return [self._refusal(peer, message.request), *answers]
        return [self._answer(peer, message.request, "pushed", {"stale": stale}), *answers]

    def pull(self, peer: bytes, worker: int, message: Message) -> list[Answer]:
        """Answer with the values when the mode allows it."""
        if not self._has_started(peer, worker):
            return [self._answer(peer, message.request, "restarted")]
        self._pulls[worker] = peer, message
        self.records.begin("pull", self.name, f"worker {worker}")
        return self._go_on()

    def _has_started(self, peer: bytes, worker: int) -> bool:
        return worker in self.clocks.finished and self._started.get(worker) == peer

    def leave(self, worker: int) -> list[Answer]:
        """Let the others go on without a worker; what it has pushed counts."""
        self.clocks.leave(worker)
        self._starts.waiting.pop(worker, None)
        self._pulls.pop(worker, None)
        self._pieces.forget(worker)
        return self._go_on() if self.begun else []

    def _go_on(self) -> list[Answer]:
        """Make the updates that are complete, and answer the pulls that have waited for them."""
        if self.clocks.mode.name == SYNC:
            while not self.failure and (workers := self.clocks.complete()) is not None:
                pushes = self._pushes.pop(self.version)
                given = [pushes[worker] for worker in workers]
                gradients = [each for each, _ in given if each is not None]
                with self._updating():
                    total = self._sum(gradients) if len(gradients) == len(given) else None
                    self._update(total, set.intersection(*(absent for _, absent in given)))
        if self.failure:
            return self._refuse_all()
        ready = [
            worker
            for worker, (_, message) in self._pulls.items()
            if self.clocks.may_pull(worker, message.clock)
        ]
        answers = []
        for worker in ready:
            peer, message = self._pulls.pop(worker)
            try:
                version, values = self._values_for(message)
            except Exception as error:  # Such as memory that may be there for the next pull.
                log.error("the table '%s' cannot answer a pull", self.name, exc_info=error)
                why = {"why": f"the server cannot make what it is to send: {error!r}"}
                answers.append(self._answer(peer, message.request, "failed", why))
                continue
            self._given[worker] = version
            clock = message.clock
            slowest = min(self.clocks.finished.values(), default=clock)
            stale = max(0, clock - slowest)
            self._record("pull", worker, clock, stale, _nbytes_of(values))
            payloads = [memoryview(array.reshape(-1).view(np.uint8).data) for array in values]
            words = "values", message.request, self.name, version, self._incarnation
            body = {"stale": stale, "load": self.load} if self.load else {"stale": stale}
            answers.append(Answer(peer, Message(*words, body, payloads)))
        return answers

    # -- failures

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Let the table fail where its optimizer does: see [Note: failures]."""
        try:
            yield
        except Exception as error:
            self.failure = (
                f"{what} has failed on the server, whose output has the traceback: {error!r}. Mend "
                "that, and go on from a checkpoint (ps.load) in another job"
            )
            log.error("the table '%s': %s", self.name, self.failure, exc_info=error)

    def _updating(self) -> AbstractContextManager[None]:
        return self._failing(f"the update from version {self.version}")

    def _failed_error(self) -> TableFailedError:
        return TableFailedError(f"the table '{self.name}': {self.failure}")

    def check(self) -> None:
        """Raise `TableFailedError` where the optimizer has failed."""
        if self.failure:
            raise self._failed_error()

    def _refusal(self, peer: bytes, request: int) -> Answer:
        return self._answer(peer, request, "failed", {"why": self.failure, LASTS: True})

    def _refuse_all(self) -> list[Answer]:
        """Return what those hear who wait for a table that has failed."""
        return self._answer_all("failed", {"why": self.failure, LASTS: True})

    # -- parts

    def _record(self, kind: str, worker: int, clock: int, stale: int, nbytes: int) -> None:
        if self.records.enabled:
            self.records.end(
                kind, self.name, f"worker {worker}", version=self.version, clock=clock,
                stale=stale, nbytes=nbytes,
            )  # fmt: skip

    def _gradients_of(self, message: Message) -> list[Array]:
        return [block.view(data) for block, data in zip(self.blocks, message.payloads, strict=True)]

    def _sum(self, given: Sequence[list[Array]]) -> list[Array]:
        """Return the sum in the order of the workers' numbers, or the average."""
        found = []
        for number, summands in enumerate(zip(*given, strict=True)):
            if number not in self._totals:
                self._totals[number] = self.blocks[number].new()
            total = self._totals[number]
            found.append(add_up(summands, average=self.described.average, into=total))
        return found

    def _scaled(self, gradients: list[Array]) -> list[Array]:
        """Return the gradients of one push as an update of async or ssp takes them."""
        if self.clocks.mode.scale is None:
            return gradients
        workers = len(self.clocks.finished)
        return [divided(gradient, workers) for gradient in gradients]

    def _update(self, gradients: list[Array] | None, absent: Collection[int]) -> None:
        if self.clocks.mode.name == SYNC:
            self._keep(gradients)
        self.records.begin("update", self.name)
        if gradients is not None:
            if absent and isinstance(self.updater, LeavesOut):
                keys = {self.described.first_key + number for number in absent}
                self.updater.leave(
                    [
                        [slice(at, end) for key, _, _, at, end in block.places if key in keys]
                        for block in self.blocks
                    ]
                )
            self.updater.step(gradients, self._numbers)
            since, self._state_of = self._state_of, None
            if since is not None and self.updater.state():  # It has one at all.
                log.warning(
                    "the table '%s' goes on from version %d with the values of worker %s, as its "
                    "server was lost; what its optimizer keeps besides, such as momenta, %s. With "
                    "--ps-snapshot and --ps-snapshot-every 1 it loses nothing",
                    self.name, self.version, self._of,
                    f"is that of version {since}" if since else "has begun anew",
                )  # fmt: skip
        self.clocks.update()
        self.records.end("update", self.name, version=self.version)

    def _keep(self, _gradients: list[Array] | None) -> None:
        """Keep the values of this version, for a worker that has to make this step again.

        Mostly they were pulled, and are there; not so where the table has just come here.
        """
        self._values_of(self.version)

    def _values_for(self, pull: Message) -> tuple[int, Sequence[Array]]:
        """Return a version, and its values in memory that the next update does not touch.

        In sync they are those that the step of the pull begins with.
        """
        is_kept = self.clocks.mode.name == SYNC and pull.clock in self._sent
        version = pull.clock if is_kept else self.version
        return version, self._values_of(version)

    def _values_of(self, version: int) -> list[Array]:
        """Return a copy of the values of this version, or of one before that is kept."""
        if version not in self._sent:
            self._sent[version] = [*map(self.copy_of, self.updater.values())]
            for old in sorted(self._sent)[: -2 if self.clocks.mode.name == SYNC else -1]:
                del self._sent[old]
        return self._sent[version]

    def _answer(self, peer: bytes, request: int, kind: str, body: Mapping[str, Any] = {}) -> Answer:
        message = Message(kind, request, self.name, self.version, self._incarnation, body)
        return Answer(peer, message)


def _nbytes_of(arrays: Sequence[Array]) -> int:
    return sum(array.nbytes for array in arrays)
