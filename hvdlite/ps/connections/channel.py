"""How messages of the parameter server are sent: by the connections of hvdlite, and only here.

A `Listener` has many peers, a `Caller` has one, with which it connects again by itself. Before a
byte of a message is read, both ends have proved that they know the token, and in which roles (see
`hvdlite.common.connections.prove`); without encryption, what follows is as safe as the network.

A peer is known by its name, which it has proved with its connection. Nobody else can speak in that
name; who proves it on another connection takes the place of its predecessor, which is closed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from hvdlite.common.base.errors import ConfigError, HorovodVersionMismatchError, ProtocolError
from hvdlite.common.connections import listener as doors
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import (
    BACKLOG,
    Address,
    Target,
    listen,
    listen_everywhere,
    look_up,
    parse_address,
)
from hvdlite.common.connections.dial import Dial, Failure, Limits, Refused
from hvdlite.common.connections.frames import no_memory
from hvdlite.common.connections.link import Arrays, Link
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import Claim, Party
from hvdlite.common.settings.logs import log
from hvdlite.ps.connections.encryption import Encryption
from hvdlite.ps.connections.messages import (
    FRAME_BYTES,
    MOST_HEAD_BYTES,
    Buffer,
    Message,
    check_arrays,
    head_of,
    ignore,
    pack,
    parse,
    with_arrays,
)
from hvdlite.ps.connections.shared_memory import SharedMemory, Sharing, swap

MEMBER = "ps member"  # The role of every end that connects.
OTHER_TOKEN = "HVDLITE_PS_TOKEN is another one there: give all processes the same"
LINGER_SECONDS = 0.2  # How long last answers may take when a listener closes.
DEAD_SECONDS = 30.0  # After which a host that does not answer any more counts as gone.
LIMITS = Limits(connect_seconds=5.0, prove_seconds=60.0)  # A server may be busy.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.5  # Between two dials.
# Answers for which a peer that does not read has no room: it asks again when it does.
MOST_QUEUED_BYTES = 4 << 30
# With a message: a server that hands a table over sends all of its blocks with their state.
MOST_ARRAYS = 1 << 19


def _memory(messages: Sequence[Message], sizes: list[int]) -> Sequence[memoryview]:
    """Return memory for the arrays of messages; pages that nothing comes into cost nothing."""
    check_arrays(messages, len(sizes))
    try:
        return [memoryview(np.empty(size, np.uint8)) for size in sizes]  # type: ignore[arg-type]
    except (MemoryError, ValueError) as error:
        raise ProtocolError(f"it sent arrays of {sum(sizes)} bytes: {error}") from None


def _whole(
    messages: Sequence[Message], arrays: Arrays, sharing: Sharing | None
) -> Iterator[Message]:
    """Return messages with their payloads, wherever they are."""
    found = with_arrays(messages, [memoryview(array) for array in arrays])
    return found if sharing is None else map(sharing.unpack, found)


class _Outbox:
    """What goes over a link with the next `flush`, as far as it is not on its way.

    With `sharing`, the other end is on this host.
    """

    def __init__(self, link: Link, sharing: Sharing | None) -> None:
        link.gathers = True
        self.link, self.sharing = link, sharing
        self._packed: list[bytes] = []  # Of the next frame.
        self._nbytes = 0

    def send(self, message: Message) -> None:
        if self.sharing is not None:
            message = self.sharing.pack(message)
        packed, arrays = pack(message)
        if self._nbytes + len(packed) > FRAME_BYTES:
            self.flush()
        self._packed.append(packed)
        self._nbytes += len(packed)
        if arrays:  # They follow the last message of a frame.
            self._end_frame(arrays)

    def _end_frame(self, arrays: Sequence[Buffer] = ()) -> None:
        if self._packed:
            self.link.send_head(head_of(self._packed), arrays)
            self._packed, self._nbytes = [], 0

    def flush(self) -> None:
        self._end_frame()
        self.link.flush()

    @property
    def is_empty(self) -> bool:
        """Whether the other end has taken all."""
        return not self._packed and not self.link.queued_bytes

    def close(self) -> None:
        """End the connection; views of shared memory keep it."""
        self.link.close()
        if self.sharing is not None:
            self.sharing.close()


class Listener:
    """The listening end of a process with this role, at `address`, whose port may be 0.

    Without a host, it listens at all addresses. Where it does not carry arrays, none are received.
    """

    def __init__(
        self, address: Address, role: str, token: bytes = b"", *, encrypted: bool = False,
        carries: bool = True,
    ) -> None:  # fmt: skip
        self._encryption = Encryption(token) if encrypted else None
        try:
            own = listen(address) if address.host else listen_everywhere(address.port)
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error}") from error
        host, port = own.getsockname()[:2]
        if not token and not ipaddress.ip_address(host).is_loopback:
            own.close()
            raise ConfigError(
                f"without a token, others must not reach this {role}, and {address} is not the "
                "loopback interface: set HVDLITE_PS_TOKEN"
            )
        self.address = str(Address(host, port))
        self.memory: SharedMemory | None = None
        self._loop = Loop()
        self._liveness = Liveness(self._loop, DEAD_SECONDS)
        self._party = Party(token, f"ps {role}", MEMBER)
        self._arrays = _memory if carries else no_memory
        self._peers: dict[bytes, _Outbox] = {}
        self._begins: dict[bytes, Callable[[], None]] = {}  # Ends what has not come to messages.
        self._received: deque[tuple[bytes, Message]] = deque()
        self._unsent: dict[_Outbox, None] = {}  # With answers that go together.
        self._doors = [self._open(own)]

    def _open(self, own: socket.socket, *, same_user: bool = False) -> doors.Listener:
        return doors.Listener(
            self._loop, [own], self._party, self._let_in, same_user=same_user,
            other_secret="has another HVDLITE_PS_TOKEN",
        )  # fmt: skip

    def open_memory(self) -> None:
        """Let processes of this host come by a Unix socket, and share their memory.

        The address then has a second word, by which they find it. Where the system has no such
        memory, nothing changes.
        """
        try:
            memory = SharedMemory()
        except OSError:
            return
        name = f"hvdlite-ps-{os.urandom(16).hex()}"  # It leaves no file.
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        near.bind(f"\0{name}")
        near.listen(BACKLOG)
        self._doors.append(self._open(near, same_user=True))
        self.memory = memory
        self.address += f" {name}"

    # -- peers

    def _let_in(self, claim: Claim, connection: socket.socket) -> None:
        self._liveness.prepare(connection)
        name = claim.body
        self._begins.pop(name, ignore)()
        if connection.family == socket.AF_UNIX and self.memory is not None:
            encrypt = partial(self._encrypt, name, connection)
            self._begins[name] = swap(self._loop, connection, self.memory, encrypt)
        else:
            self._encrypt(name, connection, None)

    def _encrypt(self, name: bytes, connection: socket.socket, sharing: Sharing | None) -> None:
        begin = partial(self._begin, name, sharing)
        if self._encryption is None:
            begin(connection)
        else:

            def fail(_why: str) -> None:
                if sharing is not None:
                    sharing.close()

            self._begins[name] = self._encryption.begin(
                self._loop, connection, listens=True, done=begin, failed=fail
            )

    def _begin(self, name: bytes, sharing: Sharing | None, connection: socket.socket) -> None:
        self._begins.pop(name, None)
        self.drop(name)

        def ended(reason: str) -> None:
            if link.at_fault:
                log.warning("the connection of %s is closed: %s", name.decode(), reason)
            if self._peers.get(name) is outbox:
                self.drop(name)

        link = Link(
            self._loop, connection, received=partial(self._receive, name, sharing), ended=ended,
            most_bytes=MOST_HEAD_BYTES, memory=self._arrays, unpacker=parse,
            most_arrays=MOST_ARRAYS, liveness=self._liveness,
        )  # fmt: skip
        outbox = self._peers[name] = _Outbox(link, sharing)

    def drop(self, name: bytes) -> None:
        """Close the connection of a peer, which may prove itself again."""
        if name in self._peers:
            self._peers.pop(name).close()

    def _receive(
        self, name: bytes, sharing: Sharing | None, messages: Sequence[Message], arrays: Arrays
    ) -> None:
        self._received += [(name, message) for message in _whole(messages, arrays, sharing)]

    # -- messages

    def awake_seconds(self) -> float:
        """See `Loop.awake_seconds`."""
        return self._loop.awake_seconds()

    def receive(self, seconds: float) -> tuple[bytes, Message] | None:
        """Return the next message and its sender; None where none comes within `seconds`.

        Before it waits, it lets go what was sent.
        """
        if seconds > 0 and not self._received:
            self._flush()
        end = self._loop.now() + seconds
        left = seconds
        while not self._received:
            self._loop.run_once(max(0.0, left))
            left = end - self._loop.now()
            if left <= 0:
                break
        return self._received.popleft() if self._received else None

    def send(self, name: bytes, message: Message) -> None:
        """Send a message when what is here is answered; to a peer that has gone, it is lost.

        Its payloads must not change.
        """
        outbox = self._peers.get(name)
        if outbox is not None and outbox.link.queued_bytes <= MOST_QUEUED_BYTES:
            outbox.send(message)
            self._unsent[outbox] = None

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for outbox in unsent:
            outbox.flush()

    def close(self) -> None:
        """Close all connections when the last answers have been sent."""
        for door in self._doors:
            door.close()
        for give_up in self._begins.values():
            give_up()
        self._flush()
        links = [outbox.link for outbox in self._peers.values()]
        end = self._loop.now() + LINGER_SECONDS
        for link in links:
            link.leave(LINGER_SECONDS)
        while any(link.open for link in links) and (left := end - self._loop.now()) > 0:
            self._loop.run_once(left)
        for name in list(self._peers):
            self.drop(name)
        self._loop.close()
        if self.memory is not None:
            self.memory.close()


class Caller:
    """The connecting end, with the name `name`, in a thread that runs `loop`.

    `address` is ``host:port``, or ``@`` and the name of a Unix socket whose other end shares its
    memory for `memory`; where memory does not come, `far` is the address from then on. Its
    functions are called in the thread: `received` with each message, `connected` after each proof
    of the other end, which then is of that `role`, and `refused` where it has another token or is
    another version of hvdlite.
    """

    def __init__(
        self, loop: Loop, address: str, role: str, name: bytes, token: bytes = b"",
        *, encryption: Encryption | None = None, memory: SharedMemory | None = None,
        far: str = "", refused: Callable[[Exception], None] = ignore,
    ) -> None:  # fmt: skip
        self.address, self._far = address, far
        self.sharing: Sharing | None = None  # With the process at the address.
        self.trouble = ""  # Why the last dial has failed.
        self.received: Callable[[Message], None] = ignore
        self.connected: Callable[[], None] = ignore
        self.refused = refused
        self._loop, self._name = loop, name
        self._encryption, self._memory = encryption, memory
        self._party = Party(token, MEMBER, f"ps {role}")
        self._liveness = Liveness(loop, DEAD_SECONDS)
        self._pause = FIRST_PAUSE_SECONDS
        self._began = 0.0  # When the other end had proved itself last.
        self._attempt: Dial | None = None
        self._give_up: Callable[[], None] = ignore  # What follows the proofs.
        self._outbox: _Outbox | None = None  # Of the link, where there is one.
        self._closed = False
        loop.post(self._dial)

    def _dial(self) -> None:
        if self._closed:
            return
        if self.address.startswith("@"):
            self._try([Target(socket.AF_UNIX, b"\0" + self.address[1:].encode())])
        else:
            address = parse_address(self.address, "the address of a process")
            look_up(self._loop, address, self._try)

    def _try(self, found: list[Target] | OSError) -> None:
        if isinstance(found, OSError):  # The name of a host may come late.
            self._fail([Failure(Target(socket.AF_UNSPEC, self.address.rsplit(":", 1)), found)])
        elif not self._closed:
            self._attempt = Dial(
                self._loop, found, self._party, self._name, self._begin, self._fail, LIMITS
            )

    def _fail(self, failures: Sequence[Failure]) -> None:
        self._attempt = None
        self.trouble = "; ".join(map(str, failures))
        self._dial_again()
        for error in (failure.error for failure in failures):
            if isinstance(error, HorovodVersionMismatchError):
                self.refused(error)
            elif isinstance(error, Refused) and error.code == prove.OTHER_SECRET:
                self.refused(ConfigError(OTHER_TOKEN))

    def _dial_again(self) -> None:
        """Dial after a pause, which grows."""
        if not self._closed:
            self._loop.call_after(self._pause, self._dial)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def _begin(self, connection: socket.socket, _target: Target) -> None:
        self._attempt, self._began = None, self._loop.now()
        self._liveness.prepare(connection)
        if self._memory is None:
            self._encrypt(connection)
            return

        def share(sharing: Sharing) -> None:
            self._share(sharing)
            self._encrypt(connection)

        def go_far(why: str) -> None:
            # It would hardly come next time, as where one of both ends has no descriptor left: from
            # now on messages go with all their bytes.
            log.info("memory is not shared with the process at %s: %s", self._far, why)
            self.address, self._memory = self._far, None
            self._lose(why)

        self._give_up = swap(self._loop, connection, self._memory, share, go_far)

    def _encrypt(self, connection: socket.socket) -> None:
        if self._encryption is None:
            self._use(connection)
        else:
            self._give_up = self._encryption.begin(
                self._loop, connection, listens=False, done=self._use, failed=self._lose
            )

    def _use(self, connection: socket.socket) -> None:
        link = Link(
            self._loop, connection, received=self._receive, ended=self._lose,
            most_bytes=MOST_HEAD_BYTES, memory=_memory, unpacker=parse, most_arrays=MOST_ARRAYS,
            liveness=self._liveness,
        )  # fmt: skip
        self._outbox = _Outbox(link, self.sharing)
        self.connected()

    def _lose(self, reason: str) -> None:
        self._outbox = None
        self._share(None)
        self.trouble = reason or "it has closed the connection"
        if self._loop.now() - self._began > LONGEST_PAUSE_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        self._dial_again()  # The other end may refuse each time what is sent again.

    def _receive(self, messages: Sequence[Message], arrays: Arrays) -> None:
        outbox = self._outbox
        for message in _whole(messages, arrays, self.sharing):
            self.received(message)
            if self._closed or self._outbox is not outbox:  # By what this one has said.
                return

    @property
    def is_connected(self) -> bool:
        """Whether the other end is there, and has proved itself."""
        return self._outbox is not None

    @property
    def takes(self) -> bool:
        """Whether the other end is there, and has taken all that was sent so far."""
        return self._outbox is not None and self._outbox.link.says and self._outbox.is_empty

    def _share(self, sharing: Sharing | None) -> None:
        if self.sharing is not None:
            self.sharing.close()
        self.sharing = sharing

    def send(self, message: Message) -> None:
        """Send a message with the next `flush`; while nobody is there, it is lost.

        Its payloads must not change.
        """
        if self._outbox is not None:
            self._outbox.send(message)

    def flush(self) -> None:
        """Let go what was sent."""
        if self._outbox is not None:
            self._outbox.flush()

    def close(self) -> None:
        """Close the connection at once; views of shared memory keep it."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        self._give_up()
        if self._outbox is not None:
            self._outbox.link.close()
            self._outbox = None
        self._share(None)
