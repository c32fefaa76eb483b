"""Those who come to a job, where its processes listen, and are none of them."""

from __future__ import annotations

import select
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import ConfigError, HorovodInternalError, ProtocolError
from hvdlite.common.connections import prove
from hvdlite.common.connections.prove import Challenge, Claim, Party
from hvdlite.common.runtime.connect import SECRET, connect
from tests.simulation.start import outside
from tests.simulation.start.epolls import Epoll
from tests.simulation.start.net import Host, Net, Node, here
from tests.simulation.start.programs import Visitor
from tests.simulation.start.sockets import Socket
from tests.simulation.world import BrokenError

if TYPE_CHECKING:
    from tests.simulation.start.starting import Starting

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
STRANGERS = "no stranger gets in"
A_SECRET = "a secret"
PRETENDERS = ("secret", "other job", "size", "double")
PRETENDER_SECONDS = 2.0
FLOOD = 100  # More than a meeting of a few ranks has room for.


class Guest:
    """The process of one visitor, which speaks with sockets."""

    family = socket.AF_INET

    def __init__(self, net: Net, visitor: Visitor, host: Host) -> None:
        self.visitor, self._net = visitor, net
        self.node = Node(net, visitor.kind, host, is_stranger=visitor.kind != "double")
        self._lot = net.world.lot
        outside.start_process(self.node, visitor.kind, self._run)

    def _run(self) -> None:
        try:
            self._visit()
        except (OSError, ProtocolError) as error:
            self._tell(f"ends: {error}")
        finally:
            self.node.end()

    def _tell(self, text: str) -> None:
        self._net.world.tell(self.visitor.kind, text)

    def _visit(self) -> None:
        kind, seconds = self.visitor.kind, self.visitor.seconds
        for connection in [self._call() for _ in range(FLOOD if kind == "flood" else 1)]:
            self._say(kind, connection)
        self._sleep(seconds)

    def _call(self) -> Socket:
        """Return a connection to one of those that listen."""
        near = self.family == socket.AF_UNIX
        found = [each for each in self._net.listening.values()
                 if each.family == self.family and not each.node.is_stranger
                 and not (near and each.node.host is not self.node.host)]  # fmt: skip
        connection = outside.new_socket(self.family)
        if found:
            target = found[self.visitor.which % len(found)]
            self._tell(f"comes to {target.node.name}")
            connection.connect_ex(target.name)
            self._wait(connection, WRITE, 5.0)
        return connection

    def _say(self, kind: str, connection: Socket) -> None:
        if kind == "garbage":
            words = (b"GET / HTTP/1.1\r\n\r\n", self._lot.randbytes(600), prove.MAGIC + bytes(600))
            connection.send(self._lot.choice(words))
        elif kind in ("half", "replay", "claim"):
            challenge = Challenge.unpack(self._read(connection, prove.CHALLENGE.size))
            claim = prove.prove_claim(b"no secret", challenge, self.claim())
            claims = [each for each in self._net.claims if len(each) == len(claim)]
            if kind == "replay" and claims:
                claim = self._lot.choice(claims)
            connection.send(claim[: len(claim) // (2 if kind == "half" else 1)])
            self._wait(connection, READ, self.visitor.seconds)
            connection.send(prove.GO)

    def claim(self) -> Claim:
        """Return what it claims, without a proof that holds."""
        return Claim.new(Party(b"no secret", prove.MAGIC.decode(), ""), b"")

    def _read(self, connection: Socket, count: int) -> bytes:
        body = b""
        while len(body) < count and self._wait(connection, READ, 2.0):
            part = connection.recv(count - len(body))
            if not part:
                raise OSError(0, "the end")
            body += part
        return body.ljust(count, b"\0")

    def _sleep(self, seconds: float) -> None:
        here.process.sleep_until(lambda: False, seconds)

    def _wait(self, connection: Socket, events: int, seconds: float) -> bool:
        """Wait for events of a connection, or its end; return whether there are any."""
        epoll = Epoll()
        epoll.register(connection.fileno(), events)
        found = epoll.poll(seconds)
        epoll.close()
        return bool(found)


class GuestOfRanks(Guest):
    """The process of one that comes to the meeting of ranks."""

    def __init__(self, starting: Starting, visitor: Visitor) -> None:
        self._starting = starting
        net = starting.net
        host = net.hosts[visitor.which % len(net.hosts)]
        if visitor.kind == "double":
            host = starting.ranks[visitor.which % len(starting.ranks)].node.host
        super().__init__(net, visitor, host)

    def _visit(self) -> None:
        if self.visitor.kind in PRETENDERS:
            self._pretend(self.visitor.kind)
        elif self.visitor.kind == "server":
            self._serve(self.visitor.seconds)
        else:
            super()._visit()

    def _pretend(self, kind: str) -> None:
        """Come as a rank, by the code of one."""
        starting, size = self._starting, len(self._starting.ranks)
        number = self.visitor.which % size
        if not (number or starting.start.served or kind == "double"):
            number = 1  # What rank 0 says holds for the others, where it is the one that serves.
        self.node.environ[SECRET] = A_SECRET + "!" * (kind == "secret")
        incarnation = "another start" * (kind == "other job")
        size += kind == "size"
        launch = starting.launch(number, size=size, incarnation=incarnation)
        config = replace(starting.config(), start_timeout_seconds=PRETENDER_SECONDS)
        try:
            connect(None, launch, config).transport.close()
        except (HorovodInternalError, ConfigError) as error:
            self._tell(f"fails: {error}")
        else:
            if kind != "double":
                text = f"{kind}: a process that is no rank of the job has connected as {number}"
                raise BrokenError(STRANGERS, text)

    def _serve(self, seconds: float) -> None:
        """Be where the ranks meet, and say what one may say that knows no secret."""
        listener = outside.create_server(self._starting.meeting_place(self.node.host))
        self._tell("listens where the ranks meet")
        until = self._starting.world.now + seconds
        while (left := until - self._starting.world.now) > 0:
            if not self._wait(listener, READ, left):
                break
            connection, _ = listener.accept()
            challenge = Challenge.new()
            connection.send(challenge.pack())
            body = self._read(connection, prove.PROVEN_CLAIM_BYTES)
            if len(body) == prove.PROVEN_CLAIM_BYTES:
                claim = Claim.unpack(body[: prove.CLAIM.size])
                connection.send(prove.acceptance(b"no secret", challenge, claim))
