"""The ranks of a job meet and connect, by the real code, among strangers and losses.

The exchange, its server, the links, the proofs and the transport are the real ones, upon the
sockets of a world; connections of ranks of one host, beside those of arrays, are left out.
"""

from __future__ import annotations

from functools import partial

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting.launch import OWN, Launch
from hvdlite.common.meeting.meet import ServedMeeting
from hvdlite.common.runtime.connect import SECRET, connect
from hvdlite.common.settings.config import Config
from tests.simulation.start import outside
from tests.simulation.start.laws import AGREE, ENDS, LEFT, PROGRESS, Rank, look_at, watched
from tests.simulation.start.net import Host, Net, Node, here
from tests.simulation.start.programs import SERVER, Hitch, Start, Visitor
from tests.simulation.start.sockets import Socket
from tests.simulation.start.visitors import A_SECRET, GuestOfRanks
from tests.simulation.world import BrokenError, Process, World

PORT = 2222
PATIENCE_SECONDS = 12.0  # Which ranks may need beyond their limit to tell each other, and to leave.
PROOF_SENDS = 1  # Of one end, before it uses a connection.


class Starting:
    """The start of a job whose ranks are on these hosts."""

    def __init__(
        self,
        world: World,
        start: Start,
        topology: Topology,
        *,
        fan_out: int,
        latency: float,
        bytes_per_second: float,
    ) -> None:
        self.world, self.start, self.topology = world, start, topology
        self.fan_out = fan_out
        hosts = len(topology.hosts)
        self.net = Net(world, hosts, latency, bytes_per_second, start.window)
        self._launcher = Node(self.net, "launcher", self.net.hosts[0])
        self.ranks = [
            Rank(number, Node(self.net, f"rank {number}", self.net.hosts[topology.host_of[number]]))
            for number in range(topology.size)
        ]
        self.net.on_send = self._count
        self._sends = 0
        size = len(self.ranks)
        self.doubled = {each.which % size for each in start.visitors if each.kind == "double"}
        self._lost_links = False  # Some were cut that both ends, or one, may have used already.
        self._nodes = [self._launcher, *(rank.node for rank in self.ranks)]
        self._guests: list[GuestOfRanks] = []
        self._over = False
        self._failure: BrokenError | None = None

    def run(self) -> bool:
        """Let the ranks meet; return whether all have connected. Raises `BrokenError`."""
        with outside.around(self.net, self.fan_out), watched():
            try:
                self._run()
            finally:  # While what is outside of them is there.
                for node in (*self._nodes, *(guest.node for guest in self._guests)):
                    node.kill()
        return self._have_all("connected")

    def _run(self) -> None:
        for visitor in self.start.visitors:
            self.world.after(visitor.at, partial(self._visit, visitor))
        if self.start.served:
            outside.start_process(self._launcher, "launcher", self._serve)
        for rank, seconds in zip(self.ranks, self.start.late, strict=True):
            self.world.after(seconds, partial(self._begin, rank))
        for hitch in self.start.hitches:
            if not hitch.sends:
                self.world.after(hitch.at, partial(self._befall, hitch))
        self.world.run(lambda: self._fails or self._have_all("ended"))
        self._check()
        self._over = True
        for process in self._processes():
            process.poke()
        self.world.run(self._nothing_is_left)
        self._check_left()

    @property
    def _fails(self) -> bool:
        self._failure = self._failure or self.net.failure
        return self._failure is not None

    @property
    def may_fail(self) -> bool:
        """Whether something has happened that ranks need not survive."""
        dead = any(rank.killed for rank in self.ranks)
        return self.start.may_fail or self._lost_links or dead

    def _have_all(self, what: str) -> bool:
        return all(getattr(rank, what) or rank.killed for rank in self.ranks)

    # -- processes

    def meeting_place(self, host: Host) -> tuple[str, int]:
        """Return where somebody on a host may pretend to be the meeting."""
        return (host.address, PORT)

    def _serve(self) -> None:
        """Be the launcher."""
        meeting = ServedMeeting(listen(Address("node0", PORT)), len(self.ranks), A_SECRET)
        here.process.sleep_until(lambda: self._over)
        meeting.close()

    def _begin(self, rank: Rank) -> None:
        if rank.killed:
            return
        rank.begun = self.world.now
        rank.node.environ[SECRET] = A_SECRET
        outside.start_process(rank.node, rank.node.name, partial(self._be, rank))
        limit = self.start.limit_seconds + PATIENCE_SECONDS
        limit += sum(each.seconds for each in self.start.hitches)
        self.world.after(limit, partial(self._look, rank))

    def _look(self, rank: Rank) -> None:
        if not (rank.ended or rank.killed):
            text = f"{rank.node.name} is in init() after {self.world.now - rank.begun:.0f} s"
            self._failure = self._failure or BrokenError(PROGRESS, text)

    def launch(self, number: int, *, size: int = 0, incarnation: str = "") -> Launch:
        """Return what a launcher says of a rank."""
        return Launch(
            OWN, number, size or len(self.ranks), addresses=(Address("node0", PORT),),
            rank_0_serves=not self.start.served, incarnation=incarnation,
        )  # fmt: skip

    def config(self) -> Config:
        return Config(start_timeout_seconds=self.start.limit_seconds, transport="tcp")

    def _be(self, rank: Rank) -> None:
        """Be a rank: connect, say a word to each neighbour, and go."""
        transport = None
        try:
            transport = connect(None, self.launch(rank.number), self.config()).transport
            self.world.tell(rank.node.name, "is connected")
            look_at(self, rank, transport)
            rank.connected = True
        except BrokenError as broken:
            self._failure = broken
        except Exception as error:
            if not rank.killed:
                self._take(rank, error)
        rank.ended = True
        here.process.sleep_until(lambda: self._over)
        if transport is not None:
            transport.close()

    def _take(self, rank: Rank, error: Exception) -> None:
        """Note the error of a rank."""
        if isinstance(error, (HorovodInternalError, ConfigError)):
            self.world.tell(rank.node.name, f"fails: {error}")
            rank.error = error
            return
        self._failure = BrokenError(ENDS, f"{rank.node.name}: {type(error).__name__}: {error}")
        self._failure.__cause__ = error

    # -- what happens

    def _visit(self, visitor: Visitor) -> None:
        if not self._over:
            self._guests.append(GuestOfRanks(self, visitor))

    def _count(self, connection: Socket) -> None:
        """Take note of something that is sent, by which the time has perhaps come for a hitch."""
        if connection.node not in self._nodes:
            return
        self._sends += 1
        for hitch in self.start.hitches:
            if hitch.sends == self._sends:
                self.world.after(0.0, partial(self._befall_sender, hitch, connection))

    def _befall_sender(self, hitch: Hitch, connection: Socket) -> None:
        rank = next((each for each in self.ranks if each.node is connection.node), None)
        if hitch.kind == "cut" and connection.peer is not None and not self._over:
            self._lost_links |= max(connection.sends, connection.peer.sends) > PROOF_SENDS
            self.world.tell(connection.node.name, f"loses {connection.peer.node.name}")
            connection.peer.reset()
            connection.reset()
        elif hitch.kind == "kill" and rank is not None and not rank.ended:
            self.world.tell(rank.node.name, "is killed")
            self._kill(rank)

    def _befall(self, hitch: Hitch) -> None:
        rank, other = self.ranks[hitch.rank], self._node(hitch.other)
        if rank.ended or rank.killed:
            return
        self.world.tell(rank.node.name, f"{hitch.kind} {other.name} {hitch.seconds:.3f}")
        match hitch.kind:
            case "kill":
                self._kill(rank)
            case "lose":
                for number in self.topology.peers(rank.number):
                    self._kill(self.ranks[number], silent=True)
                if rank.node.host is self._launcher.host:
                    self._launcher.kill()
            case "cut":
                self.net.cut(rank.node, other)
            case "stop":
                for process in rank.node.processes:
                    process.stopped = True
                    self.world.after(hitch.seconds, process.go_on)
            case "stall":
                self.net.stall(rank.node.host, other.host, hitch.seconds)

    def _node(self, number: int) -> Node:
        if number != SERVER:
            return self.ranks[number].node
        return self._launcher if self.start.served else self.ranks[0].node

    def _kill(self, rank: Rank, *, silent: bool = False) -> None:
        if silent and not rank.node.host.down:
            self.net.lose(rank.node.host)
        rank.killed = True
        rank.node.kill()

    # -- invariants

    def _check(self) -> None:
        """Check how the start has ended."""
        if self._failure is not None:
            raise self._failure
        if not self._have_all("ended"):
            raise BrokenError(PROGRESS, "nothing will happen any more")
        if not self.may_fail:
            for rank in self.ranks:
                if rank.error is not None:
                    raise BrokenError(ENDS, f"{rank.node.name} fails: {rank.error}")
        found = [rank.cards for rank in self.ranks if rank.connected]
        if any(cards != found[0] for cards in found):
            raise BrokenError(AGREE, f"ranks have other cards: {found}")

    def _processes(self) -> list[Process]:
        return [process for node in self._nodes for process in node.processes]

    def _nothing_is_left(self) -> bool:
        return all(process.ended or process.killed for process in self._processes())

    def _check_left(self) -> None:
        if not self._nothing_is_left():
            left = [each.name for each in self._processes() if not (each.ended or each.killed)]
            raise BrokenError(ENDS, f"{left} do not end")
        for node in self._nodes:
            if node.lives and (node.open or node.folders):
                left = [*(type(each).__name__ for each in node.open.values()), *node.folders]
                raise BrokenError(LEFT, f"{node.name} leaves open: {left}")
