"""Hostile connections and messages, as a seed has them, against a cluster that trains."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgpack

from hvdlite.common.connections import prove
from hvdlite.common.connections.address import parse_address
from hvdlite.common.connections.frames import PREFIX
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import Challenge, Claim, Party
from hvdlite.ps.connections.channel import MEMBER, Caller
from hvdlite.ps.connections.messages import KINDS
from tests.ps.cluster import Cluster, bits, train_in_one, trainers
from tests.ps.peers import Peer

MOST_OPEN = 64  # Hostile connections at a time: a test has few descriptors.
PEERS = 8  # Broken members of each process.
OF_WORKERS = sorted(KINDS - {"take", "beat"})  # What no server may ask a server.


def begin(address: str) -> socket.socket:
    """Return a connection of a stranger."""
    host, port = parse_address(address.partition(" ")[0], "a test")[:2]
    return socket.create_connection((host, port), timeout=20)


def claim_with(connection: socket.socket, secret: bytes, role: str, name: bytes) -> bytes:
    """Return a claim for the challenge that comes first."""
    challenge = Challenge.unpack(connection.recv(prove.CHALLENGE.size, socket.MSG_WAITALL))
    return prove.prove_claim(secret, challenge, Claim.new(Party(b"", MEMBER, role), name))


def stray(choose: random.Random, address: str, recorded: bytes) -> socket.socket:
    """Return a connection on which somebody has said what no member says, or nothing."""
    connection = begin(address)
    noise = choose.randbytes(choose.randrange(1, 2000))
    with contextlib.suppress(OSError):  # It is closed as soon as it says the first wrong byte.
        match choose.randrange(8):
            case 0:
                pass
            case 1:
                connection.sendall(noise)
            case 2:
                connection.sendall(prove.MAGIC + noise)
            case 3:
                connection.sendall(recorded)  # Of another connection, where it was right.
            case 4:
                role = choose.choice(["ps scheduler", "ps server", "scheduler"])
                connection.sendall(claim_with(connection, noise, role, b"worker 0"))
            case 5:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            case 6:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            case 7:
                connection.shutdown(socket.SHUT_WR)
    return connection


def anything(choose: random.Random, depth: int = 0) -> object:
    """Return a value that msgpack can say."""
    kind = choose.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [anything(choose, depth + 1) for _ in range(choose.randrange(4))]
    if kind == 7:
        words = ["worker", "table", "version", "specs", "share", "change", "memory", "role"]
        return {choose.choice(words): anything(choose, depth + 1) for _ in range(3)}
    return [None, True, -1, 1 << 62, "x", choose.randbytes(8)][kind]


def hostile_frame(choose: random.Random) -> bytes:
    """Return what a member in another role, or a broken one, may send."""
    head: list[object] = [choose.choice(OF_WORKERS), choose.randrange(1, 9), "t", 1, 1, {}, []]
    if choose.random() < 0.5:
        head[choose.randrange(7)] = anything(choose)
    else:
        head[5] = {"worker": 0, "table": anything(choose), "body": anything(choose), "source": 1}
    packed: bytes = msgpack.packb([head] * choose.choice([1, 1, 3]))
    match choose.randrange(6):
        case 0:
            packed = packed[: choose.randrange(len(packed))]
        case 1:
            packed = b"\xdd\0\1\0\0" + b"\x80" * (1 << 16)
        case 2:
            return PREFIX.pack(choose.getrandbits(32), choose.getrandbits(32)) + packed
        case 3:
            size = choose.choice([0, 8, 1 << 40, (1 << 64) - 1])
            head[6] = [None] * choose.randrange(3)
            packed = msgpack.packb([head])
            return PREFIX.pack(len(packed), 1) + struct.pack("<Q", size) + packed + bytes(8)
    return PREFIX.pack(len(packed), 0) + packed


def strays(choose: random.Random, addresses: Sequence[str], recorded: bytes, count: int) -> None:
    """Let so many strangers come, some of them at a time."""
    held: deque[socket.socket] = deque()
    for _ in range(count):
        held.append(stray(choose, choose.choice(addresses), recorded))
        if len(held) > MOST_OPEN:
            held.popleft().close()
    for each in held:
        each.close()


def broken_members(choose: random.Random, addresses: Sequence[tuple[str, str]], count: int) -> None:
    """Let processes that know the token, and are servers, send so many hostile messages."""
    names = [b"server %d of a test" % number for number in range(PEERS)]
    peers = [Peer(address, role, name) for name in names for address, role in addresses]
    for number in range(count):
        peer = peers[number % len(peers)]  # The others connect again meanwhile.
        peer.say_raw(hostile_frame(choose))
        peer.loop.run_once(0)
        peer.heard.clear()
    for peer in peers:
        peer.close()


def recorded_claim() -> bytes:
    """Return a right claim, which was made for another connection."""
    claim = Claim.new(Party(b"", MEMBER, "ps scheduler"), b"worker 0")
    return prove.prove_claim(b"a secret", Challenge.new(), claim)


def rogues(choose: random.Random, count: int) -> None:
    """Let a member dial so many processes that say anything: none of them is believed."""
    with socket.create_server(("127.0.0.1", 0)) as rogue:
        rogue.settimeout(20)
        loop, proved = Loop(), threading.Event()
        port = rogue.getsockname()[1]
        caller = Caller(loop, f"127.0.0.1:{port}", "scheduler", b"worker 0", b"a secret")
        caller.connected = proved.set
        ended = threading.Event()

        def answer() -> None:
            for _ in range(count):
                connection, _ = rogue.accept()
                connection.settimeout(20)
                with connection, contextlib.suppress(OSError):
                    if choose.random() < 0.3:
                        connection.sendall(choose.randbytes(choose.randrange(1, 300)))
                        continue
                    challenge = Challenge.new()
                    connection.sendall(challenge.pack())
                    connection.recv(prove.PROVEN_CLAIM_BYTES, socket.MSG_WAITALL)
                    false = choose.randbytes(prove.PROOF_BYTES)
                    connection.sendall(prove.REPLY.pack(prove.ACCEPTED, len(false)) + false)
                    assert not connection.recv(1)  # Nothing more is said to it.
            ended.set()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        while not ended.is_set() and thread.is_alive():
            loop.run_once(0.05)
        caller.close()
        loop.close()
        thread.join(20)
        assert ended.is_set() and not proved.is_set()


def attack(cluster: Cluster, connections: int, messages: int, seed: int) -> None:
    """Train while hostile connections and messages come; compare the result, bit by bit."""
    choose = random.Random(seed)
    (trainer,) = trainers(cluster, 1)
    trainer.train(3)
    members = cluster.state.membership.members.values()
    servers = [member.address.partition(" ")[0] for member in members if member.address]
    scheduler = cluster.settings.scheduler
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            trainer.train(trainer.table.clock + 1)
            time.sleep(0.002)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        strays(choose, [*servers, scheduler], recorded_claim(), connections)
        roles = [*((each, "server") for each in servers), (scheduler, "scheduler")]
        broken_members(choose, roles, messages)
    finally:
        ended.set()
        thread.join(30)
    trainer.train(trainer.table.clock + 5)
    steps = trainer.table.clock
    assert bits(trainer.values) == train_in_one(steps, lambda _step: [0])
    assert [loop.error for loop in [*cluster.servers, cluster.scheduler]] == [None] * 3
