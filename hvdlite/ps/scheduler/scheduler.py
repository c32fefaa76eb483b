"""The scheduler: who is in the cluster, and who keeps what. It sees no tensor.

What it has to know again after an end lies in a file. While it is away, pushes and pulls go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.logs import log
from hvdlite.ps.cluster.membership import SERVER, WORKER, ClusterPlan, Hello, Member, Membership
from hvdlite.ps.connections import outside
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import Answer, Message, role_of
from hvdlite.ps.layouts.blocks import specs_of_words
from hvdlite.ps.layouts.layout import rebalance
from hvdlite.ps.scheduler.barrier import Barrier
from hvdlite.ps.scheduler.checkpoint_order import CheckpointOrder
from hvdlite.ps.scheduler.registry import Change, Registry, TableOptions
from hvdlite.ps.scheduler.state_file import StateFile

LOOK_SECONDS = 0.5
SILENT_SECONDS = 8.0  # Several beats: servers come and go only while all members are heard of.
WARNING_SECONDS = 60.0  # For which a change waits until that is said, and until it is said again.
# A change takes so long at most, and twice as long each time that it was not enough; then all go on
# for a while before it begins again.
CHANGE_SECONDS, PAUSE_SECONDS = 15.0, 5.0
MOST_AT_ONCE = 256  # Declarations that are written down together.
# The role of the members that may send a request.
ROLE_OF = {
    **dict.fromkeys(["declare", "barrier", "clocks", "scale", "turn", "over"], WORKER),
    **dict.fromkeys(["plan", "stand", "ready"], SERVER),
}


class _Standing(NamedTuple):
    layout: int = 0  # In which a member is.
    tables: frozenset[str] = frozenset()  # That it has begun.
    load: int = 0  # The last one that a server has made.


class Scheduler:
    """The scheduler behind a listener. `state_file` is where it keeps what it must know again."""

    def __init__(
        self, listener: Listener, plan: ClusterPlan, state_file: Path | None = None
    ) -> None:
        self.listener = listener
        self.membership = Membership(plan, outside.now())
        self.registry = Registry(plan.num_servers)
        self.left = 0  # How many workers have done their part.
        self._file = StateFile(state_file, self._state)
        self._declared: list[list[Any]] = []  # To be written before it is answered.
        self.barrier = Barrier()
        self._news: dict[str, Any] = {}  # That all members were told last.
        self._handlers: dict[str, Callable[[bytes, Message], list[Answer]]] = {
            "hello": self._hello, "beat": self._beat, "leave": self._leave,
            "declare": self._declare, "barrier": self._meet, "clocks": self._report,
            "plan": self._plan, "stand": self._stand, "ready": self._ready, "scale": self._scale,
            "turn": self._turn, "over": self._over,
        }  # fmt: skip
        self._change: Change | None = None  # Of the number of servers, which is under way.
        self._wanted = plan.num_servers
        # By which servers know whose snapshots they find.
        self._job = outside.random_bytes(8).hex()
        self._turns = CheckpointOrder()
        self._number = 0  # The last one of a turn or a change; see `_next_number`.
        self._standing: dict[bytes, _Standing] = {}  # What members have said in their beats.
        self._obstacle, self._warns_at = "", 0.0  # To the change that is wanted.
        self._change_seconds = CHANGE_SECONDS
        self._change_begins = self._change_ends = 0.0  # At the earliest, and at the latest.
        if (found := self._file.read()) is not None:
            self._load(found.state)
            for worker, name, specs, options in found.additions:
                self.registry.declare(worker, name, specs_of_words(specs), TableOptions(*options))

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take back what `_state` has returned."""
        self.membership.load(state["membership"], outside.now())
        self.registry.load(state["registry"])
        self._wanted, self._job = state["wanted"], state["job"]
        self.barrier.load(state["met"])
        self._turns = CheckpointOrder.again(*state["loads"])
        self._number = state.get("number", 0)
        self.membership.servers_in_use = self.registry.layout.num_servers

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answer until `ended`, which is called at least twice a second."""
        while not ended():
            answers = self._answers() + self._go_on_with_turns()
            self._look_at_change()
            if self._file.unkept:
                self._keep()
            self._keep_declared()
            if self._file.unkept:  # Nobody hears what would be forgotten; all ask again.
                continue
            for answer in [*answers, *self._tell()]:
                self.listener.send(*answer)

    def _answers(self) -> list[Answer]:
        """Return the answers to a message, or to all declarations that are here."""
        received = self.listener.receive(LOOK_SECONDS)
        answers = self.membership.tick(outside.now())
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
        role, member = ROLE_OF.get(message.kind), self.membership.member_of(peer)
        if role is not None and member is None:  # It has to say hello first.
            return [_answer(peer, message, "restarted")]
        if role is not None and member is not None and member.role != role:
            why = f"only a {role} asks for {message.kind}, and this is a {member.role}"
            return [_answer(peer, message, "failed", why=why)]
        try:
            return handler(peer, message)
        except HorovodInternalError:
            raise
        except Exception as error:  # A message must not end the scheduler, whatever is in it.
            return [_answer(peer, message, "failed", why=_words(error))]

    def _tell(self) -> list[Answer]:
        """Return what all members have to hear at once, where something has changed."""
        news = self._describe()
        if news == self._news:
            return []
        self._news = news
        peers = [member.peer for member in self.membership.members.values() if member.peer]
        return [Answer(peer, Message("beat", body=news)) for peer in peers]

    def _describe(self) -> dict[str, Any]:
        return self.membership.describe() | {
            "job": self._job, "layout": self.registry.version,
            "layout_servers": self.registry.layout.num_servers, "wanted": self._wanted,
            "change": None if self._change is None else self._change.describe(),
            "load": self._turns.load, "decided": self._decided(),
        }  # fmt: skip

    def _decided(self) -> dict[str, Any] | None:
        """Return the load that counts, and which tables anybody begins who comes again."""
        if self._turns.decided is None:
            return None
        needed = set[str]().union(*map(self.registry.tables_of, self.membership.workers()))
        return {**self._turns.decided, "needed": sorted(needed)}

    # -- servers that come and go

    def _look_at_change(self) -> None:
        """Begin a change of the number of servers, go on with it, or give it up."""
        members = self.membership.members
        for number in [n for (role, n), each in members.items() if role == SERVER and each.lost]:
            del members[SERVER, number]  # It has come, and was lost before it had anything.
            self._change, self._wanted = None, self.registry.layout.num_servers
        layout, wanted, now = self.registry.layout, self._wanted, outside.now()
        change = self._change
        if self._turns.load:
            self._change = None  # It is made after the load.
            return
        if change is None and (wanted == layout.num_servers or self.registry.immovable()):
            return
        if now < self._change_begins:
            return
        obstacle = self._find_obstacle(max(wanted, layout.num_servers))
        if change is not None and (obstacle or change.members != self._roll()):
            change = self._change = None  # What a server had taken may be lost with it.
        if change is not None and now >= self._change_ends and not change.is_ready():
            return self._pause_change(change, now)
        if change is None and obstacle:
            self._warn_of(obstacle)
        elif change is None:
            self._begin_change(now)
        elif change.look(self.membership.workers()):
            self._end_change(change)

    def _begin_change(self, now: float) -> None:
        self._obstacle, self._change_ends = "", now + self._change_seconds
        number, layout = self._next_number(), self.registry.layout
        following = rebalance(layout, self._wanted)
        self._change = Change(number, following, layout, self.registry.modes(), self._roll())
        self._take_number(number)

    def _end_change(self, change: Change) -> None:
        """Let the next layout count, if that can be written down."""
        before = self.registry.layout, self.registry.version
        self.registry.change_to(change.layout)
        self._keep()
        if self._file.unkept:  # It counts only when a scheduler that comes again knows of it.
            self.registry.layout, self.registry.version = before
            return
        self.membership.servers_in_use = change.layout.num_servers
        self._change, self._change_seconds = None, CHANGE_SECONDS

    def _pause_change(self, change: Change, now: float) -> None:
        """Give a change up that takes too long, and let all go on before it is tried again.

        A worker that is to make a step before may wait for what others do after the border, or for
        servers that may change no table now, as they do in a load.
        """
        late = ", ".join(f"worker {worker}" for worker in change.behind())
        why = f"{late} has steps to make before" if late else "tables were on their way"
        log.warning(
            "the cluster is to have %d servers, and goes on with %d: %s for %g seconds. It is "
            "tried again in %g seconds",
            self._wanted, self.registry.layout.num_servers, why, self._change_seconds,
            PAUSE_SECONDS,
        )  # fmt: skip
        self._change, self._change_begins = None, now + PAUSE_SECONDS
        self._change_seconds *= 2

    def _warn_of(self, obstacle: str) -> None:
        """Say what a change waits for, where it has waited for long."""
        now = outside.now()
        if obstacle != self._obstacle:
            self._obstacle, self._warns_at = obstacle, now + WARNING_SECONDS
        elif now >= self._warns_at:
            self._warns_at = now + WARNING_SECONDS
            log.warning(
                "the cluster is to have %d servers, and goes on with %d: %s for %g seconds. A "
                "worker that has come again declares all tables in which it took part (make the "
                "same optimizers, and start the same tensors), or leaves (ps.leave)",
                self._wanted, self.registry.layout.num_servers, obstacle, WARNING_SECONDS,
            )  # fmt: skip

    def _roll(self) -> dict[tuple[str, int], tuple[bytes, int]]:
        """Return who is there, and as which process."""
        members = self.membership.members.items()
        return {key: (each.peer, each.incarnation) for key, each in members if not each.lost}

    def _find_obstacle(self, servers: int) -> str:
        """Return why so many servers cannot come or go now; empty: they can."""
        members, registry = self.membership.members, self.registry
        roll, now = self._roll(), outside.now()
        peers = {peer for peer, _ in roll.values()}
        self._standing = {peer: each for peer, each in self._standing.items() if peer in peers}
        for number in range(servers):
            if (SERVER, number) not in roll:
                return f"server {number} is not there"
        for (role, number), (peer, _) in roll.items():
            layout, tables, _ = self._standing.get(peer, _Standing())
            needed = registry.tables_of(number) if role == WORKER else set(registry.modes())
            if role == SERVER and number >= registry.layout.num_servers:
                needed = set()
            if now - members[role, number].heard > SILENT_SECONDS:
                return f"{role} {number} is silent"
            if layout != registry.version:
                return f"{role} {number} has not come to the present layout"
            if needed - tables:
                return f"{role} {number} has not begun the table '{min(needed - tables)}'"
        return ""

    def _member(self, peer: bytes) -> Member:
        """Return the member that has sent a request of a role."""
        member = self.membership.member_of(peer)
        assert member is not None  # `answer` has seen to that.
        return member

    def _changing(self, message: Message) -> Change | None:
        """Return the change that a message is about, unless it was given up."""
        change = self._change
        return change if change and change.identity == message.body["change"] else None

    def _report(self, peer: bytes, message: Message) -> list[Answer]:
        member, change = self._member(peer), self._changing(message)
        clocks = message.body["clocks"]
        if change is not None and clocks.keys() >= self.registry.tables_of(member.number):
            change.report(member.number, clocks)
        self._turns.report(message.body["change"], member.number, clocks)
        return [_answer(peer, message, "done")]

    def _stand(self, peer: bytes, message: Message) -> list[Answer]:
        member, change = self._member(peer), self._changing(message)
        if change is not None:
            tables = {name: (n, dict(steps)) for name, n, steps in message.body["tables"]}
            change.stand(member.number, tables)
        return [_answer(peer, message, "done")]

    def _plan(self, peer: bytes, message: Message) -> list[Answer]:
        change = self._changing(message)
        if change is None:
            return [_answer(peer, message, "failed", why="the change was given up")]
        parts, servers = change.layout.parts, change.layout.num_servers
        names = [*change.modes]
        about = {"parts": parts, "servers": servers, "tables": names}
        return [_answer(peer, message, "plan", **about, loaded=self.registry.loaded)]

    def _ready(self, peer: bytes, message: Message) -> list[Answer]:
        member, change = self._member(peer), self._changing(message)
        if change is not None:
            change.ready.add(member.number)
        return [_answer(peer, message, "done")]

    def _scale(self, peer: bytes, message: Message) -> list[Answer]:
        wanted, present = message.body["servers"], self.registry.layout.num_servers
        if name := self.registry.immovable():
            raise ValueError(
                f"the tensors of the table '{name}' are whole, and do not move to other servers: "
                "only those of partition='element' do"
            )
        if type(wanted) is not int or not 1 <= wanted <= present:
            raise ValueError(
                f"{wanted!r} servers cannot be left of {present}: give 1 to {present}, and start a "
                "server with HVDLITE_PS_JOIN=1 to have one more"
            )
        self._wanted = wanted
        self._keep()
        return [_answer(peer, message, "done")]

    # -- checkpoints

    def _turn(self, peer: bytes, message: Message) -> list[Answer]:
        self._turns.ask(peer, message.request, message.body)
        return []  # See `_go_on_with_turns`.

    def _go_on_with_turns(self) -> list[Answer]:
        """End a load that all servers have made, and let others have their turns."""
        roll, turns, decided = self._roll(), self._turns, self._turns.decided
        if decided is not None and self._have_all_loaded(roll, decided["turn"]):
            self.registry.loaded.update(dict.fromkeys(decided["clocks"], decided["turn"]))
            turns.end_load()
            self._keep()
        peers = [peer for peer, _ in roll.values()]
        answers = turns.go_on(peers, self.membership.workers(), self._next_number())
        if turns.turn > self._number or answers:
            self._take_number(max(turns.turn, self._number))
        return answers

    def _have_all_loaded(
        self, roll: Mapping[tuple[str, int], tuple[bytes, int]], turn: int
    ) -> bool:
        servers = [(SERVER, number) for number in range(self.registry.layout.num_servers)]
        peers = [roll[each][0] for each in servers if each in roll]
        stands = [self._standing[peer].load for peer in peers if peer in self._standing]
        return len(stands) == len(servers) and min(stands) >= turn

    def _next_number(self) -> int:
        """Return a number for a turn or a change, higher than those of all that came before it.

        The clock on the wall knows of predecessors whose state is lost; it may go back.
        """
        return max(outside.rising_number(), self._number + 1)

    def _take_number(self, number: int) -> None:
        self._number = number
        self._keep()

    def _over(self, peer: bytes, message: Message) -> list[Answer]:
        is_over = self._turns.end(message.body["turn"], message.body["load"])
        self._keep()
        return [_answer(peer, message, "done", over=is_over)]

    # -- requests

    def _hello(self, peer: bytes, message: Message) -> list[Answer]:
        body = message.body
        if role_of(peer) != body["role"]:
            raise ValueError(f"a {role_of(peer)} says that it is a {body['role']}")
        hello = Hello(**{field: body[field] for field in Hello.__dataclass_fields__})
        answers = self.membership.hello(peer, message.request, hello, outside.now())
        tables = {"reached": self.registry.reached, "loaded": self.registry.loaded}
        answers = [
            Answer(to, each._replace(body={**each.body, **self._describe(), **tables}))
            if each.kind == "welcome"
            else Answer(to, each)
            for to, each in answers
        ]
        member = self.membership.member_of(peer)
        if hello.joins and member is not None and member.role == SERVER:
            self._wanted = max(self._wanted, member.number + 1)
        self._keep()
        return answers

    def _beat(self, peer: bytes, message: Message) -> list[Answer]:
        if not self.membership.beat(peer, outside.now()):
            return [_answer(peer, message, "restarted")]
        tables = message.body["tables"]
        layout, load = message.body["layout"], message.body.get("load", 0)
        self._standing[peer] = _Standing(layout, frozenset(tables), load)
        if [name for name, version in tables.items() if self.registry.reach(name, version)]:
            self._keep()  # Their first values must not come again.
        return [_answer(peer, message, "beat", **self._describe())]

    def _leave(self, peer: bytes, message: Message) -> list[Answer]:
        member = self.membership.member_of(peer)
        if not self.membership.leave(peer):
            return [_answer(peer, message, "restarted")]
        if member is not None:
            self.left += member.role == WORKER
            if member.role == WORKER:
                self.registry.forget(member.number)
            if why := message.body.get("why"):
                self.membership.fail(f"{member.role} {member.number} has ended: {why}")
            self._keep()
        return [_answer(peer, message, "done"), *self._open_barrier()]

    def _declare(self, peer: bytes, message: Message) -> list[Answer]:
        member = self._member(peer)
        if "specs" not in message.body:
            return [_answer(peer, message, "layout", **self.registry.describe(message.table))]
        is_new = not self.registry.takes_part(member.number, message.table)
        if self._change is not None and is_new:
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
        return [_answer(peer, message, "layout", first_key=first_key, parts=parts, **about)]

    def _meet(self, peer: bytes, message: Message) -> list[Answer]:
        member = self._member(peer)
        count = int(message.body["count"])
        answer = _answer(peer, message, "done", count=count)
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

    def _keep(self) -> None:
        """Write down what must be known again."""
        self._declared.clear()  # They are a part of it.
        self._file.write()

    def _keep_declared(self) -> None:
        """Write down the tables that were declared since, before anybody hears of them."""
        declared, self._declared = self._declared, []
        self._file.add(declared)

    def _state(self) -> dict[str, Any]:
        return {
            "membership": self.membership.state(), "registry": self.registry.state(),
            "wanted": self._wanted, "job": self._job,
            "met": self.barrier.state(),
            "loads": self._turns.state(), "number": self._number,
        }  # fmt: skip

    def forget(self) -> None:
        """Remove the file of a job that has come to its end."""
        self._file.forget()


def _words(error: Exception) -> str:
    """Return what an error says to users: its own words, where it is one of ours."""
    if isinstance(error, ValueError) and type(error) is ValueError:
        return str(error)
    return f"the request cannot be understood: {error!r}"


def _answer(peer: bytes, message: Message, kind: str, **body: Any) -> Answer:
    return Answer(peer, Message(kind, message.request, message.table, body=body))
