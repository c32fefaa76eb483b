"""A worker's view of one table on one server: what it has sent and pulled, and can send again.

A step is a push, then a pull with the next clock. Its push is kept until its pull is answered: a
server that is lost in between has perhaps lost the push, too.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.settings.logs import log
from hvdlite.ps.connections.messages import LASTS, REPLACES, Buffer, Message, ignore
from hvdlite.ps.connections.records import OFF
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.worker.early_sender import Rest
from hvdlite.ps.worker.ordered_operations import MovedError, OrderedOperations


class PsRolledBack(HorovodInternalError):  # noqa: N818 - the name that users of other servers know
    """A server has lost steps that no worker can make good. Go on from the step `version`.

    It is a number of `finished_steps`, which do not have those that were made before a load.
    """

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message, job_goes_on=True)
        self.version = version


@dataclass
class _Request:
    message: Message
    done: Callable[[Message | Exception], None]


class Shard:
    """A table on a server. `send` sends a message under an id that it gives to it."""

    def __init__(
        self, table: str, server: int, worker: int, description: Mapping[str, Any],
        values: Callable[[], Sequence[Buffer]], send: Callable[[Message], int], kinds: str = "",
        layout: int = 1,
    ) -> None:  # fmt: skip
        self._kinds = kinds  # "_rows" where it is a table of rows.
        self.table, self.server, self._worker = table, server, worker
        self._peer = f"server {server}"
        self.version = -1  # Of the last values that were pulled.
        self.load = 0  # The last load that they have.
        self._reached = 0  # The highest version that the server has told of.
        self.clock = 0  # Of the next step.
        # The clock that the server has given first, or had when another one lost steps. Steps
        # before it are made again, and the server that has them must not let them count twice.
        self._first_clock = 0
        self._stands = False  # At its clock, which is that of the other servers.
        self.operations = OrderedOperations()  # Pushes and pulls of which nobody awaits each.
        self.layout = layout  # Its version, in which the server is to know the table.
        self._description = dict(description)
        self._first_values = values
        self.pulled: Sequence[Buffer] | None = None
        self._send = send
        self.is_used = False  # Whether this worker has asked to take part.
        self._started = False
        self._on_start: Callable[[Message | Exception], None] | None = None
        self._push: _Request | None = None
        self._pull: _Request | None = None
        self._ids: dict[int, str] = {}  # Of requests that are under way -> "push" or "pull".
        self._numbers: Any = None  # Hyperparameters that a server which forgot them must hear.
        self._extra: dict[str, Any] = {}  # What the next `start` says besides.
        self._error: Exception | None = None  # Why the server is lost for good.
        self.records = OFF
        # The step whose pushes to former servers were not answered, and who waits for that.
        self._unconfirmed: tuple[int, Sequence[Callable[[Message | Exception], None]]] | None = None
        self.on_rollback: Callable[[PsRolledBack], None] = ignore
        # See [Note: first values]: the worker whose values all servers take; whose this one has;
        # what is to be done when a server wants this worker's, and has taken them.
        self.first: int | None = None
        self._of: int | None = None
        self.on_wanted: Callable[[Shard], None] = Shard.offer
        self._on_replaced: Callable[[], None] | None = None

    # -- what the worker asks for

    def start(self, done: Callable[[Message | Exception], None], enters: int | None = None) -> None:
        """Take part; `done` gets the clock at which this worker goes on.

        It `enters` at a step that is a later one than the server has given.
        """
        if enters is not None:
            self._extra = {"enters": enters}
        self._on_start, self.is_used = done, True
        if self._error is None:
            self._say_start()
        else:
            self._fail_all(self._error)

    def stand_at(self, clock: int) -> None:
        """Go on at a step, when all servers have said at which this worker takes part."""
        self.clock, self._stands = clock, True

    def push(
        self, body: Mapping[str, Any], payloads: Sequence[Buffer],
        done: Callable[[Message | Exception], None], rest: Rest | None = None,
    ) -> None:  # fmt: skip
        """Push the gradients of the next step; `payloads` must not change until its pull ends.

        `rest` is what is left of them where pieces have been sent.
        """
        kind = f"push{self._kinds}"
        message = Message(kind, 0, self.table, self.clock, self.layout, body, payloads)
        self._numbers = body.get("numbers") or self._numbers
        self.clock += 1
        self._displace("push")
        self._push = _Request(message, done)
        self.records.begin("push", self.table, self._peer)
        if rest is not None and self._started and self._error is None:
            about, left = rest
            self._note("push", message._replace(body={**body, **about}, payloads=left))
        else:
            self._send_again("push")

    def push_piece(self, body: Mapping[str, Any], payload: Buffer) -> None:
        """Send a piece of the next push; nobody waits for the answer."""
        if self._started and self._error is None:
            words = f"push{self._kinds}", 0, self.table, self.clock, self.layout
            self._send(Message(*words, body, [payload]))

    def pull(
        self, done: Callable[[Message | Exception], None], payloads: Sequence[Buffer] = ()
    ) -> None:
        """Pull the values that the next step needs; of rows, `payloads` has their ids."""
        kind = f"pull{self._kinds}"
        message = Message(kind, 0, self.table, self.clock, self.layout, {}, payloads)
        self._displace("pull")
        self._pull = _Request(message, done)
        self.records.begin("pull", self.table, self._peer)
        self._send_again("pull")

    def drop_pulls(self, error: Exception) -> None:
        """Fail the pulls of which nobody needs the values, before those that push behind them."""
        self.operations.drop_pulls(error)
        self._forget_ids("pull")
        self._end("pull", error)

    def come_again(self) -> None:
        """Start anew at a server that does not know this worker."""
        self._started = False
        if self.is_used:
            self._say_start()

    @property
    def known_clock(self) -> int:
        """The next step of this worker as the server knows it, which may be a later one."""
        return max(self.clock, self._first_clock)

    def take_over(
        self, other: Shard, known: int, version: int, load: int, pulled: Sequence[Buffer] | None
    ) -> None:
        """Stand where `other` is, which is a shard of an older layout, with the values `pulled`.

        Servers know the steps before `known`.
        """
        self.stand_at(other.clock)
        self._first_clock = known
        self._numbers, self.is_used = other._numbers, True
        self.version, self.pulled = (version, pulled) if pulled is not None else (-1, None)
        self.load = load

    def retire(self) -> Sequence[Callable[[Message | Exception], None]]:
        """End what waits here: pulls are to be made anew. Return who waits for a push.

        Servers that change have all pushes of the workers that take part in it.
        """
        self._ids.clear()
        self._error = MovedError()
        self.is_used = False
        first, self._on_start = self._on_start, None
        if first is not None:
            first(MovedError())
        pushed = [] if self._unconfirmed is None else [*self._unconfirmed[1]]
        if self._push is not None and self._push.done is not ignore:
            pushed.append(self._push.done)
            self._push.done = ignore
        self._end("pull", MovedError())
        return pushed

    def confirm(self, pushed: Sequence[Callable[[Message | Exception], None]]) -> None:
        """Tell those that wait for the last push whether the server has it, when it says so."""
        self._unconfirmed = self.clock - 1, pushed

    def offer(self) -> None:
        """Give first values to a server that wants them."""
        self._offer(self._first_values(), {})

    @property
    def has_others_values(self) -> bool:
        """Whether the server has begun with the first values of another worker."""
        begun = self._started and self.version == -1
        return begun and self._of is not None and self._of != self._worker

    def replace_first(self, done: Callable[[], None]) -> None:
        """Give first values to a server that has others; then call `done`."""
        self._on_replaced = done
        self._offer(self._first_values(), {REPLACES: True})

    @property
    def retired(self) -> bool:
        """Whether a shard of a later layout has taken its place."""
        return isinstance(self._error, MovedError)

    @property
    def failed(self) -> bool:
        """Whether the server, or the table on it, is lost for good."""
        return self._error is not None

    def raise_if_failed(self) -> None:
        """Raise why the server, or the table on it, is lost for good."""
        if self._error is not None:
            raise self._error

    @property
    def waits(self) -> bool:
        pushes = self._push is not None and self._push.done is not ignore
        return pushes or self._pull is not None or self._on_start is not None

    def go_back(self, error: PsRolledBack) -> None:
        """Go back to the step that another server has lost; what waits here fails with `error`."""
        if error.version < self.clock:
            self._first_clock = max(self._first_clock, self.clock)
            self.stand_at(error.version)
            self.pulled, self.version = None, -1
            self._extra = {"goes_back": error.version}
            self._fail_all(error)
            self.come_again()

    def fail(self, error: Exception) -> None:
        if self.retired:
            return
        self._error = error
        self._fail_all(error)

    # -- what the server answers

    def receive(self, message: Message) -> None:
        """Take an answer; one to a request that was answered is dropped."""
        kind = self._ids.pop(message.request, "")
        if not kind:
            return
        if kind == "start" and (message.kind != "moved" or self._on_start is not None):
            self._receive_start(message)
        elif message.kind == "moved":
            pass  # The worker hears of the layout from the scheduler, and retires this shard.
        elif message.kind == "restarted":
            if self._started:
                self._started = False
                self._say_start()
        elif message.kind == "failed" and message.body.get(LASTS):
            self.fail(HorovodInternalError(self._words(message)))
        elif message.kind == "failed":
            error = HorovodInternalError(self._words(message))
            behind = self._pull
            self._end(kind, error)  # What waits for its turn may begin in this.
            # A pull behind a push waits at the server until this has come.
            if kind == "push" and self._pull is behind:
                self._end("pull", error)
        else:
            self._reached = max(self._reached, message.clock)
            if self.records.enabled:
                self._record(kind, message)
            if message.kind == "values":
                self.pulled, self.version = message.payloads, message.clock
                self.load = message.body.get("load", 0)
                if self._push is not None and self._push.message.clock < self.clock:
                    push, self._push = self._push, None  # Another one may begin in this.
                    done, push.done = push.done, ignore
                    done(message)
            self._end(kind, message)

    def _receive_start(self, message: Message) -> None:
        replaced, self._on_replaced = self._on_replaced, None
        if replaced is not None:
            replaced()
        if message.kind == "wanted":
            if self.pulled is None:
                self.on_wanted(self)
            else:
                self._offer(self.pulled, {})
        elif message.kind == "started" or (
            # What the server has lost this worker makes again anyway: it stands there no more.
            message.kind == "rolled_back" and message.clock >= self.clock
        ):
            self._started = True
            self._extra = {}
            self._of = message.body.get("of")
            self._tell_of_loss(message.clock)
            self._take_clock(message)
            self._confirm(message.body["clock"])
            for word in ("push", "pull"):
                self._send_again(word)
        elif message.kind == "restarted":  # The table has begun, or awaits another's values.
            self._say_start()
        elif message.kind == "rolled_back":
            self._started = True
            self._extra = {}
            why = (
                f"server {self.server} goes on from step {message.clock}, and this worker "
                f"has finished {self.clock}: no snapshot and no worker has what came between. Go "
                "on from that step"
            )
            self.clock = message.clock
            self.pulled, self.version = None, -1
            error = PsRolledBack(why, message.clock)
            self.on_rollback(error)  # Before anybody hears of it, who then forgets it.
            self._fail_all(error)
        elif message.kind == "failed":
            self.fail(HorovodInternalError(self._words(message)))
        elif message.kind == "moved":
            self._fail_all(MovedError())

    def _tell_of_loss(self, version: int) -> None:
        """Say which updates a server that was lost has forgotten; in sync all make them again."""
        had, self._reached = self._reached, version
        if version < had and self._description["mode"] != SYNC:
            log.warning(
                f"the table '{self.table}' goes on from version {version} on server {self.server}, "
                f"and had {had}: the server was lost, and with it the updates in between, but the "
                "pushes that workers send again. With --ps-snapshot and --ps-snapshot-every 1 it "
                "loses nothing"
            )

    def _take_clock(self, message: Message) -> None:
        clock: int = message.body["clock"]
        first, self._on_start = self._on_start, None
        if first is not None or not self._stands:
            self.clock = self._first_clock = clock
            if first is not None:
                first(message)
        elif clock > self._first_clock:
            # The others have gone on without this worker, where its clock is a later one.
            self.clock = max(self.clock, clock)

    def _confirm(self, clock: int) -> None:
        if self._unconfirmed is not None and clock > self._unconfirmed[0]:
            self._end_unconfirmed(Message("pushed", table=self.table))
        elif self._unconfirmed is not None:
            why = (
                f"worker {self._worker} was silent for so long that the servers changed without "
                f"it: its push of step {self._unconfirmed[0]} of the table '{self.table}' is lost. "
                "Start it again"
            )
            self.fail(HorovodInternalError(why))

    def _end_unconfirmed(self, result: Message | Exception) -> None:
        if self._unconfirmed is not None:
            (_, waiting), self._unconfirmed = self._unconfirmed, None
            for pushed in waiting:
                pushed(result)

    # -- parts

    def _record(self, kind: str, message: Message) -> None:
        request = self._push if kind == "push" else self._pull
        if request is None:
            return
        self.records.end(
            kind, self.table, self._peer, version=message.clock, clock=request.message.clock,
            stale=message.body.get("stale"),
            nbytes=(request.message if kind == "push" else message).nbytes,
        )  # fmt: skip

    def _offer(self, values: Sequence[Buffer], body: Mapping[str, Any]) -> None:
        self._note("start", Message("offer", 0, self.table, 0, self.layout, body, values))

    def _say_start(self) -> None:
        body: dict[str, Any] = {
            "worker": self._worker, "table": self._description, "version": self.version,
            "numbers": self._numbers, "first": self.first,
            "load": self.load if self.version >= 0 else 0, **self._extra,
        }  # fmt: skip
        if self._stands:  # Else the server tells: a load may have undone what it had said before.
            own = self.clock if self._push is None else self._push.message.clock
            body["clock"] = own if self._unconfirmed is None else self._unconfirmed[0]
        self._ids.clear()
        self._note("start", Message("start", 0, self.table, 0, self.layout, body))

    def _send_again(self, word: str) -> None:
        request = self._push if word == "push" else self._pull
        if request is None:
            return
        if self._error is not None:
            self._end(word, self._error)
        elif self._started:
            self._note(word, request.message)

    def _note(self, word: str, message: Message) -> None:
        self._ids[self._send(message)] = word

    def _end(self, word: str, result: Message | Exception) -> None:
        request = self._push if word == "push" else self._pull
        if word == "pull":
            self._pull = None
        if request is not None:
            done, request.done = request.done, ignore
            done(result)

    def _displace(self, word: str) -> None:
        """Fail a request whose place another one takes: answers to it are dropped from now on."""
        self._forget_ids(word)
        request = self._push if word == "push" else self._pull
        if request is None or request.done is ignore:
            return
        why = (
            f"worker {self._worker} has begun another {word} of the table '{self.table}' before "
            "this one was answered: let one thread at a time use an optimizer"
        )
        self._end(word, HorovodInternalError(why, job_goes_on=True))

    def _forget_ids(self, word: str) -> None:
        """Take note of no answer to what is under way of a kind."""
        self._ids = {number: other for number, other in self._ids.items() if other != word}

    def _fail_all(self, error: Exception) -> None:
        self._on_replaced = None
        first, self._on_start = self._on_start, None
        if first is not None:
            first(error)
        for word in ("push", "pull"):
            self._forget_ids(word)
            self._end(word, error)
        self._end_unconfirmed(error)
        self._push = None

    def _words(self, message: Message) -> str:
        return f"server {self.server}, table '{self.table}': {message.body.get('why', '?')}"
