"""Servers come and go while workers train: the decisions of the scheduler.

A change is a barrier. It begins only when every member is there, is in the present layout, and
has all tables of which it is to have something: a worker that comes again has declared those in
which it took part, and a server that comes again has begun its own. Then

1. all workers hold their pushes back, and say which step of each table each would push next;
2. all servers say which steps they have. Some may have a step more than others, and than a worker
   that was lost meanwhile and is to make it again;
3. the border of a worker is the highest of its steps, and in sync that of all workers. Who is
   behind goes on up to its border. So all servers have the same pushes, each of them once. In ssp
   nobody waits on the way there: it makes steps again that some servers have, whose pulls they
   had answered before, and no clock goes back;
4. every server that stands at the border sends what others keep in the next layout to them. Those
   write it down, and say that they are ready;
5. when all are ready, the next layout counts, as soon as the scheduler has written that down.

The old tables stay as they are until then, and whoever is lost, comes, leaves or is silent gives
the change up: all go on in the present layout. So does one that takes too long, for a while. A
loss after that is the return of any member.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdlite.common.settings.logs import log
from hvdlite.ps.cluster.membership import Membership
from hvdlite.ps.connections.messages import SERVER, WORKER
from hvdlite.ps.layouts.layout import Layout, rebalance
from hvdlite.ps.scheduler.registry import Registry
from hvdlite.ps.tables.clocks import SYNC

SILENT_SECONDS = 8.0  # Several beats: servers come and go only while all members are heard of.
WARNING_SECONDS = 60.0  # For which a change waits until that is said, and until it is said again.
REMEDY = (
    "A worker that has come again declares all tables in which it took part (make the same "
    "optimizers, and start the same tensors)"
)
# A change takes so long at most, and twice as long each time that it was not enough; then all go on
# for a while before it begins again.
CHANGE_SECONDS, PAUSE_SECONDS = 15.0, 5.0


class Standing(NamedTuple):
    """What a member says in its beats."""

    layout: int = 0  # In which it is.
    tables: Collection[str] = ()  # That it has begun.
    load: int = 0  # The last one that it has made, as a server.


class Obstacle:
    """What a change or a load waits for."""

    def __init__(self) -> None:
        self._what, self._warns_at = "", 0.0

    def is_to_be_said(self, what: str, now: float) -> bool:
        """Return whether the same has been in the way for long; empty: nothing is."""
        if what != self._what:
            self._what, self._warns_at = what, now + WARNING_SECONDS
        if not what or now < self._warns_at:
            return False
        self._warns_at = now + WARNING_SECONDS
        return True


@dataclass
class Change:
    """One attempt to get to the next layout. Its `identity` is that of no other attempt."""

    identity: int
    layout: Layout
    old_layout: Layout
    modes: Mapping[str, str]  # Of each table.
    members: Mapping[Any, Any]  # Who takes part; another roll gives the change up.
    clocks: dict[int, Mapping[str, int]] = field(default_factory=dict)  # Of workers that hold back.
    # Of servers: table -> its version, and the finished steps of each worker.
    stands: dict[int, Mapping[str, tuple[int, Mapping[int, int]]]] = field(default_factory=dict)
    is_quiet: bool = False  # No push is under way.
    ready: set[int] = field(default_factory=set)  # Servers that have what they need.
    borders: dict[str, dict[int, int]] | None = None  # Table -> worker -> its first step after it.

    def report(self, worker: int, clocks: Mapping[str, int]) -> None:
        """Take note that a worker holds its pushes back, and of the next step of each table."""
        if not self.is_quiet:
            self.clocks[worker] = clocks

    def stand(self, server: int, tables: Mapping[str, tuple[int, Mapping[int, int]]]) -> None:
        """Take note of what a server of the old layout has while no push is under way."""
        if self.is_quiet and self.borders is None:
            self.stands[server] = tables

    def look(self, workers: Collection[int]) -> bool:
        """Go on where all have reported; return whether the next layout can count."""
        self.is_quiet = self.is_quiet or self.clocks.keys() >= set(workers)
        old = range(self.old_layout.num_servers)
        if self.is_quiet and self.borders is None and self.stands.keys() >= set(old):
            self.borders = {name: self._border(name, mode) for name, mode in self.modes.items()}
            self.borders = {name: border for name, border in self.borders.items() if border}
        return self.is_ready()

    def is_ready(self) -> bool:
        servers = max(self.layout.num_servers, self.old_layout.num_servers)
        return self.borders is not None and self.ready >= set(range(servers))

    def behind(self) -> list[int]:
        """Return the workers that had steps to make before their borders, sorted."""
        steps = [
            (worker, step - self.clocks[worker][table])
            for table, border in (self.borders or {}).items()
            for worker, step in border.items()
        ]
        return sorted({worker for worker, missing in steps if missing > 0})

    def _border(self, table: str, mode: str) -> dict[int, int]:
        own = {worker: clocks[table] for worker, clocks in self.clocks.items() if table in clocks}
        version = 0
        for stands in self.stands.values():
            of_server, finished = stands.get(table, (0, {}))
            version = max(version, of_server)
            own = {worker: max(step, finished.get(worker, 0)) for worker, step in own.items()}
        # Elsewhere a worker may have made all its steps: none is asked for without need.
        return dict.fromkeys(own, max([*own.values(), version])) if mode == SYNC else own

    def describe(self) -> dict[str, Any]:
        """Return what all members hear of it."""
        borders: dict[str, list[tuple[int, int]]] | None = None
        if self.borders is not None:  # The keys of a message are strings.
            borders = {name: sorted(border.items()) for name, border in self.borders.items()}
        return {
            "identity": self.identity, "old_servers": self.old_layout.num_servers,
            "servers": self.layout.num_servers, "is_quiet": self.is_quiet, "borders": borders,
        }  # fmt: skip


class Changes:
    """Decides when a change begins, and whether it ends or is given up.

    `new_number` returns a number that is higher than those before, and `keep` whether the state of
    the scheduler could be written down.
    """

    def __init__(
        self, membership: Membership, registry: Registry, new_number: Callable[[], int],
        keep: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._membership, self._registry = membership, registry
        self._new_number, self._keep = new_number, keep
        self.wanted = registry.layout.num_servers
        self.current: Change | None = None
        self.standings: dict[bytes, Standing] = {}  # By peers.
        self._obstacle = Obstacle()  # To the change that is wanted.
        self._seconds = CHANGE_SECONDS
        self._begins = self._ends = 0.0  # At the earliest, and at the latest.

    def want(self, servers: Any) -> None:
        """Let fewer servers be left. Raises ValueError where they cannot."""
        present = self._registry.layout.num_servers
        if unknown := self._find_unknown():
            raise ValueError(unknown)
        if name := self._registry.immovable():
            raise ValueError(
                f"the tensors of the table '{name}' are whole, and do not move to other servers: "
                "only those of partition='element' do"
            )
        if type(servers) is not int or not 1 <= servers <= present:
            raise ValueError(
                f"{servers!r} servers cannot be left of {present}: give 1 to {present}, and start "
                "a server with HVDLITE_PS_JOIN=1 to have one more"
            )
        self.wanted = servers

    def of(self, identity: int) -> Change | None:
        """Return the change that a message is about, unless it was given up."""
        change = self.current
        return change if change and change.identity == identity else None

    def look(self, now: float, *, somebody_loads: bool) -> None:
        """Begin a change of the number of servers, go on with it, or give it up."""
        members = self._membership.members
        for number in [n for (role, n), each in members.items() if role == SERVER and each.lost]:
            del members[SERVER, number]  # It has come, and was lost before it had anything.
            self.current, self.wanted = None, self._registry.layout.num_servers
        layout, wanted, change = self._registry.layout, self.wanted, self.current
        if somebody_loads:
            self.current = None  # It is made after the load.
            return
        if change is None and (wanted == layout.num_servers or self._registry.immovable()):
            return
        if now < self._begins:
            return
        obstacle = self._find_obstacle(max(wanted, layout.num_servers), now)
        if change is not None and (obstacle or change.members != self._membership.roll()):
            change = self.current = None  # What a server had taken may be lost with it.
        if change is not None and now >= self._ends and not change.is_ready():
            return self._pause(change, now)
        if self._obstacle.is_to_be_said(obstacle, now):
            remedy = f". {REMEDY}, or leaves (ps.leave)" if obstacle.startswith(WORKER) else ""
            log.warning(
                "the cluster is to have %d servers, and goes on with %d: %s for %g seconds%s",
                wanted, layout.num_servers, obstacle, WARNING_SECONDS, remedy,
            )  # fmt: skip
        if change is None and not obstacle:
            self._begin(now)
        elif change is not None and change.look(self._membership.workers()):
            self._end(change)

    def _begin(self, now: float) -> None:
        self._ends = now + self._seconds
        number, layout = self._new_number(), self._registry.layout
        following, roll = rebalance(layout, self.wanted), self._membership.roll()
        self.current = Change(number, following, layout, self._registry.modes(), roll)

    def _end(self, change: Change) -> None:
        """Let the next layout count, if that can be written down."""
        registry = self._registry
        before = registry.layout, registry.version
        registry.layout, registry.version = change.layout, registry.version + 1
        if not self._keep():  # It counts only when a scheduler that comes again knows of it.
            registry.layout, registry.version = before
            return
        self._membership.servers_in_use = change.layout.num_servers
        self.current, self._seconds = None, CHANGE_SECONDS

    def _pause(self, change: Change, now: float) -> None:
        """Give a change up that takes too long, and let all go on before it is tried again.

        A worker that is to make a step before may wait for what others do after the border, or for
        servers that may change no table now, as they do in a load.
        """
        late = ", ".join(f"worker {worker}" for worker in change.behind())
        why = f"{late} has steps to make before" if late else "tables were on their way"
        log.warning(
            "the cluster is to have %d servers, and goes on with %d: %s for %g seconds. It is "
            "tried again in %g seconds",
            self.wanted, self._registry.layout.num_servers, why, self._seconds, PAUSE_SECONDS,
        )  # fmt: skip
        self.current, self._begins = None, now + PAUSE_SECONDS
        self._seconds *= 2

    def _find_obstacle(self, servers: int, now: float) -> str:
        """Return why so many servers cannot come or go now; empty: they can."""
        members, registry = self._membership.members, self._registry
        roll = self._membership.roll()
        peers = {peer for peer, _ in roll.values()}
        self.standings = {peer: each for peer, each in self.standings.items() if peer in peers}
        for number in range(servers):
            if (SERVER, number) not in roll:
                return f"server {number} is not there"
        for (role, number), (peer, _) in roll.items():
            layout, tables, _ = self.standings.get(peer, Standing())
            needed = registry.tables_of(number) if role == WORKER else set(registry.modes())
            if role == SERVER and number >= registry.layout.num_servers:
                needed = set()
            if now - members[role, number].heard > SILENT_SECONDS:
                return f"{role} {number} is silent"
            if layout != registry.version:
                return f"{role} {number} has not come to the present layout"
            if missing := needed.difference(tables):
                return f"{role} {number} has not begun the table '{min(missing)}'"
        return self._find_unknown()

    def _find_unknown(self) -> str:
        """Return why tables would be lost in a change: no layout has them; empty: all are known."""
        for (role, number), (peer, _) in self._membership.roll().items():
            standing = self.standings.get(peer, Standing())
            unknown = set(standing.tables).difference(self._registry.modes())
            if role == SERVER and unknown:
                return (
                    "the scheduler, which was started again without --ps-snapshot "
                    f"(HVDLITE_PS_SNAPSHOT), has not known the table '{min(unknown)}' of server "
                    f"{number}"
                )
        return ""
