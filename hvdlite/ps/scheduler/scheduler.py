"""The scheduler: who is in the cluster, and who keeps what. It sees no tensor.

What it has to know again after an end lies in a file. While it is away, pushes and pulls go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.settings.logs import log
from hvdlite.ps.cluster.membership import Hello, Member, Membership
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections import system
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import SERVER, WORKER, Answer, Message, answer_to, role_of
from hvdlite.ps.layouts.blocks import specs_of_words
from hvdlite.ps.scheduler.barrier import Barrier
from hvdlite.ps.scheduler.changes import REMEDY, Changes, Obstacle, Standing
from hvdlite.ps.scheduler.checkpoint_order import CheckpointOrder
from hvdlite.ps.scheduler.registry import Registry, TableOptions
from hvdlite.ps.scheduler.state_file import StateFile

LOOK_SECONDS = 0.5
MOST_AT_ONCE = 256  # Declarations that are written down together.
# The role of the members that may send a request.
ROLE_OF = {
    **dict.fromkeys(["declare", "barrier", "clocks", "scale", "turn", "over"], WORKER),
    **dict.fromkeys(["plan", "stand", "ready"], SERVER),
}


class Scheduler:
    """The scheduler behind a listener. `state_file` is where it keeps what it must know again."""

    def __init__(
        self, listener: Listener, settings: ClusterSettings, state_file: Path | None = None
    ) -> None:
        self.listener = listener
        self.now = listener.awake_seconds  # Nobody is silent while this process stands still.
        self.membership = Membership(settings, self.now())
        self.registry = Registry(settings.num_servers)
        self.file = StateFile(state_file, self._state)
        self._declared: list[list[Any]] = []  # To be written before it is answered.
        self.barrier = Barrier()
        self._news: dict[str, Any] = {}  # That all members were told last.
        self._handlers: dict[str, Callable[[bytes, Message], list[Answer]]] = {
            "hello": self._hello, "beat": self._beat, "leave": self._leave,
            "declare": self._declare, "barrier": self._meet, "clocks": self._report,
            "plan": self._plan, "stand": self._stand, "ready": self._ready, "scale": self._scale,
            "turn": self._turn, "over": self._over,
        }  # fmt: skip
        self.changes = Changes(self.membership, self.registry, self._new_number, self._keep)
        self.turns = CheckpointOrder()
        self._obstacle = Obstacle()  # To the end of a load that counts.
        # By which servers know whose snapshots they find.
        self._job = system.random_bytes(8).hex()
        self._number = 0  # The last one of a turn or a change; see `_next_number`.
        if (found := self.file.read()) is not None:
            state, additions = found
            self._load(state)
            for worker, name, specs, options in additions:
                self.registry.declare(worker, name, specs_of_words(specs), TableOptions(*options))

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take back what `_state` has returned."""
        self.membership.load(state["membership"], self.now())
        self.registry.load(state["registry"])
        self.changes.wanted, self._job = state["wanted"], state["job"]
        self.barrier.load(state["met"])
        self.turns = CheckpointOrder.again(*state["turns"])
        self._number = state.get("number", 0)
        self.membership.servers_in_use = self.registry.layout.num_servers

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answer until `ended`, which is called at least twice a second."""
        while not ended():
            answers = self._answers() + self._go_on_with_turns()
            self.changes.look(self.now(), somebody_loads=bool(self.turns.load))
            if self.file.unkept:
                self._keep()
            declared, self._declared = self._declared, []
            self.file.add(declared)  # Before anybody hears of them.
            if self.file.unkept:  # Nobody hears what would be forgotten; all ask again.
                continue
            for answer in [*answers, *self._tell()]:
                self.listener.send(*answer)

    def _answers(self) -> list[Answer]:
        """Return the answers to a message, or to all declarations that are here."""
        received = self.listener.receive(LOOK_SECONDS)
        answers = self.membership.tick(self.now())
        left = MOST_AT_ONCE
        while received is not None:
            answers += self.answer(*received)
            left -= 1
            more = received[1].kind == "declare" and left > 0
            received = self.listener.receive(0) if more else None
        return answers

    def answer(self, peer: bytes, message: Message) -> list[Answer]:
        """Return the answers to a message: some may be for other peers, which have waited."""
        handler = self._handlers.get(message.kind)
        if handler is None:
            return []
        role = ROLE_OF.get(message.kind)
        if role is not None:
            member = self.membership.member_of(peer)
            if member is None:  # It has to say hello first.
                return [answer_to(peer, message, "restarted")]
            if member.role != role:
                why = f"only a {role} asks for {message.kind}, and this is a {member.role}"
                return [answer_to(peer, message, "failed", why=why)]
            if not self.membership.formed:
                return []  # See `_tell`. It asks again.
        try:
            return handler(peer, message)
        except HorovodInternalError:
            raise
        except Exception as error:  # A message must not end the scheduler, whatever is in it.
            is_ours = type(error) is ValueError
            why = str(error) if is_ours else f"the request cannot be understood: {error!r}"
            return [answer_to(peer, message, "failed", why=why)]

    def _tell(self) -> list[Answer]:
        """Return what all members have to hear at once, where something has changed.

        One that has come again without its state does not know all of them before they have come:
        servers that heard of some would make steps without the others.
        """
        if not self.membership.formed:
            return []
        news = self._describe()
        if news == self._news:
            return []
        self._news = news
        peers = [member.peer for member in self.membership.members.values() if member.peer]
        return [Answer(peer, Message("beat", body=news)) for peer in peers]

    def _describe(self) -> dict[str, Any]:
        change, decided = self.changes.current, self.turns.decided
        if decided is not None:  # With the tables that anybody begins who comes again.
            needed = self.registry.tables_of(*self.membership.workers())
            decided = {**decided, "needed": sorted(needed)}
        return self.membership.describe() | {
            "job": self._job, "layout": self.registry.version,
            "layout_servers": self.registry.layout.num_servers, "wanted": self.changes.wanted,
            "change": None if change is None else change.describe(),
            "load": self.turns.load, "decided": decided,
        }  # fmt: skip

    def _member(self, peer: bytes) -> Member:
        """Return the member that has sent a request of a role."""
        member = self.membership.member_of(peer)
        assert member is not None  # `answer` has seen to that.
        return member

    # -- servers that come and go

    def _report(self, peer: bytes, message: Message) -> list[Answer]:
        member, change = self._member(peer), self.changes.of(message.body["change"])
        clocks = message.body["clocks"]
        if change is not None and clocks.keys() >= self.registry.tables_of(member.number):
            change.report(member.number, clocks)
        self.turns.report(message.body["change"], member.number, clocks)
        return [answer_to(peer, message, "done")]

    def _stand(self, peer: bytes, message: Message) -> list[Answer]:
        member, change = self._member(peer), self.changes.of(message.body["change"])
        if change is not None:
            tables = {name: (n, dict(steps)) for name, n, steps in message.body["tables"]}
            change.stand(member.number, tables)
        return [answer_to(peer, message, "done")]

    def _plan(self, peer: bytes, message: Message) -> list[Answer]:
        change = self.changes.of(message.body["change"])
        if change is None:
            return [answer_to(peer, message, "failed", why="the change was given up")]
        parts, servers = change.layout.parts, change.layout.num_servers
        about = {"parts": parts, "servers": servers, "tables": [*change.modes]}
        return [answer_to(peer, message, "plan", **about, loaded=self.turns.loaded)]

    def _ready(self, peer: bytes, message: Message) -> list[Answer]:
        member, change = self._member(peer), self.changes.of(message.body["change"])
        if change is not None:
            change.ready.add(member.number)
        return [answer_to(peer, message, "done")]

    def _scale(self, peer: bytes, message: Message) -> list[Answer]:
        self.changes.want(message.body["servers"])
        self._keep()
        return [answer_to(peer, message, "done")]

    # -- checkpoints

    def _turn(self, peer: bytes, message: Message) -> list[Answer]:
        body = message.body  # What it lacks must be missed here, and not when it is its turn.
        asked = {"what": body["what"], "number": int(body["number"]), "late": bool(body["late"])}
        self.turns.ask(peer, message.request, asked)
        return []  # See `_go_on_with_turns`.

    def _over(self, peer: bytes, message: Message) -> list[Answer]:
        load = message.body["load"]
        if load is not None:
            load = {**load, "steps": dict(load["steps"]), "clocks": dict(load["clocks"])}
        is_over = self.turns.end(message.body["turn"], load)
        self._keep()
        return [answer_to(peer, message, "done", over=is_over)]

    def _go_on_with_turns(self) -> list[Answer]:
        if self.turns.is_idle:  # As for most messages, of which each would ask for all members.
            return []
        roll, turns, standings = self.membership.roll(), self.turns, self.changes.standings
        peers = [peer for peer, _ in roll.values()]
        servers = [roll.get((SERVER, n), (b"", 0)) for n in range(self.registry.layout.num_servers)]
        stands = [standings.get(peer, Standing()) for peer, _ in servers]
        is_over = turns.look([each.load for each in stands])
        self._warn_of_load(stands)
        answers = turns.go_on(peers, self.membership.workers(), self._next_number())
        if answers or is_over or turns.turn > self._number:
            self._number = max(self._number, turns.turn)
            self._keep()
        return answers

    def _warn_of_load(self, stands: Sequence[Standing]) -> None:
        """Say for which server a load that counts has waited for long."""
        what, turns = "", self.turns
        behind = [n for n, each in enumerate(stands) if each.load < turns.turn]
        if turns.decided is not None and behind:
            needed = self.registry.tables_of(*self.membership.workers())
            missing = sorted(needed.difference(stands[behind[-1]].tables))
            what = f"begun the table '{missing[0]}'" if missing else "made it"
            what = f"server {behind[-1]} has not {what}"
        if self._obstacle.is_to_be_said(what, self.now()):
            log.warning(
                "a load is not over, and all workers wait for it: %s. %s before it saves or loads, "
                "or leaves (ps.leave)",
                what, REMEDY,
            )  # fmt: skip

    def _next_number(self) -> int:
        """Return a number for a turn or a change, higher than those of all that came before it.

        The clock on the wall knows of predecessors whose state is lost; it may go back.
        """
        return max(system.rising_number(), self._number + 1)

    def _new_number(self) -> int:
        self._number = self._next_number()
        self._keep()
        return self._number

    # -- requests

    def _hello(self, peer: bytes, message: Message) -> list[Answer]:
        body = message.body
        if role_of(peer) != body["role"]:
            raise ValueError(f"a {role_of(peer)} says that it is a {body['role']}")
        hello = Hello(**{field: body[field] for field in Hello.__dataclass_fields__})
        answers = self.membership.hello(peer, message.request, hello, self.now())
        tables = {"reached": self.registry.reached, "loaded": self.turns.loaded}
        answers = [
            Answer(to, each._replace(body={**each.body, **self._describe(), **tables}))
            if each.kind == "welcome"
            else Answer(to, each)
            for to, each in answers
        ]
        member = self.membership.member_of(peer)
        in_use = self.registry.layout.num_servers  # These come again, and may have been told to go.
        if hello.joins and member and member.role == SERVER and member.number >= in_use:
            self.changes.wanted = max(self.changes.wanted, member.number + 1)
        self._keep()
        return answers

    def _beat(self, peer: bytes, message: Message) -> list[Answer]:
        if not self.membership.beat(peer, self.now()):
            return [answer_to(peer, message, "restarted")]
        tables = message.body["tables"]
        layout, load = message.body["layout"], int(message.body.get("load", 0))
        self.changes.standings[peer] = Standing(layout, tables.keys(), load)
        if [name for name, version in tables.items() if self.registry.reach(name, version)]:
            self._keep()  # Their first values must not come again.
        news = self._describe() if self.membership.formed else {}  # See `_tell`.
        return [answer_to(peer, message, "beat", **news)]

    def _leave(self, peer: bytes, message: Message) -> list[Answer]:
        member = self.membership.member_of(peer)
        if not self.membership.leave(peer):
            return [answer_to(peer, message, "restarted")]
        if member is not None:
            if member.role == WORKER:
                self.registry.forget(member.number)
            if why := message.body.get("why"):
                self.membership.fail(f"{member.role} {member.number} has ended: {why}")
            self._keep()
        return [answer_to(peer, message, "done"), *self._open_barrier()]

    def _declare(self, peer: bytes, message: Message) -> list[Answer]:
        member = self._member(peer)
        if "specs" not in message.body:
            return [answer_to(peer, message, "layout", **self.registry.describe(message.table))]
        is_new = not self.registry.takes_part(member.number, message.table)
        if self.changes.current is not None and is_new:
            return []  # It is asked for again when the next layout counts.
        specs = specs_of_words(message.body["specs"])
        options = TableOptions(*message.body["options"])
        first_key, parts = self.registry.declare(member.number, message.table, specs, options)
        if is_new:
            self._declared.append([member.number, message.table, specs, list(options)])
        about = {
            "layout": self.registry.version, "servers": self.registry.layout.num_servers,
            "first": self.registry.first_of(message.table),
        }  # fmt: skip
        return [answer_to(peer, message, "layout", first_key=first_key, parts=parts, **about)]

    def _meet(self, peer: bytes, message: Message) -> list[Answer]:
        member = self._member(peer)
        count = int(message.body["count"])
        answer = answer_to(peer, message, "done", count=count)
        if self.barrier.has_passed(member.number, peer, count):  # Its answer was lost.
            return [answer]
        self.barrier.waiting[member.number] = answer
        return self._open_barrier()

    def _open_barrier(self) -> list[Answer]:
        """Let the workers go on when each one that takes part has come."""
        members = self.membership.members
        peers = {number: each.peer for (role, number), each in members.items() if role == WORKER}
        opened = self.barrier.open(peers, self.membership.workers())
        if opened:
            self._keep()  # Before anybody hears of it: a scheduler that comes again knows, too.
        return opened

    def _keep(self) -> bool:
        """Write down what must be known again; return whether it is on disk."""
        self._declared.clear()  # They are a part of it.
        self.file.write()
        return not self.file.unkept

    def _state(self) -> dict[str, Any]:
        return {
            "membership": self.membership.state(), "registry": self.registry.state(),
            "wanted": self.changes.wanted, "job": self._job, "met": self.barrier.state(),
            "turns": self.turns.state(), "number": self._number,
        }  # fmt: skip
