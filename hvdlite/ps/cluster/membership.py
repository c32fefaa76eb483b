"""Who is in a cluster of servers and workers: the decisions of the scheduler.

Processes say hello until all that are needed have come. Each gets a number among those of its role.
One that comes again under its node id, or takes the place of one that was lost, gets the number of
its predecessor and a higher incarnation, by which its peers see that it has forgotten them. The
predecessor, should it still live, is refused from then on. Workers of a job (ranks) are watched by
the job; independent ones leave when they have been silent for long.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.messages import SERVER, WORKER, Answer, Message, two_processes

ROLES = (SERVER, WORKER)
# The members of a scheduler that has come again, and knows none of them, say hello within this
# time: until then, nobody who joins takes a place that may be theirs.
RETURN_SECONDS = 8.0


@dataclass(frozen=True)
class Hello:
    """What a process says of itself."""

    role: str
    node_id: str
    num_servers: int
    num_workers: int
    number: int | None = None  # That it must have, as a rank has; None: any.
    address: str = ""  # Of a server, for workers.
    joins: bool = False  # It is one more, where all that are needed are there.


@dataclass
class Member:
    """A process that has a number."""

    role: str
    number: int
    node_id: str
    address: str
    incarnation: int = 1
    peer: bytes = b""
    heard: float = 0.0
    lost: bool = False


@dataclass
class Membership:
    """The members of a cluster. Every event has the time `now`, in seconds of any clock."""

    settings: ClusterSettings
    begin: float
    members: dict[tuple[str, int], Member] = field(default_factory=dict)
    formed: bool = False
    failure: str = ""  # Why the cluster cannot go on: the same for all who ask.
    servers_in_use: int = 0  # Servers with higher numbers keep nothing yet, or nothing any more.
    _hellos: dict[bytes, int] = field(default_factory=dict)  # Peer -> the request to be answered.
    # Peers that have left: what they sent before they heard the answer must not take them in again.
    _gone: set[bytes] = field(default_factory=set)
    # Peers whose places others have taken -> the places.
    _replaced: dict[bytes, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """All servers of the settings are in use."""
        self.servers_in_use = self.servers_in_use or self.settings.num_servers

    # -- events

    def hello(self, peer: bytes, request: int, hello: Hello, now: float) -> list[Answer]:
        """Take a process in, or refuse it; all are welcome when the last one has come."""
        is_early = hello.joins and not self.formed and now - self.begin < RETURN_SECONDS
        if is_early or peer in self._gone:
            return []  # Who is early says hello again.
        if why := self._objection(hello):
            return [_refuse(peer, request, why)]
        if self.failure:
            return [_refuse(peer, request, self.failure, failed=True)]
        if (place := self._replaced.get(peer)) in self.members:
            role, number = place
            present = self.members[place].peer
            return [_refuse(peer, request, two_processes(f"{role} {number}", present, peer))]
        member = self._member_for(peer, hello)
        if member is None:
            most = self.settings.count(hello.role)
            return [_refuse(peer, request, f"all {most} {hello.role}s are there")]
        if member.peer not in (b"", peer):
            self._replaced[member.peer] = member.role, member.number
        member.peer, member.heard, member.lost = peer, now, False
        member.address = hello.address
        self._hellos[peer] = request
        if not self.formed and not self.missing():
            self.formed = True
        return self._welcome_all() if self.formed else []

    def beat(self, peer: bytes, now: float) -> bool:
        """Take note that a member lives; return whether it is one, or has been."""
        member = self.member_of(peer)
        if member is not None:
            member.heard, member.lost = now, False
        return member is not None or peer in self._gone

    def leave(self, peer: bytes) -> bool:
        """Forget a member that has done its part.

        Return False for a peer that may be a member from before this scheduler came again: it has
        to say hello first.
        """
        member = self.member_of(peer)
        if member is not None:
            del self.members[member.role, member.number]
            self._gone.add(peer)
            return True
        return peer in self._gone or all(each.peer for each in self.members.values())

    def fail(self, why: str) -> None:
        """Let all members hear why the cluster cannot go on; the first reason counts."""
        self.failure = self.failure or why

    def tick(self, now: float) -> list[Answer]:
        """Give up whom nothing was heard of for too long."""
        if self.failure:
            return self._refuse_all()
        if not self.formed:
            if now - self.begin < self.settings.start_seconds:
                return []
            self.failure = (
                f"{' and '.join(self.missing())} had not come after "
                f"{self.settings.start_seconds:g} seconds (--start-timeout)"
            )
            return self._refuse_all()
        for member in self.members.values():
            silence = now - member.heard
            if member.role == WORKER and self.settings.independent:
                member.lost |= silence >= self.settings.worker_seconds
            elif member.role == SERVER and silence >= self.settings.server_seconds:
                if member.number >= self.servers_in_use:
                    member.lost = True
                    continue
                address = member.address.partition(" ")[0]
                self.failure = (
                    f"server {member.number} ({address}) is lost: nothing was heard of it for "
                    f"{self.settings.server_seconds:g} seconds (--ps-timeout)"
                )
        return []

    # -- what it looks like

    def missing(self) -> list[str]:
        """Return who has to come before any process is welcome, as words."""
        words = []
        for role in ROLES:
            taken = {number for kind, number in self.members if kind == role}
            absent = [str(n) for n in range(self.settings.count(role)) if n not in taken]
            if absent:
                words.append(f"{role}{'s' * (len(absent) > 1)} {', '.join(absent)}")
        return words

    def workers(self) -> list[int]:
        """Return the numbers of the workers that take part."""
        return sorted(
            member.number
            for member in self.members.values()
            if member.role == WORKER and not member.lost
        )

    def roll(self) -> dict[tuple[str, int], tuple[bytes, int]]:
        """Return who is there, and as which process."""
        members = self.members.items()
        return {key: (each.peer, each.incarnation) for key, each in members if not each.lost}

    @property
    def is_over(self) -> bool:
        """Whether all have come and nobody is left; a worker that was lost holds nothing up."""
        return self.formed and all(member.lost for member in self.members.values())

    def describe(self) -> dict[str, Any]:
        servers = [self.members[key] for key in sorted(self.members) if key[0] == SERVER]
        return {
            "servers": [[each.number, each.address, each.incarnation] for each in servers],
            "workers": self.workers(),
            "failure": self.failure,
        }

    # -- a scheduler that comes again

    def state(self) -> dict[str, Any]:
        """Return what a scheduler has to keep, as JSON can hold it."""
        members = [vars(member) | {"peer": "", "heard": 0} for member in self.members.values()]
        return {"formed": self.formed, "members": members}

    def load(self, state: Mapping[str, Any], now: float) -> None:
        """Take back what `state` has returned; members have time to be heard of again."""
        self.formed = state["formed"]
        for fields in state["members"]:
            member = Member(**{**fields, "peer": b"", "heard": now})
            self.members[member.role, member.number] = member

    # -- parts

    def _objection(self, hello: Hello) -> str:
        if hello.role not in ROLES:
            return f"the role is {hello.role!r}, which is none of {', '.join(ROLES)}"
        for word, given, own in (
            ("servers", hello.num_servers, self.settings.num_servers),
            ("workers", hello.num_workers, self.settings.num_workers),
        ):
            if given != own:
                return (
                    f"the cluster has {own} {word}, and this {hello.role} was told of {given}: "
                    f"give all processes the same HVDLITE_NUM_{word.upper()}"
                )
        most = max(
            [self.settings.count(hello.role), *(n + 1 for r, n in self.members if r == hello.role)]
        )
        if hello.number is not None and not 0 <= hello.number < most:
            return f"there is no {hello.role} {hello.number}: their numbers begin with 0"
        return ""

    def _member_for(self, peer: bytes, hello: Hello) -> Member | None:
        """Return the member that this process becomes; None where all places are taken."""
        for member in self.members.values():
            if (member.role, member.node_id) == (hello.role, hello.node_id):
                member.incarnation += member.peer != peer  # Else it says its hello again.
                return member
        wanted = hello.number
        numbers = range(self.settings.count(hello.role)) if wanted is None else [wanted]
        for number in numbers:
            if (hello.role, number) not in self.members:
                member = Member(hello.role, number, hello.node_id, hello.address)
                self.members[hello.role, number] = member
                return member
        for number in numbers:
            member = self.members[hello.role, number]
            # A rank or server that is started again takes its place back at once: its supervisor
            # knows that the predecessor has ended.
            if member.lost or wanted is not None:
                member.node_id = hello.node_id
                member.incarnation += 1
                return member
        if hello.joins and self.formed and (hello.role == SERVER or self.settings.independent):
            number = 1 + max((n for role, n in self.members if role == hello.role), default=-1)
            self.members[hello.role, number] = Member(
                hello.role, number, hello.node_id, hello.address
            )
            return self.members[hello.role, number]
        return None

    def member_of(self, peer: bytes) -> Member | None:
        """Return the member behind a peer; None for a stranger."""
        return next((each for each in self.members.values() if each.peer == peer), None)

    def _welcome_all(self) -> list[Answer]:
        answers = []
        for peer, request in self._hellos.items():
            member = self.member_of(peer)
            if member is not None:
                body = {"number": member.number, "incarnation": member.incarnation}
                body |= self.describe()
                answers.append(Answer(peer, Message("welcome", request, body=body)))
        self._hellos.clear()
        return answers

    def _refuse_all(self) -> list[Answer]:
        answers = [
            _refuse(peer, request, self.failure, failed=True)
            for peer, request in self._hellos.items()
        ]
        self._hellos.clear()
        return answers


def _refuse(peer: bytes, request: int, why: str, *, failed: bool = False) -> Answer:
    """Return a refusal; `failed`: the fault is not that of the process which is refused."""
    return Answer(peer, Message("refused", request, body={"why": why, "failed": failed}))
