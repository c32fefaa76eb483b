"""The part of a server in a change of the number of servers: what it sends, and what it takes.

`Migration` hears of the change from the scheduler (see `Change`). It sends parts of tables to
other servers in the client's thread, again until they are taken. The server switches to the next
layout when the scheduler says that it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.cluster.enrolment import Enrolment
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import SERVER, Answer, Message, answer_to, ignore
from hvdlite.ps.layouts.layout import Layout
from hvdlite.ps.scheduler.registry import is_change_awaited
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.saved import SavedTable, join
from hvdlite.ps.tables.table import Saved, TableFailedError


class Migration:
    """Follows the changes of the number of servers, in the thread of the server."""

    def __init__(self, server: Server, number: int, client: Client, enrolment: Enrolment) -> None:
        self._server, self._number = server, number
        self._client, self._request = client, enrolment.request
        self._tell, enrolment.standing = enrolment.tell, self.standing
        self._identity = 0
        self._names: list[str] = []  # Of all tables.
        self._plan: Layout | None = None  # The next one, which this server has heard of.
        self._takes: dict[int, dict[tuple[str, int], SavedTable]] = {}  # Of each change.
        self._deliveries: dict[str, _Delivery] = {}  # By address.
        self._staged: list[SavedTable] | None = None
        self._has_told = False  # It has told the scheduler what it has, for the border.
        self._is_awaited = False  # A change waits until all have begun their tables.
        # What the scheduler has been told: the layout, and tables that have begun.
        self._told_layout, self._told = 0, set[str]()
        server.handlers["take"] = self._take
        server.hear_of_layout = self.switch_early

    def look(self, news: Mapping[str, Any]) -> None:
        """Do what can be done, as the scheduler's latest news say."""
        if news.get("layout", 0) > self._server.layout:
            self._switch(news["layout"])
        was_awaited, self._is_awaited = self._is_awaited, is_change_awaited(news)
        if self._is_awaited and not was_awaited:
            self._client.call(self._tell)
        self._tell_news()
        change = news.get("change")
        if change is None:
            self._begin(0)
            return
        if change["identity"] != self._identity:
            self._begin(change["identity"])
        if change["is_quiet"] and not self._has_told and self._number < change["old_servers"]:
            # No push is under way: it says which steps of each table are here.
            self._has_told = True
            tables = [
                [name, table.version, sorted(table.clocks.finished.items())]
                for name, table in self._server.tables.items()
            ]
            self._ask_scheduler("stand", tables=tables)
        if self._plan is None or change["borders"] is None or self._staged is not None:
            return
        if self._number < change["old_servers"]:
            self._send_tables(self._plan, change["borders"], news["servers"])
        coming = self._takes.setdefault(self._identity, {})
        # A server that goes takes nothing, and has only to send all.
        goes = self._number >= change["servers"]
        sources = [self._number] if goes else range(change["old_servers"])
        if all((name, source) in coming for name in self._names for source in sources):
            self._stage(self._plan, range(change["old_servers"]))

    def _tell_news(self) -> None:
        """Tell the scheduler of first updates, of the layout, and of tables where it awaits them.

        Else the next beat says which have begun: each names all tables.
        """
        server, is_other = self._server, self._server.layout != self._told_layout
        if not server.touched and not is_other:
            return
        touched, server.touched = server.touched, set()
        begun = {name for name in touched if server.tables[name].begun}
        updated = {name for name in begun if server.tables[name].version}
        server.fresh -= updated
        if is_other or updated or (self._is_awaited and begun != self._told & touched):
            self._client.call(self._tell)
        self._told_layout, self._told = server.layout, (self._told - touched) | begun

    def standing(self) -> dict[str, Any]:
        """Return the layout and the last load of this server, and the versions of its tables."""
        tables = [*self._server.tables.items()]
        # One that has failed moves nowhere, and no change begins without it.
        begun = {name: each.version for name, each in tables if each.begun and not each.failure}
        return {"layout": self._server.layout, "tables": begun, "load": self._server.load}

    def switch_early(self, layout: int) -> None:
        """Switch where a worker has heard before this server that the next layout counts."""
        if self._staged is not None and layout == self._server.layout + 1:
            self._switch(layout)

    def _switch(self, layout: int) -> None:
        """Keep what was put together, and nothing else any more.

        Raises HorovodInternalError where the layout counts without that this server was ready.
        """
        if self._staged is None and self._server.tables:
            versions = {name: table.version for name, table in self._server.tables.items()}
            raise HorovodInternalError(
                f"server {self._number} has the tables {versions} in layout {self._server.layout}, "
                f"and layout {layout} counts, for which it was not ready: go on from a checkpoint"
            )
        self._server.switch(layout, self._staged or ())
        self._begin(0)

    # -- parts

    def _begin(self, identity: int) -> None:
        """Take part in a change, or in none; forget the one before."""
        if identity == self._identity:
            return
        self._identity, self._plan, self._has_told = identity, None, False
        if self._staged is not None:
            self._staged = None
            self._server.forget_next_snapshots()
        for delivery in self._deliveries.values():
            self._client.call(delivery.close)
        self._deliveries = {}
        self._takes = {other: takes for other, takes in self._takes.items() if other >= identity}
        if identity:
            self._ask_scheduler("plan", self._hear_plan)

    def _ask_scheduler(
        self, kind: str, done: Callable[[Message], None] = ignore, **body: Any
    ) -> None:
        message = Message(kind, body={"change": self._identity, **body})
        self._client.call(lambda: self._request(message, done))

    def _hear_plan(self, message: Message) -> None:
        """Note what is to be done, in the client; the server's thread looks at it later."""
        if message.kind == "plan":
            self._names = message.body["tables"]
            self._server.loaded.update(message.body["loaded"])
            self._plan = Layout.of(message.body["parts"], message.body["servers"])

    def _send_tables(
        self, layout: Layout, borders: Mapping[str, Any], servers: Sequence[Sequence[Any]]
    ) -> None:
        """Send all that others keep of tables whose border is reached."""
        coming = self._takes.setdefault(self._identity, {})
        for name in self._names:
            if (name, self._number) not in coming and self._at_border(name, borders):
                try:
                    coming[name, self._number] = own = self._server.saved(name)
                except TableFailedError:
                    continue
                for number, address, _ in servers:
                    if number != self._number and number < layout.num_servers:
                        self._send(own.cut_for(own.described.for_server(layout, number)), address)

    def _at_border(self, name: str, borders: Mapping[str, Sequence[tuple[int, int]]]) -> bool:
        border = dict(borders.get(name, ()))
        table = self._server.tables.get(name)
        if table is None or not table.begun or table.failure:
            return False
        clocks = table.clocks
        if border and clocks.mode.name == SYNC and table.version != max(border.values()):
            return False
        return all(clocks.finished.get(worker) == step for worker, step in border.items())

    def _send(self, share: SavedTable, address: str) -> None:
        about, arrays = share.pack()
        body = {"change": self._identity, "source": self._number, "about": about}
        raw = [memoryview(array.reshape(-1).view("u1").data) for array in arrays]
        message = Message("take", 0, share.described.name, body=body, payloads=raw)
        if address not in self._deliveries:
            self._deliveries[address] = _Delivery(self._client, address)
        delivery = self._deliveries[address]
        self._client.call(lambda: delivery.send(message))

    def _take(self, peer: bytes, message: Message) -> list[Answer]:
        body = message.body
        saved = SavedTable.unpack(body["about"], message.payloads)
        place = (message.table, int(body["source"]))
        self._takes.setdefault(int(body["change"]), {})[place] = saved
        return [answer_to(peer, message, "taken")]

    def _stage(self, layout: Layout, sources: range) -> None:
        """Put the next tables together, save them, and tell the scheduler."""
        self._staged = []
        takes = self._takes[self._identity]
        if self._number < layout.num_servers:
            for name in self._names:
                shares = [takes[name, number] for number in sources]
                self._staged.append(self._next_table(layout, shares))
        for saved in self._staged:
            self._server.save_next(saved)
        self._ask_scheduler("ready")

    def _next_table(self, layout: Layout, sources: Sequence[SavedTable]) -> SavedTable:
        # What a server has itself counts before what others say.
        own = sources[self._number : self._number + 1]
        ordered = [*own, *sources[: self._number], *sources[self._number + 1 :]]
        described = ordered[0].described.for_server(layout, self._number)
        values, state = join(described, ordered)
        finished: dict[int, int] = {}
        for source in ordered:
            for worker, clock in source.saved.finished.items():
                finished[worker] = max(clock, finished.get(worker, 0))
        versions = [source.saved.version for source in ordered]
        version = versions[0] if own else max(versions)
        numbers = next((source.saved.numbers for source in ordered if source.saved.numbers), [])
        saved = Saved(values, state, version, finished, numbers)
        return SavedTable(described, saved, self._server.layout + 1)


class _Delivery:
    """A connection with another server. Its methods are called in the client's thread."""

    def __init__(self, client: Client, address: str) -> None:
        self._client, self._address = client, address
        self._connection: Connection | None = None

    def send(self, message: Message) -> None:
        """Send a message until it is taken."""
        if self._connection is None:
            self._connection = self._client.connect(self._address, SERVER)
        self._connection.send(message)

    def close(self) -> None:
        """Send nothing any more."""
        if self._connection is not None:
            self._client.disconnect(self._connection)
