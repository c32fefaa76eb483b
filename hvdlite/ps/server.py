"""A server: keeps its share of the tables, and answers workers. One thread does all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.ps.blocks import Block, TensorSpec
from hvdlite.ps.channel import Listener
from hvdlite.ps.clocks import Mode
from hvdlite.ps.layout import Part
from hvdlite.ps.messages import Message
from hvdlite.ps.snapshots import Snapshot, SnapshotFolder
from hvdlite.ps.tables import Answer, Table, Updater

LOOK_SECONDS = 0.5


class TableDescription:
    """What a worker says of a table when it starts: alike in all workers."""

    def __init__(self, name: str, body: Mapping[str, Any]) -> None:
        self.body = body
        try:
            specs = [TensorSpec(n, d, tuple(shape), group) for n, d, shape, group in body["specs"]]
            self.name = name
            self.specs: Sequence[TensorSpec] = specs
            self.mode = Mode(body["mode"], body["staleness"])
            self.average = bool(body["average"])
            self.blocks = [
                Block(dtype, group, tuple(Part(*part) for part in parts))
                for dtype, group, parts in body["blocks"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the table {name!r} is described wrongly: {error}") from error


def describe_table(
    specs: Sequence[TensorSpec], blocks: Sequence[Block], mode: Mode, *, average: bool
) -> dict[str, Any]:
    """Return what `TableDescription` reads."""
    return {
        "specs": [[spec.name, spec.dtype, list(spec.shape), spec.group] for spec in specs],
        "mode": mode.name,
        "staleness": mode.staleness,
        "average": average,
        "blocks": [
            [
                block.dtype,
                block.group,
                [[part.key, part.start, part.stop, part.server] for part in block.parts],
            ]
            for block in blocks
        ],
    }


class Server:
    """The server behind a listener. `new_updater` makes what holds the values of a table."""

    def __init__(
        self, listener: Listener, new_updater: Callable[[TableDescription], Updater], *,
        incarnation: int, workers: Collection[int], snapshots: SnapshotFolder | None = None,
        snapshot_every: int = 0,
    ) -> None:  # fmt: skip
        self.listener = listener
        self.tables: dict[str, Table] = {}
        self.workers = set(workers)  # That take part, as the scheduler says.
        self._new_updater = new_updater
        self._incarnation = incarnation
        self._snapshots, self._every = snapshots, snapshot_every
        self._descriptions: dict[str, TableDescription] = {}
        self._saved: dict[str, int] = {}  # The version of the newest snapshot.
        self._worker_of: dict[bytes, int] = {}
        self._handlers: dict[str, Callable[[bytes, Message], list[Answer]]] = {
            "start": self._start, "offer": self._offer, "push": self._push, "pull": self._pull,
            "leave": self._leave,
        }  # fmt: skip
        for snapshot in snapshots.newest() if snapshots else ():
            table = self._new_table(TableDescription(snapshot.table, snapshot.description))
            words = snapshot.values, snapshot.state, snapshot.version, snapshot.finished
            table.restore(*words)
            self._saved[snapshot.table] = snapshot.version

    def _new_table(self, described: TableDescription) -> Table:
        name = described.name
        self._descriptions[name] = described
        self.tables[name] = table = Table(
            name, described.blocks, described.mode, self._new_updater(described),
            average=described.average, incarnation=self._incarnation,
        )  # fmt: skip
        return table

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answer until `ended`, which is called at least twice a second."""
        while not ended():
            received = self.listener.receive(LOOK_SECONDS)
            if received is not None:
                for answer in self.answer(*received):
                    self.listener.send(*answer)

    def answer(self, peer: bytes, message: Message) -> list[Answer]:
        """Return the answers to a message: some may be for other peers, which have waited."""
        handler = self._handlers.get(message.kind)
        if handler is None:
            return []
        try:
            answers = handler(peer, message)
            self._save(message.table)
            return answers
        except (ProtocolError, ValueError, KeyError, TypeError) as error:
            return [self._failed(peer, message, str(error))]

    def _save(self, name: str) -> None:
        """Make a snapshot of a table if one is due.

        Where each version is saved, it is on disk before anybody hears of the version: then a
        server that returns goes on as if nothing had been.
        """
        table = self.tables.get(name)
        if self._snapshots is None or table is None or not table.begun:
            return
        if table.version - self._saved.get(name, -self._every) < self._every:
            return
        self._saved[name] = table.version
        values, state, version, finished = table.copy()
        description = self._descriptions[name].body
        snapshot = Snapshot(name, description, version, finished, values, state)
        if self._every == 1:
            self._snapshots.write(snapshot)
        else:
            self._snapshots.write_soon(snapshot)

    def set_workers(self, workers: Collection[int]) -> None:
        """Take part with these workers from now on."""
        if self.workers != set(workers):
            self.workers = set(workers)
            for table in self.tables.values():
                for answer in table.look(self.workers):
                    self.listener.send(*answer)

    # -- requests

    def _start(self, peer: bytes, message: Message) -> list[Answer]:
        worker = int(message.body["worker"])
        self._worker_of[peer] = worker
        self.workers.add(worker)
        table = self.tables.get(message.table)
        if table is None:
            table = self._new_table(TableDescription(message.table, message.body["table"]))
        return table.start(peer, worker, message, self.workers)

    def _offer(self, peer: bytes, message: Message) -> list[Answer]:
        table, worker = self._known(peer, message)
        return [self._restarted(peer, message)] if table is None else table.offer(worker, message)

    def _push(self, peer: bytes, message: Message) -> list[Answer]:
        table, worker = self._known(peer, message)
        return (
            [self._restarted(peer, message)] if table is None else table.push(peer, worker, message)
        )

    def _pull(self, peer: bytes, message: Message) -> list[Answer]:
        table, worker = self._known(peer, message)
        return (
            [self._restarted(peer, message)] if table is None else table.pull(peer, worker, message)
        )

    def _leave(self, peer: bytes, message: Message) -> list[Answer]:
        worker = self._worker_of.pop(peer, None)
        answers = [Answer(peer, Message("done", message.request, message.table))]
        if worker is not None:
            self.workers.discard(worker)
            for table in self.tables.values():
                answers += table.leave(worker)
        return answers

    def _known(self, peer: bytes, message: Message) -> tuple[Table | None, int]:
        worker = self._worker_of.get(peer)
        if worker is None:
            return None, -1
        return self.tables.get(message.table), worker

    def _restarted(self, peer: bytes, message: Message) -> Answer:
        return Answer(
            peer, Message("restarted", message.request, message.table, 0, self._incarnation)
        )

    def _failed(self, peer: bytes, message: Message, why: str) -> Answer:
        body = {"why": why}
        return Answer(
            peer, Message("failed", message.request, message.table, 0, self._incarnation, body)
        )
