"""A server: keeps its share of the tables, and answers workers. One thread does all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.settings.logs import log
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import (
    REPLACES,
    SERVER,
    Answer,
    Message,
    answer_to,
    role_of,
    two_processes,
)
from hvdlite.ps.connections.records import OFF, Records
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_table import RowTable
from hvdlite.ps.tables.saved import SavedTable
from hvdlite.ps.tables.table import Table, TableFailedError, TableLostError
from hvdlite.ps.tables.updater import Updater

LOOK_SECONDS = 0.5
# The payloads of messages among whose answers some have priority, each with so much for its head.
MOST_BYTES_AT_ONCE, BYTES_OF_HEAD = 1 << 20, 1 << 14
# Requests that depend on who keeps what.
OF_LAYOUT = frozenset({"start", "offer", "push", "pull", "push_rows", "pull_rows", "save", "load"})


class Server:
    """The server behind a listener. `new_updater` makes what holds the values of a table."""

    def __init__(
        self, listener: Listener, new_updater: Callable[[TableDescription], Updater], *,
        incarnation: int, workers: Collection[int], snapshots: SnapshotFolder | None = None,
        snapshot_every: int = 0, records: Records = OFF,
        layout: int = 1, reached: Mapping[str, int] | None = None,
        loaded: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.listener = listener
        self.layout = layout  # Its version, by which requests for an older one are known.
        # Hears that a worker knows a later one.
        self.hear_of_layout: Callable[[int], None] = lambda _layout: None
        self.tables: dict[str, Table] = {}
        self.fresh: set[str] = set()  # Tables whose beginning or first update may be news.
        self.touched: set[str] = set()  # Of these, those of which there may be news now.
        self.workers = set(workers)  # That take part, as the scheduler says.
        self._new_updater = new_updater
        self._incarnation = incarnation
        self._snapshots, self._every = snapshots, snapshot_every
        self._reached = reached or {}  # The versions that tables had before this server has come.
        self.loaded = dict(loaded or {})  # Tables -> the turns of their last loads.
        self.load = 0  # The turn of the last load that all tables have.
        self.make_load: Callable[[], None] = lambda: None  # The one that counts, in a new table.
        self.records = records
        self._saved: dict[str, int] = {}  # The version of the newest snapshot.
        self._worker_of: dict[bytes, int] = {}
        self._tables_of: dict[int, set[str]] = {}  # Of workers that have said hello.
        self._early: set[int] = set()  # Who has started before the scheduler said that it is there.
        self._members: dict[bytes, int] = {}  # The workers that have said hello.
        self._replaced: dict[bytes, str] = {}  # Those before them -> what they hear.
        self.handlers: dict[str, Callable[[bytes, Message], list[Answer]]] = {
            "start": self._start, "offer": self._ask_table, "push": self._ask_table,
            "pull": self._ask_table, "push_rows": self._ask_table, "pull_rows": self._ask_table,
            "leave": self._leave, "beat": self._beat, "hello": self._hello,
        }  # fmt: skip
        if snapshots is not None:
            snapshots.keep_only(layout)
        for snapshot in snapshots.newest(layout) if snapshots else ():
            table = self._new_table(snapshot.described)
            table.restore(snapshot.saved)
            before = snapshots.before(snapshot) if snapshots else None
            if before is not None:
                table.remember(before.saved)
            self._saved[table.name] = table.version

    def _new_table(self, described: TableDescription) -> Table:
        name = described.name
        try:
            updater = self._new_updater(described)
        except ValueError:  # It says itself what does not fit.
            raise
        except Exception as error:
            log.error("the table '%s' cannot begin", name, exc_info=error)
            raise ValueError(f"the server cannot make its optimizer: {error!r}") from error
        self.fresh.add(name)
        self.touched.add(name)
        self.tables[name] = table = (RowTable if described.rows else Table)(
            described, updater, incarnation=self._incarnation
        )
        table.records, table.reached = self.records, self._reached.get(name, 0)
        table.load = self.loaded.get(name, 0)
        table.others = lambda: [w for w, own in self._tables_of.items() if name not in own]
        if self.listener.memory is not None:
            table.copy_of = self.listener.memory.copy
        return table

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answer until `ended`, which is called at least twice a second."""
        while not ended():
            # Values go last, those of the table that was declared first before those of others: it
            # has the layers with which the next step of a worker begins.
            values = []
            for answer in self._answers():
                if answer.message.kind == "values":
                    values.append(answer)
                else:
                    self.listener.send(*answer)
            for answer in sorted(values, key=self._first_key):
                self.listener.send(*answer)

    def _answers(self) -> Iterator[Answer]:
        """Yield the answers to messages that are here, few enough that none waits for long."""
        received = self.listener.receive(LOOK_SECONDS)
        if self._snapshots is not None:
            for name in self._snapshots.missing():
                self._save(name)
        left = MOST_BYTES_AT_ONCE
        while received is not None:
            yield from self.answer(*received)
            left -= BYTES_OF_HEAD + received[1].nbytes
            received = self.listener.receive(0) if left > 0 else None

    def _first_key(self, answer: Answer) -> int:
        table = self.tables.get(answer.message.table)
        return 0 if table is None else table.described.first_key

    def answer(self, peer: bytes, message: Message) -> list[Answer]:
        """Return the answers to a message: some may be for other peers, which have waited.

        Raises HorovodInternalError where a snapshot cannot be written, or a table is lost.
        """
        handler = self.handlers.get(message.kind)
        if handler is None:
            return []
        if why := self._replaced.get(peer):
            return [self._failed(peer, message, why)]
        if message.kind in OF_LAYOUT and message.layout != self.layout:
            self.hear_of_layout(message.layout)
        try:
            role = role_of(peer)
            if message.kind != "beat" and (role == SERVER) != (message.kind == "take"):
                raise ProtocolError(f"a {role} must not ask a server for {message.kind}")
            if message.kind in OF_LAYOUT and message.layout != self.layout:
                # Others keep the table, or this one will know of it soon: then it is sent again.
                is_early = message.layout > self.layout
                return [] if is_early else [answer_to(peer, message, "moved")]
            answers = handler(peer, message)
        except (ProtocolError, ValueError) as error:
            return [self._failed(peer, message, str(error))]
        except TableLostError:
            raise
        except Exception as error:  # A message must not end the server, whatever is in it.
            return [self._failed(peer, message, f"the request cannot be understood: {error!r}")]
        if message.table in self.fresh:
            self.touched.add(message.table)
        elif message.kind in ("hello", "leave"):
            self.touched |= self.fresh
        if message.kind in OF_LAYOUT:
            self._save(message.table)
        else:
            self._save_all()
        return answers

    def _hello(self, peer: bytes, message: Message) -> list[Answer]:
        """Welcome a worker, and say whether it is the process that it was before."""
        worker, body = int(message.body["worker"]), {"is_known": peer in self._members}
        for old in [each for each, other in self._members.items() if other == worker]:
            del self._members[old]
            if old != peer:  # A predecessor.
                self._worker_of.pop(old, None)
                self._replaced[old] = two_processes(f"worker {worker}", peer, old)
                self.listener.drop(old)
        self._members[peer] = worker
        welcome = Message("welcome", message.request, message.table, 0, self._incarnation, body)
        self._tables_of[worker] = {str(name) for name in message.body["tables"]}
        # What waits for this worker begins where it takes no part.
        tables = [table for table in self.tables.values() if not table.begun]
        begun = [answer for table in tables for answer in table.look(self.workers)]
        return [Answer(peer, welcome), *begun]

    def _save_all(self) -> None:
        for name in self.tables if self._snapshots is not None else ():
            self._save(name)

    def _save(self, name: str) -> None:
        """Make a snapshot of a table if one is due.

        Where each version is saved, it is on disk before anybody hears of the version: then a
        server that returns goes on as if nothing had been.
        """
        table = self.tables.get(name)
        if self._snapshots is None or table is None or not table.begun:
            return
        is_new = table.version - self._saved.get(name, -self._every) >= self._every
        if not is_new and name not in self._snapshots.missing():
            return
        try:
            saved = self.saved(name)
        except TableFailedError:  # The last snapshot stays.
            for answer in table.look(self.workers):
                self.listener.send(*answer)
            return
        self._saved[name] = table.version
        if self._every == 1:
            self._snapshots.write(saved)
        else:
            self._snapshots.write_soon(saved)

    def saved(self, name: str) -> SavedTable:
        """Return what is to be saved of a table. Raises `TableFailedError`."""
        return SavedTable(self.tables[name].described, self.tables[name].copy(), self.layout)

    def take_loaded(
        self, name: str, turn: int, values: Sequence[Array], state: Mapping[str, Array],
        version: int, clocks: Mapping[int, int],
    ) -> None:  # fmt: skip
        """Let a table have what was loaded, on disk, too, where it has snapshots."""
        table = self.tables[name]
        answers = table.take_loaded(values, state, turn, version, clocks, self.workers)
        try:
            table.check()  # Others have loaded it, and this server neither has it nor what it had.
            if self._snapshots is not None:
                # Before anybody hears of it. Workers have no newer version, and nobody is to go
                # back to one of before, as a server would that cannot write this one, and is lost
                # later.
                self._snapshots.write(self.saved(name), alone=True)
                self._saved[name] = table.version
        except (HorovodInternalError, TableFailedError) as error:
            raise TableLostError(str(error)) from error
        self.loaded[name] = turn
        for answer in answers:
            self.listener.send(*answer)

    # -- another number of servers

    def save_next(self, saved: SavedTable) -> None:
        """Save a table as it is in the next layout, where snapshots are made."""
        if self._snapshots is not None:
            self._snapshots.write(saved)

    def forget_next_snapshots(self) -> None:
        """Remove what `save_next` has saved: the next layout does not come."""
        if self._snapshots is not None:
            self._snapshots.keep_only(self.layout)

    def switch(self, layout: int, tables: Sequence[SavedTable]) -> None:
        for table in self.tables.values():
            for answer in table.moved():
                self.listener.send(*answer)
        self.tables.clear()
        self.fresh.clear()
        self.touched.clear()
        self._saved.clear()
        self.layout = layout
        if self._snapshots is not None:
            self._snapshots.keep_only(layout)
        for each in tables:
            self._new_table(each.described).adopt(each.saved)
            self._saved[each.described.name] = each.saved.version

    def set_workers(self, workers: Collection[int]) -> None:
        """Take part with these workers from now on, as the scheduler says."""
        self._early -= set(workers)
        if self.workers != {*workers, *self._early}:
            self.workers = {*workers, *self._early}
            self.touched |= self.fresh
            answers = [each for table in self.tables.values() for each in table.look(self.workers)]
            self._save_all()  # One that is lost may complete a step.
            for answer in answers:
                self.listener.send(*answer)

    # -- requests

    def _start(self, peer: bytes, message: Message) -> list[Answer]:
        worker = int(message.body["worker"])
        self._worker_of[peer] = worker
        if (own := self._tables_of.get(worker)) is not None:
            own.add(message.table)
        if worker not in self.workers:
            self._early.add(worker)
            self.workers.add(worker)
        table = self.tables.get(message.table)
        if table is None:
            table = self._new_table(TableDescription(message.table, message.body["table"]))
            self.make_load()
        elif (version := message.body.get("goes_back")) is not None and not table.has(version):
            # Another server has gone back to that version. Without a snapshot of it, this one goes
            # on with what it has.
            folder = self._snapshots
            snapshot = None if folder is None else folder.go_back(table.name, version, self.layout)
            if snapshot is not None:
                table = self._new_table(table.described)
                table.restore(snapshot.saved, goes_back=True)
                self._saved[table.name] = version
        return table.start(peer, worker, message, self.workers)

    def _ask_table(self, peer: bytes, message: Message) -> list[Answer]:
        """Let a table answer a worker that takes part in it."""
        worker = self._worker_of.get(peer)
        table = self.tables.get(message.table)
        if worker is None or table is None:
            words = "restarted", message.request, message.table, 0, self._incarnation
            return [Answer(peer, Message(*words))]
        if message.body.get(REPLACES):  # A snapshot that was made of other values is made again.
            self._saved.pop(message.table, None)
        kind = message.kind.removesuffix("_rows")
        ask = table.push if kind == "push" else table.pull if kind == "pull" else table.offer
        return ask(peer, worker, message)

    def _leave(self, peer: bytes, message: Message) -> list[Answer]:
        worker = self._worker_of.pop(peer, None)
        answers = [answer_to(peer, message, "done")]
        if worker is not None:
            self.workers.discard(worker)
            self._early.discard(worker)
            for table in self.tables.values():
                answers += table.leave(worker)
        return answers

    def _beat(self, peer: bytes, message: Message) -> list[Answer]:
        return [Answer(peer, Message("beat", message.request, "", 0, self._incarnation))]

    def _failed(self, peer: bytes, message: Message, why: str) -> Answer:
        words = "failed", message.request, message.table, 0, self._incarnation
        return Answer(peer, Message(*words, {"why": why}))
