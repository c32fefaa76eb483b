"""A worker of a cluster: its tables, which lie on the servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.current import find as find_runtime
from hvdlite.common.runtime.current import this_process
from hvdlite.common.settings.logs import log
from hvdlite.ps.cluster.enrolment import Enrolment
from hvdlite.ps.cluster.settings import ANSWER_SECONDS, ClusterSettings, check_token
from hvdlite.ps.connections import system
from hvdlite.ps.connections.client import Client, name_of
from hvdlite.ps.connections.messages import WORKER, Message
from hvdlite.ps.connections.records import Records
from hvdlite.ps.layouts.blocks import Array, TensorSpec, specs_of_words
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.worker.layout_follower import LayoutFollower
from hvdlite.ps.worker.ordered_operations import MovedError
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.server_link import ServerLink
from hvdlite.ps.worker.table_shards import TableShards

WATCH_SECONDS = 2.0
LEAVE_SECONDS = 5.0  # For which a worker that leaves waits for its servers' answers.

AnyTable = TypeVar("AnyTable", RemoteTable, RemoteRows)


class Worker:
    """A worker. Raises ConfigError where the cluster does not let it in."""

    def __init__(
        self, settings: ClusterSettings, *, number: int | None = None,
    ) -> None:  # fmt: skip
        check_token(settings)
        self._client = Client(
            name_of(WORKER, settings.node_id or str(number)),
            settings.token,
            encrypted=settings.tls,
        )
        self._servers: dict[int, ServerLink] = {}
        self._silence_seconds = settings.server_seconds
        self.failure = ""
        self._enrolment = Enrolment(self._client, settings, number=number, changed=self._change)
        enrolment = self._enrolment
        self._follower = LayoutFollower(enrolment.request, enrolment.tell, lambda: self.number)
        enrolment.standing = self._follower.standing
        try:
            self._enrolment.enter(settings.start_seconds + ANSWER_SECONDS)
        except BaseException:
            self._client.close()
            raise
        self._client.on_failure = self._fail
        self._client.every(WATCH_SECONDS, self._watch)
        rank = None if settings.independent else find_runtime()
        self._client.records = Records.by_settings(
            os.environ, WORKER, self.number, None if rank is None else rank.timeline
        )
        if rank is not None:
            this_process.server_counts = self._client.records.counts
        self._barriers = 0  # That this process has come to.
        self.loads = 0  # How many times the tables were loaded.
        self.named: dict[str, RemoteTable | RemoteRows] = {}  # The tables of this worker.
        self._has_optimizer = False

    @property
    def number(self) -> int:
        assert self._enrolment.number is not None
        return self._enrolment.number

    def _change(self, body: Mapping[str, Any]) -> None:
        """Follow the servers to their addresses, in the client."""
        if self._enrolment.number is None:
            return  # The welcome, which comes later, says the same.
        for number, address, _incarnation in body["servers"]:
            if number not in self._servers:
                link = ServerLink(self._client, number, lambda: self.number)
                self._servers[number] = link
            self._servers[number].follow(address)
        self._follower.hear(body)
        there = {number for number, _, _ in body["servers"]}
        for number in [each for each in self._servers if each not in there]:
            if number >= body["layout_servers"] and not self._servers[number].is_used:
                gone = self._servers.pop(number)
                gone.fail(MovedError())  # A phase of a save, whose servers are others now.
                gone.close()
        if body["failure"]:
            self._fail(HorovodInternalError(body["failure"]))

    def _fail(self, error: Exception) -> None:
        """Fail all that waits for servers or the scheduler, or will."""
        self.failure = str(error)
        for link in self._servers.values():
            link.fail(error)
        self._enrolment.fail_requests(self.failure)

    def _watch(self) -> None:
        now = self._client.now()
        for link in self._servers.values():
            link.watch(now, self._silence_seconds)

    def declare(
        self, name: str, specs: Sequence[TensorSpec], options: TableOptions,
        values: Callable[[], Sequence[Array]], form: type[RemoteTable] | None = None,
    ) -> RemoteTable:  # fmt: skip
        """Return a table that all workers declare alike. `values` gives flat tensors to begin with.

        Raises `HorovodInternalError` where workers disagree.
        """
        make = partial(form or RemoteTable, specs=specs, values=values)
        return self._declare(make, name, specs, options)

    def begin_optimizer(self) -> None:
        """Take note that this worker makes its optimizer. Raises ValueError for a second one.

        Servers stay where the script makes the first, and would step over the parameters of another
        with that; tables of equal names would be one.
        """
        if self._has_optimizer:
            raise ValueError(
                "this worker has a ps.DistributedOptimizer already, and servers know no other than "
                "the first of a script: put all parameters into one, by groups where they differ, "
                "or let some go by allreduce, with an optimizer of their own"
            )
        self._has_optimizer = True

    def announce(self, tables: Mapping[str, Sequence[TensorSpec]], options: TableOptions) -> None:
        """Let the scheduler write many tables down at once, which are to be declared next.

        Else each of them waits for its disk.
        """
        asked = [_declaration(name, specs, options) for name, specs in tables.items()]
        request = self._enrolment.request
        for handle in [self._client.ask(partial(request, message)) for message in asked]:
            handle.wait()  # What is refused is so again, when it is declared.

    def declare_rows(self, spec: TensorSpec, options: TableOptions) -> RemoteRows:
        """Return a table of rows that all workers declare alike; its name is that of `spec`.

        Raises `HorovodInternalError` where workers disagree.
        """
        return self._declare(partial(RemoteRows, spec=spec), spec.name, [spec], options)

    def find(self, name: str) -> tuple[list[TensorSpec], TableOptions] | None:
        """Return what other workers have declared a table to be; None where nobody has."""
        body = self.ask(Message("declare", 0, name)).body
        if not body["specs"]:
            return None
        return specs_of_words(body["specs"]), TableOptions(*body["options"])

    def _declare(
        self, make: Callable[..., AnyTable], name: str, specs: Sequence[TensorSpec],
        options: TableOptions,
    ) -> AnyTable:  # fmt: skip
        """Return a table that is where the scheduler says, and follows it wherever it goes."""
        declaration = _declaration(name, specs, options)
        while True:
            answer = self.ask(declaration)
            try:
                table = make(
                    answer, options=options, client=self._client, links=self._links,
                    worker=self.number, declaration=declaration,
                )  # fmt: skip
            except MovedError:
                continue
            if self._client.ask(partial(self._add, table)).wait().kind == "done":
                self.named[name] = table
                return table

    def _add(self, table: TableShards, done: Callable[[Message | Exception], None]) -> None:
        done(Message("done" if self._follower.add(table) else "moved"))

    def _links(self, servers: int) -> list[ServerLink]:
        return [self._servers[number] for number in range(servers)]

    def scale_servers(self, servers: int) -> None:
        """Let the cluster have fewer servers: those with the highest numbers end.

        Returns when the scheduler has taken note of it. Raises `HorovodInternalError` for a number
        that is not lower than the present one; a server that is started with HVDLITE_PS_JOIN=1 is
        one more.
        """
        self.ask(Message("scale", body={"servers": servers}))

    def barrier(self) -> None:
        """Wait until all workers have come here."""
        self._barriers += 1
        self.ask(Message("barrier", body={"count": self._barriers}))

    def ask(self, message: Message) -> Message:
        """Return the scheduler's answer. Raises `HorovodInternalError` where it refuses."""
        while True:
            handle = self._client.ask(lambda done: self._enrolment.request(message, done))
            answer: Message = handle.wait()
            if answer.kind == "failed":
                raise HorovodInternalError(answer.body["why"], job_goes_on=not self.failure)
            if answer.kind != "restarted":  # Else the scheduler has to hear of this worker first.
                return answer

    def ask_servers(self, servers: int, message: Message) -> list[Message]:
        """Return what servers answer, beginning with server 0. Raises where one is lost for good.

        Raises `MovedError` where the cluster has fewer servers.
        """
        if any(number not in self._servers for number in range(servers)):
            raise MovedError()
        links = self._links(servers)
        handles = [self._client.ask(partial(link.ask, message)) for link in links]
        return [handle.wait() for handle in handles]

    def leave(self) -> None:
        """Let the others go on without this worker, and end its connections.

        Waits until servers have what was pushed; what they will never have is warned of.
        """
        tables = [*self.named.values()]
        for table in tables:  # Others may wait for this worker before they push what a pull needs.
            why = "this worker leaves its cluster: wait for what is pulled before that"
            table.drop_pulls(HorovodInternalError(why))
        for table in tables:
            if lost := table.finish_pushes():
                log.warning(
                    f"worker {self.number} leaves, and {len(lost)} of its pushes to the table "
                    f"'{table.name}' are lost: {lost[0]}"
                )
        for table in [each for each in self.named.values() if each.is_half_pushed]:
            log.warning(
                f"worker {self.number} leaves, and some servers have its push of step "
                f"{table.clock} of the table '{table.name}', which others have not: the parts of "
                "the table differ by it. A worker that has come again is to make that step again"
            )
        servers = [each for each in [*self._servers.values()] if each.is_used]
        end = system.now() + LEAVE_SECONDS  # For all of them: more than one may be lost.
        for handle in [self._client.ask(server.leave) for server in servers]:
            handle.ended_within(max(0.0, end - system.now()))
        self._enrolment.leave()
        self.close()

    def close(self) -> None:
        """End the connections without a word."""
        self._client.close()
        self._client.records.close()


def _declaration(name: str, specs: Sequence[TensorSpec], options: TableOptions) -> Message:
    return Message("declare", 0, name, body={"specs": [*specs], "options": list(options)})
