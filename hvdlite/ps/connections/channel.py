"""How messages of the parameter server are sent: ZeroMQ by pyzmq, and only here.

A listener (ROUTER) has many peers, a caller (DEALER) has one, with which it connects again by
itself. A peer that has come again under its name takes the place of its predecessor.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping, Sequence
from socket import AF_INET, getaddrinfo

from hvdlite.common.base.errors import ConfigError, ProtocolError
from hvdlite.common.connections.prove import CONNECTS, LISTENS
from hvdlite.ps.connections.admission import tagged, untagged
from hvdlite.ps.connections.memory_exchange import MemoryListener, new_name
from hvdlite.ps.connections.messages import Buffer, Message, OtherProtocolError, pack, parse
from hvdlite.ps.connections.shared_memory import SHARED_BYTES, SharedMemory
from hvdlite.ps.connections.shared_payloads import Sharing, session_of

try:
    import zmq
    from zmq.utils import z85
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ImportError(
        "the parameter server needs pyzmq: python -m pip install 'hvdlite[ps]'"
    ) from error

LISTENER_LINGER_MILLISECONDS = 200  # How long last answers may take when a listener closes.
HANDSHAKE_MILLISECONDS = 5000  # For which a connection may be silent before its first message.
MOST_STRANGERS_BYTES = 4096  # Of a message whose sender has not proved yet who it is.
# By an end that listens and has not proved itself, as one that has come again: nothing of it is
# believed, but that it asks for a proof, or lets this process not in.
STRANGERS_SAY = frozenset({"challenge", "refused", "restarted", "unmapped"})

Context = zmq.Context[zmq.Socket[bytes]]


class Listener:
    """The listening end at `address`: ``tcp://host:port``, where the port may be 0, or ``ipc://``."""

    def __init__(self, context: Context, address: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        if self._socket.getsockopt(zmq.MECHANISM) == zmq.CURVE:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.LINGER, LISTENER_LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        _let_ipv6(self._socket, address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen at {address}: {error}") from error
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.decode().rstrip("\0")
        self.memory: SharedMemory | None = None
        self._memory_listener: MemoryListener | None = None
        self.asks_for_proof = False  # Whether who has no key here can only say hello.
        self._keys: dict[bytes, bytes] = {}  # Of peers that have proved that they know the token.

    def open_memory(self) -> None:
        """Let processes of this host come by ``ipc://``, and share their memory.

        The address then has a second word, by which they find both. Where the system has no such
        memory, nothing changes.
        """
        try:
            memory = SharedMemory()
        except OSError:
            return
        name = new_name()
        self._socket.bind(f"ipc://@{name}")
        self.memory, self._memory_listener = memory, MemoryListener(memory, name)
        self.address += f" {name}"

    def let_in(self, peer: bytes, key: bytes) -> None:
        """Hear a peer from now on that has proved itself: what has the tag of its connection."""
        self._keys[peer] = key

    def keep(self, is_member: Callable[[bytes], bool]) -> None:
        """Forget the peers that are no members any more."""
        self._keys = {peer: key for peer, key in self._keys.items() if is_member(peer)}

    def receive(self, seconds: float) -> tuple[bytes, Message] | None:
        """Return the next message and its sender; None where none comes within `seconds`.

        What is no message is dropped, as is what is too large for a stranger's hello: nobody
        must end the listener, or fill its memory with objects. In the name of a peer that has
        proved itself, others can only say hello.
        """
        if not self._socket.poll(round(seconds * 1000)):
            return None
        peer, *frames = self._socket.recv_multipart(copy=False)
        with contextlib.suppress(ProtocolError):
            message = self._read(peer.bytes, [frame.buffer for frame in frames])
            if message is not None and (session := session_of(message)) is not None:
                sharing = self._sharing(peer.bytes)
                if sharing is None or sharing.session != session:
                    self.send(peer.bytes, Message("unmapped", message.request, message.table))
                    return None
                message = sharing.unpack(message)
            return None if message is None else (peer.bytes, message)
        return None

    def _read(self, peer: bytes, frames: list[Buffer]) -> Message | None:
        """Return what these frames say, where their sender may say it."""
        key = self._keys.get(peer)
        head = untagged(frames[0], key, CONNECTS) if key is not None and frames else None
        if head is not None:
            return parse([head, *frames[1:]])
        if self.asks_for_proof and not _is_small(frames):
            return None
        try:
            message = parse(frames)
        except OtherProtocolError:  # It reads in the head of any answer what is spoken here.
            self.send(peer, Message("refused"))
            return None
        return message if key is None or message.kind == "hello" else None

    def send(self, peer: bytes, message: Message) -> None:
        """Send a message, whose payloads must not change; to a peer that has gone, it is lost."""
        sharing = self._sharing(peer)
        # A peer drops what is packed before it knows the session itself.
        if message.kind != "unmapped" and sharing is not None and sharing.heard:
            message = sharing.pack(message)
        head, *payloads = pack(message)
        if (key := self._keys.get(peer)) is not None:
            head = tagged(head, key, LISTENS)
        self._socket.send_multipart([peer, head, *payloads], copy=False)

    def _sharing(self, peer: bytes) -> Sharing | None:
        return None if self._memory_listener is None else self._memory_listener.sharings.get(peer)

    def close(self) -> None:
        """Close the socket when the last answers have been sent."""
        self._socket.close()
        if self._memory_listener is not None:
            self._memory_listener.close()
        if self.memory is not None:
            self.memory.close()


def _is_small(frames: Sequence[Buffer]) -> bool:
    """Return whether a stranger may say this: a hello is one frame of some hundred bytes."""
    return len(frames) == 1 and len(frames[0]) <= MOST_STRANGERS_BYTES


class Caller:
    """The connecting end with the name `identity`."""

    def __init__(self, context: Context, address: str, identity: bytes) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        _let_ipv6(self.socket, address)
        self.socket.connect(address)
        self.address = address
        self.sharing: Sharing | None = None  # With the process at the address.
        self.asks_for_proof = False  # Whether who has not proved itself can only ask for a proof.
        self.heard_unproved = False  # Whether it has answered like a member nonetheless.
        self.key: bytes | None = None  # Of the connection, since this end has proved itself.

    def share(self, sharing: Sharing | None) -> None:
        """Share memory with the process at the address from now on; None: no more."""
        if self.sharing is not None:
            self.sharing.close()
        self.sharing = sharing

    def send(self, message: Message) -> zmq.MessageTracker | None:
        """Send a message. Payloads may change again when the tracker is done.

        Where ZeroMQ has given the peer up, as after a failed handshake, nothing is sent.
        """
        if self.sharing is not None:
            message = self.sharing.pack(message)
        large = any(len(memoryview(part).cast("B")) >= SHARED_BYTES for part in message.payloads)
        head, *payloads = pack(message)
        if self.key is not None and message.kind != "hello":
            head = tagged(head, self.key, CONNECTS)
        with contextlib.suppress(zmq.Again):
            if large:
                words = {"copy": False, "track": True}
                return self.socket.send_multipart([head, *payloads], zmq.NOBLOCK, **words)
            self.socket.send_multipart([head, *payloads], zmq.NOBLOCK, copy=True)
        return None

    def received(self) -> Iterator[Message]:
        """Yield the messages that are here."""
        while self.socket.poll(0):
            frames: Sequence[zmq.Frame] = self.socket.recv_multipart(copy=False)
            buffers: list[Buffer] = [frame.buffer for frame in frames]
            key = self.key
            head = untagged(buffers[0], key, LISTENS) if key is not None and buffers else None
            if head is not None:
                buffers[0] = head
            elif self.asks_for_proof and not _is_small(buffers):
                continue
            message = parse(buffers)
            if self.asks_for_proof and head is None and message.kind not in STRANGERS_SAY:
                self.heard_unproved = True
                continue
            if (session := session_of(message)) is not None:
                if self.sharing is None or self.sharing.session != session:
                    continue  # It is of a process that is gone; the request will be sent again.
                message = self.sharing.unpack(message)
            yield message

    def close(self) -> None:
        """Close the socket at once; views of shared memory keep it."""
        self.socket.close()
        self.share(None)


def _let_ipv6(socket_: zmq.Socket[bytes], address: str) -> None:
    """Let a socket use IPv6 where its address is one, may be any, or is a name of IPv6 alone.

    A name that has both is one of IPv4, since ZeroMQ tries one address only.
    """
    scheme, _, place = address.partition("://")
    host = place.rpartition(":")[0]
    if scheme == "tcp" and (host == "*" or not _is_ipv4(host)):
        socket_.setsockopt(zmq.IPV6, 1)


def _is_ipv4(host: str) -> bool:
    try:
        getaddrinfo(host, None, AF_INET)
    except OSError:
        return False
    return True


def new_context(curve_token: bytes | None = None) -> Context:
    """Return a context of one I/O thread, which every process has for itself.

    With a token, all that its sockets send is encrypted by CURVE with a pair of keys that is
    derived from it. Who has another token can neither read nor connect.
    """
    context: Context = zmq.Context()
    if curve_token is not None:
        public, secret = _keys_of(curve_token)
        context.curve_secretkey, context.curve_publickey = secret, public
        context.curve_serverkey = public
    return context


def _keys_of(token: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret key, as Z85 spells them."""
    seed = hmac.new(token, b"hvdlite parameter server CURVE key", hashlib.sha256).digest()
    secret = z85.encode(seed)
    return zmq.curve_public(secret), secret


def poll(callers: Mapping[Caller, object], wake_fd: int, seconds: float) -> list[Caller]:
    """Wait until callers have something to read or `wake_fd` can be read; return those callers."""
    poller = zmq.Poller()
    poller.register(wake_fd, zmq.POLLIN)
    by_socket = {caller.socket: caller for caller in callers}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    ready = dict(poller.poll(round(seconds * 1000)))
    return [caller for socket, caller in by_socket.items() if socket in ready]
