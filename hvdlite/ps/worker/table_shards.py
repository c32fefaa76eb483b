"""The shards of one table on all servers, which a worker keeps at the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.handles import Handle
from hvdlite.ps.connections import system
from hvdlite.ps.connections.client import Client, Plan
from hvdlite.ps.connections.messages import Buffer, Message
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.worker.ordered_operations import Begin, Done, MovedError
from hvdlite.ps.worker.server_link import ServerLink
from hvdlite.ps.worker.shard import PsRolledBack, Shard

LOOK_SECONDS = 0.2  # How often a thread that is held back looks whether a server is lost.
MOST_SKEW = 2  # How far the clocks of tables may be apart where steps are made again.


class Gate:
    """Holds the pushes of a table back while servers come or go.

    `clock` says the next step, where all pushes are answered.
    """

    def __init__(self, clock: Callable[[], int], failed: Callable[[], bool]) -> None:
        self._clock, self._failed = clock, failed
        self._changed = system.Condition()
        self._unanswered: set[object] = set()
        self._step = -1  # Of the push that has passed last.
        self._border: int | None = None  # The first step that may not pass; None: all may.
        self._on_quiet: Callable[[int], None] | None = None

    def let_pass(self, push: object) -> None:
        """Wait until the next push may be sent, to all servers; `push` stands for it from then on.

        It is let pass, too, where it can only fail.
        """
        with self._changed:
            while self._border is not None and self._next() >= self._border and not self._failed():
                self._changed.wait(LOOK_SECONDS)
            self._step = self._next()
            self._unanswered.add(push)

    def _next(self) -> int:
        return self._step + 1 if self._unanswered else self._clock()

    def answered(self, push: object) -> None:
        """Take note that a push was answered by all servers."""
        with self._changed:
            self._unanswered.discard(push)
            self._tell_if_quiet()

    def take_back(self, push: object) -> None:
        """Take note that a push is not made after all, whether it has passed or not."""
        with self._changed:
            if push in self._unanswered:
                self._unanswered.remove(push)
                self._step -= 1
                self._tell_if_quiet()

    def _tell_if_quiet(self) -> None:
        if not self._unanswered and self._on_quiet is not None:
            on_quiet, self._on_quiet = self._on_quiet, None
            on_quiet(self._clock())

    def close(self, on_quiet: Callable[[int], None]) -> None:
        """Let nothing pass; `on_quiet` gets the next step as soon as all pushes are answered."""
        with self._changed:
            self._border, self._on_quiet = -1, on_quiet
            self._tell_if_quiet()

    def set_border(self, step: int) -> None:
        """Let the steps before this one pass."""
        with self._changed:
            self._border = step
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._border = self._on_quiet = None
            self._changed.notify_all()


class TableShards:
    """Takes part in a table at all servers when it is made.

    Raises `MovedError` where other servers keep it already. `declaration` asks the scheduler where
    the table is, and `answer` is what it has said.
    """

    first_version = -1  # -2: another worker has the values to begin with.
    kinds = ""  # The end of the names of pushes and pulls.

    def __init__(
        self, answer: Message, options: TableOptions, client: Client,
        links: Callable[[int], Sequence[ServerLink]], worker: int, declaration: Message,
    ) -> None:  # fmt: skip
        self.name = answer.table
        self.options, self._links, self._worker, self._client = options, links, worker, client
        self._shards: Sequence[Shard] = self._new_shards(answer)
        self.peers: Sequence[TableShards] = ()  # Tables whose steps are those of this one.
        self.declaration, self.layout = declaration, answer.body["layout"]
        self.is_sync = options.mode == SYNC
        self.gate = Gate(lambda: self.clock, lambda: any(each.failed for each in self._shards))
        self._rolled_back: PsRolledBack | None = None
        self._pushes: set[Handle] = set()  # Those that are not answered.
        self.has_pushed = False
        # A process of this worker that has ended has pushed its next step to some servers alone.
        self.is_half_pushed = False
        self.steps_before = 0  # Of a training that was loaded: its steps are not counted again.
        self.on_load: Callable[[], object] | None = None  # Pulls values that are others now.
        try:
            self._start()
        except MovedError:
            for shard in self._shards:
                client.call(shard.retire)
            raise
        self.entered_at = self.clock  # The steps that others had made before.

    def _new_shards(self, answer: Message) -> list[Shard]:
        shards, servers = [], answer.body["servers"]
        self._look_at(answer)
        for server, link in enumerate(self._links(servers)):
            shard = Shard(
                self.name, server, self._worker, self._describe(server, servers),
                partial(self._first_values, server), link.send, self.kinds, answer.body["layout"],
            )  # fmt: skip
            shard.version, shard.first = self.first_version, answer.body.get("first")
            shard.on_rollback, shard.on_wanted = self._go_back, self._offer
            link.add(shard)
            shards.append(shard)
        return shards

    def _look_at(self, answer: Message) -> None:
        """Take note of a layout, of which `_describe` is asked next."""

    def _describe(self, server: int, servers: int) -> Mapping[str, Any]:
        """Return what a server is told of its share."""
        raise NotImplementedError

    def _first_values(self, server: int) -> Sequence[Buffer]:
        """Return the payloads with which a server is to begin."""
        return ()

    def _start(self) -> None:
        """Take part at the same step at all servers.

        A worker that returns does its step again that some servers have; one that joins begins
        where all servers can.
        """
        answers = [
            handle.wait() for handle in [self._client.ask(shard.start) for shard in self._shards]
        ]
        top = max(shard.clock for shard in self._shards)
        known, new = (
            [
                shard.clock
                for shard, answer in zip(self._shards, answers, strict=True)
                if answer.body["is_known"] == wanted
            ]
            for wanted in (True, False)
        )
        # A server that has forgotten it has lost steps that it makes again, and that the others
        # drop. Where another one stands behind such a server, it makes those that are missing
        # there in sync, which waits for them.
        if known and (self.is_sync or max(new, default=0) <= min(known)):
            self.is_half_pushed = top > self.clock
            for shard in self._shards:
                shard.stand_at(self.clock)
            return
        behind = [shard for shard in self._shards if shard.clock < top]
        for handle in [self._client.ask(partial(shard.start, enters=top)) for shard in behind]:
            handle.wait()
        for shard in self._shards:
            shard.stand_at(shard.clock)

    def _offer(self, wanted: Shard) -> None:
        """Give first values to a server, in the client; before, to those that have others.

        See [Note: first values].
        """
        others = [each for each in self._shards if each is not wanted and each.has_others_values]
        waiting = set(others)

        def replaced(shard: Shard) -> None:
            waiting.discard(shard)
            if not waiting:
                wanted.offer()

        for each in others:
            each.replace_first(partial(replaced, each))
        if not others:
            wanted.offer()

    @property
    def clock(self) -> int:
        """The number of steps that this worker has finished."""
        return min(shard.clock for shard in self._shards)

    @property
    def known_clock(self) -> int:
        """The number of its steps that a server has, some of which it may be making again."""
        return max(shard.known_clock for shard in self._shards)

    @property
    def version(self) -> int:
        """The lowest version of the values that were pulled."""
        return min(shard.version for shard in self._shards)

    @property
    def is_whole(self) -> bool:
        return self.options.part_bytes is None

    @property
    def place(self) -> tuple[int, int]:
        """The version of the layout, and how many servers keep the table in it."""
        return self.layout, len(self._shards)

    def refresh(self) -> None:
        """Take note that the servers have other values."""
        self.is_half_pushed = False  # All servers have it at the same step.
        self.renew()

    def renew(self) -> None:
        """Give the user the values that the next step needs, which are others than it has."""
        if self.on_load is not None:
            self.on_load()

    def _go_back(self, error: PsRolledBack) -> None:
        """Go back at all servers, as one has lost steps, in the client."""
        tables = (self, *self.peers)
        for table in tables:  # All of them, before the first one fails what somebody waits for.
            table._rolled_back = error
        for shard in [shard for table in tables for shard in table._shards]:
            shard.go_back(error)
        # A save or a load waits for steps that no server has any more.
        for link in self._links(len(self._shards)):
            link.fail_requests(error)

    def forget_rollback(self) -> None:
        """Take it that the user has heard of a rollback."""
        for table in (self, *self.peers):
            table._rolled_back = None

    def raise_if_rolled_back(self) -> None:
        """Raise the `PsRolledBack` that nobody has heard of yet."""
        error = self._rolled_back
        if error is not None:
            self.forget_rollback()
            raise error

    def raise_if_failed(self) -> None:
        """Raise why a part of the table is lost for good."""
        for shard in self._shards:
            shard.raise_if_failed()

    def _unless_rolled_back(self, push: Begin, done: Done) -> None:
        """Begin a push of a step that the servers still have.

        Pushes begin at all servers in one turn of the client, so a rollback comes before or after
        all of them. Those that come later were computed from a step that is lost: they fail.
        """
        if self._rolled_back is None:
            push(done)
        else:
            done(self._rolled_back)

    def _push_parts(
        self, parts: Callable[[int], Sequence[Sequence[Buffer]]], body: Mapping[str, Any]
    ) -> Handle:
        """Push the `parts` for so many servers, to each after what was asked before."""

        def pushes() -> list[Begin]:
            shards = self._shards
            return [
                partial(shard.push, body, payloads)
                for shard, payloads in zip(shards, parts(len(shards)), strict=True)
            ]

        return self._begin_push(pushes, in_order=True)

    def _begin_push(self, pushes: Callable[[], Sequence[Begin]], *, in_order: bool) -> Handle:
        """Begin a push at all servers in one turn of the client, when the gate lets it pass.

        Only then `pushes` says what goes to each server, as these may be others before. Where that
        fails, as memory is missing or the user ends it, there is nothing whose answer the gate
        would wait for.
        """
        push = object()
        try:
            self.gate.let_pass(push)
            begins: list[Begin] = []
            for shard, each in zip(self._shards, pushes(), strict=True):
                begin = partial(self._unless_rolled_back, each)
                begins.append(partial(shard.operations.push, begin) if in_order else begin)
            handle = self._client.ask_all(begins)
            self._pushes.add(handle)
            handle.on_end(partial(self._answered, push, handle))
        except BaseException:
            self._client.call(partial(self.gate.take_back, push))
            raise
        self.has_pushed, self.is_half_pushed = True, False
        return handle

    def _answered(self, push: object, handle: Handle) -> None:
        self._pushes.discard(handle)
        self.gate.answered(push)

    def drop_pulls(self, error: Exception) -> None:
        """Fail the pulls that are not answered, which pushes wait for."""
        for shard in self._shards:
            self._client.call(partial(shard.drop_pulls, error))

    def finish_pushes(self) -> list[HorovodInternalError]:
        """Wait until the servers have what was pushed; return why some of it is lost."""
        errors = []
        for push in [*self._pushes]:
            try:
                push.wait()
            except HorovodInternalError as error:
                errors.append(error)
        return errors

    def _pull_parts(self, plan: Callable[[], Plan]) -> Handle:
        """Return a handle of what is pulled as planned, anew where others keep the table now."""
        return self._client.ask_all(
            *plan(), lambda error: plan() if isinstance(error, MovedError) else None
        )

    @staticmethod
    def _pull_of(shard: Shard, payloads: Sequence[Buffer]) -> Begin:
        """Return what pulls from a server, after what was asked of it before."""
        return partial(shard.operations.pull, partial(shard.pull, payloads=payloads))

    def move(self, answer: Message) -> None:
        """Go to the servers of the next layout, in the client; nothing is pushed meanwhile.

        What was pulled last stays known, should a server be lost; what waited for old servers asks
        the new ones.
        """
        old, version, pulled = self._shards, self.version, self._pulled()
        load = min(shard.load for shard in old)
        shards = self._new_shards(answer)
        for server, shard in enumerate(shards):
            other = old[min(server, len(old) - 1)]
            shard.take_over(other, self.known_clock, version, load, pulled(server))
        self._shards, self.layout = shards, answer.body["layout"]
        if waiting := [pushed for shard in old for pushed in shard.retire()]:
            shards[0].confirm(waiting)
        for shard in shards:
            shard.come_again()

    def _pulled(self) -> Callable[[int], Sequence[Buffer] | None]:
        """Return what gives a server of the next layout its share of what was pulled last."""
        return lambda server: ()

    def align(self, clock: int) -> None:
        """Make the steps from `clock` on again, as a table that makes the same steps has to.

        A process before has pushed to one of them alone, or a server has lost steps of the other.
        In sync, servers then return to the values with which the step `clock` begins.
        """
        if self.clock <= clock:
            return
        if self.is_sync:
            again = PsRolledBack(f"the table '{self.name}' makes step {clock} again", clock)
            for shard in self._shards:
                self._client.call(partial(shard.go_back, again))
        elif self.clock - clock <= MOST_SKEW:
            for shard in self._shards:
                shard.clock = clock


def step_together(tables: Sequence[TableShards]) -> None:
    """Let tables make the same steps from now on, beginning with the first that one of them needs.

    A process of this worker before may have pushed to some of them alone.
    """
    finished = min((table.clock for table in tables), default=0)
    for table in tables:
        table.peers = [each for each in tables if each is not table]
        table.align(finished)
