"""The bytes that a rank and the server of a meeting exchange.

    rank                                                server
                 <- greeting: MAGIC, protocol, version, nonce
    claim: MAGIC, protocol, version, job, rank, size, nonce, proof ->
                 <- reply: ACCEPTED and the server's proof, or a refusal and a sentence
    frames: JOIN members; GATHER number body; WHO; LEAVE ->
                 <- frames: BODIES number [body, ...]; PRESENCE missing waiting left notes;
                            FAIL text rank; GIVE_UP text; OTHER_HVDLITE rank version

Greeting and claim have a fixed size and are not parsed further before the proof holds. A frame is
its length and a msgpack array. This module never sends.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from hvdlite.common.base.errors import HorovodVersionMismatchError, ProtocolError
from hvdlite.common.base.version import installed_version
from hvdlite.common.meeting import handshake
from hvdlite.common.meeting.handshake import NONCE_BYTES, PROOF_BYTES
from hvdlite.common.plain.messages import PROTOCOL_VERSION

MAGIC = b"hvdmeet\0"
GREETING = struct.Struct(f"<8sI32s{NONCE_BYTES}s")
JOB_BYTES = 16
CLAIM = struct.Struct(f"<8sI32s{JOB_BYTES}sII{NONCE_BYTES}s")
CLAIM_BYTES = CLAIM.size + PROOF_BYTES
REPLY = struct.Struct("<BH")  # One of the replies; length of the proof or the sentence.
# The replies to a claim. REFUSED holds for ever, DUPLICATE until another process with the same rank
# has left, and OTHER_JOB until the job that listens there has met.
ACCEPTED, REFUSED, DUPLICATE, OTHER_JOB, OTHER_SECRET, OTHER_VERSION = range(6)
SENTENCE_BYTES = 1000
LENGTH = struct.Struct("<I")
BODY_BYTES = 1 << 20  # The most that a rank gives to one allgather.
FRAME_BYTES = BODY_BYTES + (1 << 16)  # The longest frame from a rank.

JOIN, GATHER, WHO, LEAVE = "join", "gather", "who", "leave"
BODIES, PRESENCE, FAIL = "bodies", "presence", "fail"
# The server ends before anybody has been answered: another one may follow at the same address.
GIVE_UP = "give up"
# A rank of the round has another protocol, and was refused.
OTHER_HVDLITE = "other hvdlite"


class Greeting(NamedTuple):
    """What the server says first."""

    protocol: int
    version: str
    nonce: bytes

    def spell(self) -> str:
        """Return the version for a message."""
        return f"{self.version} (protocol {self.protocol})"


class Claim(NamedTuple):
    """What a connecting rank says of itself."""

    protocol: int
    version: str
    job: bytes
    rank: int
    size: int
    nonce: bytes

    def spell(self) -> str:
        """Return the version for a message."""
        return f"{self.version} (protocol {self.protocol})"


def mismatch(theirs: str) -> HorovodVersionMismatchError:
    """Return the error of a rank that meets `theirs`, as `Claim.spell` says it."""
    ours = f"{installed_version()} (protocol {PROTOCOL_VERSION})"
    return HorovodVersionMismatchError("hvdlite", theirs, ours)


def job_digest(label: str) -> bytes:
    """Return what stands for the job `label` in claims; jobs that differ have other digests."""
    return hashlib.sha256(label.encode()).digest()[:JOB_BYTES]


def pack_greeting(nonce: bytes) -> bytes:
    """Return the greeting of a server."""
    return GREETING.pack(MAGIC, PROTOCOL_VERSION, installed_version().encode()[:32], nonce)


def unpack_greeting(data: bytes) -> Greeting:
    """Return the greeting in `data`. Raises `ProtocolError` when it is another program's."""
    magic, protocol, version, nonce = GREETING.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"another program listens there: it says {data[:8]!r}")
    return Greeting(protocol, _text(version), nonce)


def pack_claim(job: bytes, rank: int, size: int, nonce: bytes) -> bytes:
    """Return the claim of `rank` without its proof; `nonce` is the rank's."""
    version = installed_version().encode()[:32]
    return CLAIM.pack(MAGIC, PROTOCOL_VERSION, version, job, rank, size, nonce)


def unpack_claim(data: bytes) -> Claim:
    """Return the claim in the first bytes of `data`."""
    _, protocol, version, job, rank, size, nonce = CLAIM.unpack_from(data)
    return Claim(protocol, _text(version), job, rank, size, nonce)


def pack_refusal(reply: int, sentence: str) -> bytes:
    """Return the reply to a rank that may not take part."""
    raw = sentence.encode()[:SENTENCE_BYTES]
    return REPLY.pack(reply, len(raw)) + raw


def pack_acceptance(secret: bytes, nonces: bytes, claim: bytes) -> bytes:
    """Return the reply to a rank that takes part; it holds the proof of the server."""
    return REPLY.pack(ACCEPTED, PROOF_BYTES) + handshake.proof(
        secret, handshake.LISTENS, nonces, claim
    )


def pack_frame(*message: Any) -> bytes:
    """Return a message as a frame."""
    body: bytes = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Takes frames out of a stream of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[list[Any]]:
        """Yield the messages that are complete with `data`.

        Raises `ProtocolError` for a frame that is too long, or is no message.
        """
        self._data += data
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if length > self.limit:
                raise ProtocolError(f"a message of {length} bytes is too long for a meeting")
            end = LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[LENGTH.size : end])
            del self._data[:end]
            yield _message(body)


def answers(size: int) -> Frames:
    """Return the `Frames` of what a server sends: at most the bodies of `size` ranks."""
    return Frames(size * (BODY_BYTES + 64) + FRAME_BYTES)


def check_body(body: bytes) -> None:
    """Raise `ValueError` for a body that is too long for one allgather."""
    if len(body) > BODY_BYTES:
        raise ValueError(f"{len(body)} bytes are too many for a meeting")


def _message(body: bytes) -> list[Any]:
    try:
        message = msgpack.unpackb(body, use_list=True)
    except ValueError as error:
        raise ProtocolError(f"a message of a meeting cannot be read: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ProtocolError("a message of a meeting has no kind")
    return message


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
