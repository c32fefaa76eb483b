"""The script that the training thread of a rank runs: it makes the calls of a program."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.engine.engine import Engine
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from tests.simulation.ranks.calls import Call, Tensor
from tests.simulation.ranks.programs import Epoch
from tests.simulation.world import BrokenError

if TYPE_CHECKING:
    from tests.simulation.ranks.job import Job

# A job that makes no progress for so long will never make any: all timers of the engines that do
# not repeat are shorter.
PATIENCE_SECONDS = 30.0
RESULTS, ORDER, PROGRESS, BLAME, ENDS = (
    "results equal the oracle",
    "all ranks run one order",
    "nobody waits for what can never come",
    "errors name who is at fault",
    "the job ends by the rules",
)
Step = float | Sequence[Entry] | Callable[[], bool]


class Script:
    """What one rank does: its steps yield what they wait for."""

    rank: int
    name: str
    engine: Engine
    _job: Job
    _lot: random.Random

    def run(self) -> Generator[Step, None, None]:
        for epoch in self._job.program.epochs:
            yield from self._epoch(epoch)
        if self._job.program.leaver is not None:
            yield from self._leave_or_fail()
        yield from self.leave("")

    def _epoch(self, epoch: Epoch) -> Generator[Step, None, None]:
        members = epoch.members or tuple(range(self._job.program.size))
        if epoch.formed:
            if self.rank in members:
                yield from self._take_part_in_formed(epoch, members)
            return
        process_set_id = GLOBAL_ID
        if epoch.members:
            request = Request(GLOBAL_ID, "add_process_set", "add_process_set", shape=members)
            formed = yield from self._call(request)
            process_set_id = formed.process_set_id
        yield from self._exchange_messages(epoch)
        if self.rank in members:
            yield from self._take_part(epoch, process_set_id, members)
        if epoch.removes:
            dangling = self._dangle(epoch, process_set_id, members)
            request = Request(
                GLOBAL_ID, "remove_process_set", "remove_process_set", root_rank=process_set_id
            )
            yield from self._call(request)
            for entry in dangling:
                yield [entry]
                if "has been removed" not in str(entry.handle.error):
                    text = f"{self.name}: '{entry.request.name}' of a removed set: "
                    raise BrokenError(BLAME, f"{text}{entry.handle.error}")

    def _take_part_in_formed(
        self, epoch: Epoch, members: tuple[int, ...]
    ) -> Generator[Step, None, None]:
        """Make a set with its members alone, and give it back."""
        name = f"form_process_set.{list(members)}"
        request = Request(GLOBAL_ID, name, "form_process_set", parties=members)
        formed = yield from self._call(request)
        yield from self._take_part(epoch, formed.process_set_id, members)
        self._job.world.tell(self.name, "calls release_process_set")
        request = Request(
            GLOBAL_ID,
            f"release_process_set.{formed.process_set_id}.{formed.use}",
            "release_process_set",
            root_rank=formed.process_set_id,
            parties=members,
        )
        self.engine.enqueue([Entry(request)])

    def _exchange_messages(self, epoch: Epoch) -> Generator[Step, None, None]:
        sent: list[Entry] = []
        for message in epoch.messages:
            if self.rank in message.senders:
                yield self._lot.random() * self._job.program.jitter
                self._job.world.tell(self.name, f"sends {message.label(self.rank)}")
                sent.append(message.entry(self.rank, sends=True))
                self.engine.enqueue(sent[-1:])
        for message in epoch.messages:
            left = list(message.senders) if self.rank == message.receiver else []
            while left:
                sender = left[0]
                if message.searches:
                    search = message.search(left)
                    self._job.world.tell(self.name, f"searches a sender of {left}")
                    self.engine.enqueue([search])
                    yield [search]
                    search.handle.wait()
                    sender = search.response.first_dims[0]
                left.remove(sender)
                entry = message.entry(sender, sends=False)
                self.engine.enqueue([entry])
                yield [entry]
                entry.handle.wait()
                if not np.array_equal(entry.result, message.data(sender)):
                    text = f"{entry.result.tolist()} from rank {sender}"
                    raise BrokenError(RESULTS, f"{self.name}, '{entry.request.name}': {text}")
        yield sent
        for each in sent:
            each.handle.wait()

    def _dangle(self, epoch: Epoch, process_set_id: int, members: Sequence[int]) -> list[Entry]:
        """Start what other members never do."""
        if self.rank not in members or members.index(self.rank) not in epoch.dangling:
            return []
        entry = Entry(Request(process_set_id, "barrier.dangling", "barrier"))
        self.engine.enqueue([entry])
        return [entry]

    def _call(self, request: Request) -> Generator[Step, None, Any]:
        entry = Entry(request)
        self._job.world.tell(self.name, f"calls {request.collective}")
        self.engine.enqueue([entry])
        yield [entry]
        return entry.handle.wait()

    def _take_part(
        self, epoch: Epoch, process_set_id: int, members: Sequence[int]
    ) -> Generator[Step, None, None]:
        index = members.index(self.rank)
        started: list[tuple[Call, int, list[Entry]]] = []
        for round_ in range(epoch.rounds[index]):
            count = len(epoch.calls)
            for call in epoch.calls if epoch.ordered else self._lot.sample(epoch.calls, count):
                yield self._lot.random() * self._job.program.jitter
                entries = call.entries(process_set_id, members, index, round_)
                self._job.world.tell(self.name, f"starts {call.collective} '{call.name}'")
                self.engine.enqueue(entries)
                started.append((call, round_, entries))
                if epoch.ordered and self._lot.random() < 0.5:
                    yield from self._finish(epoch, index, [started.pop()])
            if round_ < epoch.rounds[index] - 1 or self._lot.random() < 0.3:
                yield from self._finish(epoch, index, started)
                started = []
        if epoch.joins:
            yield from self._call(Request(process_set_id, "join.noname", "join"))
        yield from self._finish(epoch, index, started)

    def _finish(
        self, epoch: Epoch, index: int, started: Sequence[tuple[Call, int, list[Entry]]]
    ) -> Generator[Step, None, None]:
        for call, round_, entries in self._lot.sample(started, len(started)):
            yield entries
            self._check(epoch, index, call, round_, entries)

    def _check(
        self, epoch: Epoch, index: int, call: Call, round_: int, entries: Sequence[Entry]
    ) -> None:
        where = f"{self.name}, {call.collective} '{call.name}'"
        if call.odd is not None and call.collective not in ("barrier",):
            error = entries[0].handle.error
            if not (isinstance(error, HorovodInternalError) and error.job_goes_on):
                for entry in entries:
                    entry.handle.wait()
                raise BrokenError(BLAME, f"{where}: ranks of two shapes got a result")
            odd = (epoch.members or range(self._job.program.size))[call.odd]
            both = {odd, (epoch.members or (0, 1))[0 if call.odd else 1]}
            missing = [rank for rank in sorted(both) if f"rank {rank} has" not in str(error)]
            if missing and "has been shut down" not in str(error):
                raise BrokenError(BLAME, f"{where}: ranks {missing} are not in: {error}")
            return
        present = [each for each, rounds in enumerate(epoch.rounds) if rounds > round_]
        expected = call.expected(index, len(epoch.rounds), round_, present)
        for entry, right in zip(entries, expected, strict=False):
            entry.handle.wait()
            assert isinstance(entry, Tensor)
            if entry.result.shape != right.shape or not np.array_equal(entry.result, right):
                text = f"{entry.result.tolist()} instead of {right.tolist()}"
                raise BrokenError(RESULTS, f"{where}, round {round_}: {text}")

    def _leave_or_fail(self) -> Generator[Step, None, None]:
        """One rank leaves after some calls; others get right answers, or its number."""
        leaver, lot = self._job.program.leaver, self._lot
        names = lot.sample(range(3), lot.randint(0, 3))
        members = tuple(range(self._job.program.size))
        calls = [Call(f"last.{n}", "allgather", 1, 0, 1, n) for n in names]  # type: ignore[arg-type]
        started = [(call, call.entries(GLOBAL_ID, members, self.rank, 0)) for call in calls]
        for call, entries in started:
            self._job.world.tell(self.name, f"starts allgather '{call.name}'")
            self.engine.enqueue(entries)
            yield lot.random() * self._job.program.jitter
        if self.rank == leaver:
            return
        join = Entry(Request(GLOBAL_ID, "join.noname", "join"))
        self._job.world.tell(self.name, "calls join")
        self.engine.enqueue([join])
        words = f"rank {leaver} has been shut down"
        for entry in (join, *(entry for _, entries in started for entry in entries)):
            yield [entry]
            error = entry.handle.error
            if error is None and entry is not join:
                continue  # Some may have joined meanwhile, but never the one that leaves.
            if words not in str(error):
                raise BrokenError(BLAME, f"{self.name}, '{entry.request.name}' says: {error}")

    def leave(self, reason: str) -> Generator[Step, None, None]:
        self._job.world.tell(self.name, "shuts down")
        self.engine.begin_shutdown(reason)
        yield self.engine.departed.is_set
