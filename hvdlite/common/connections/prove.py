"""Proofs that both ends of a connection know the secret of a job, without saying it.

    the end that listens                        the end that connects
    CHALLENGE: magic, protocol, version, nonce  ->
                   <-  CLAIM: magic, protocol, version, both roles, nonce, what is claimed; proof
    REPLY: ACCEPTED and a proof, or a refusal and a sentence  ->
                                                                 <-  GO: this connection is used

A proof is an HMAC-SHA256, keyed with the secret, over the end that proves, both nonces and the
claim in its exact bytes, roles included; all of them have fixed sizes. So no proof serves as that
of the other end, of another connection, of another role or of another claim. Nothing of a claim is
parsed before its proof holds; what comes before it is compared, and no more.

The scheme is the challenge and response of RFC 2104's HMAC as in SCRAM (RFC 5802), without its
passwords. This module never sends.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import NamedTuple

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.requests.messages import PROTOCOL_VERSION, installed_version

MAGIC = b"hvdlite\n"
NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
ROLE_BYTES = 16
MOST_CLAIMED_BYTES = 320
CHALLENGE = struct.Struct(f"<8sI32s{NONCE_BYTES}s")
CLAIM = struct.Struct(f"<8sI32s{ROLE_BYTES}s{ROLE_BYTES}s{NONCE_BYTES}sH{MOST_CLAIMED_BYTES}s")
PROVEN_CLAIM_BYTES = CLAIM.size + PROOF_BYTES
REPLY = struct.Struct("<BH")  # One of the replies; the length of the proof or the sentence.
MOST_SENTENCE_BYTES = 1000
GO = b"g"
# The replies to a claim; those from FIRST_OWN on are the listener's own reasons to refuse.
ACCEPTED, OTHER_SECRET, OTHER_PROTOCOL, OTHER_ROLE = range(4)
FIRST_OWN = 16
CONNECTS, LISTENS = b"connects", b"listens "  # Which end proves.


class Party(NamedTuple):
    """One end of connections: it plays `role`, and demands that the other end plays `other`."""

    secret: bytes
    role: str
    other: str


class Software(NamedTuple):
    """The version of hvdlite at the other end."""

    protocol: int
    version: str

    def __str__(self) -> str:
        return f"{self.version} (protocol {self.protocol})"


OURS = Software(PROTOCOL_VERSION, installed_version())


class Challenge(NamedTuple):
    """What the end that listens says first."""

    software: Software
    nonce: bytes

    @classmethod
    def new(cls) -> Challenge:
        return cls(OURS, new_nonce())

    def pack(self) -> bytes:
        protocol, version = self.software
        return CHALLENGE.pack(MAGIC, protocol, version.encode()[:32], self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Challenge:
        """Return the challenge in `data`. Raises `ProtocolError` if it is another program's."""
        magic, protocol, version, nonce = CHALLENGE.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"another program listens there: it says {data[:8]!r}")
        return cls(Software(protocol, _text(version)), nonce)


class Claim(NamedTuple):
    """What a connecting end says of itself."""

    software: Software
    role: str
    wanted: str  # The role that it takes the other end for.
    nonce: bytes
    body: bytes  # What its protocol has it say: see who listens.

    @classmethod
    def new(cls, party: Party, body: bytes) -> Claim:
        if len(body) > MOST_CLAIMED_BYTES:
            raise ValueError(f"{len(body)} bytes are too many for a claim")
        return cls(OURS, party.role, party.other, new_nonce(), body)

    def pack(self) -> bytes:
        """Return the claim as bytes, without its proof."""
        protocol, version = self.software
        roles = self.role.encode(), self.wanted.encode()
        count = len(self.body)
        return CLAIM.pack(
            MAGIC, protocol, version.encode()[:32], *roles, self.nonce, count, self.body
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Claim:
        """Return the claim in `raw`, whose proof holds. Raises `ProtocolError`."""
        _, protocol, version, role, wanted, nonce, count, body = CLAIM.unpack(raw)
        if count > MOST_CLAIMED_BYTES:
            raise ProtocolError(f"it claims {count} bytes")
        return cls(Software(protocol, _text(version)), _text(role), _text(wanted), nonce,
                   body[:count])  # fmt: skip


def is_claim(beginning: bytes) -> bool:
    """Return whether a claim may begin so; other programs are told by their first bytes."""
    return MAGIC.startswith(beginning[: len(MAGIC)])


def prove_claim(secret: bytes, challenge: Challenge, claim: Claim) -> bytes:
    """Return a claim with the proof of the end that connects."""
    raw = claim.pack()
    return raw + proof(secret, CONNECTS, challenge.nonce, raw)


def check_claim(secret: bytes, challenge: Challenge, data: bytes) -> Claim | None:
    """Return the claim of `data`, None where its proof does not hold. Raises `ProtocolError`."""
    raw, given = data[: CLAIM.size], data[CLAIM.size :]
    if not proves(given, secret, CONNECTS, challenge.nonce, raw):
        return None
    return Claim.unpack(raw)


def refusal(code: int, sentence: str) -> bytes:
    """Return the reply to a claim that is refused."""
    raw = sentence.encode()[:MOST_SENTENCE_BYTES]
    return REPLY.pack(code, len(raw)) + raw


def acceptance(secret: bytes, challenge: Challenge, claim: Claim) -> bytes:
    """Return the reply to a claim that is accepted, with the proof of the end that listens."""
    given = proof(secret, LISTENS, challenge.nonce, claim.pack())
    return REPLY.pack(ACCEPTED, PROOF_BYTES) + given


def check_acceptance(secret: bytes, challenge: Challenge, claim: Claim, given: bytes) -> bool:
    """Return whether `given` is the proof of the end that listens."""
    return proves(given, secret, LISTENS, challenge.nonce, claim.pack())


def new_nonce() -> bytes:
    """Return random bytes that are used for one connection."""
    return os.urandom(NONCE_BYTES)


def proof(secret: bytes, end: bytes, nonces: bytes, claim: bytes) -> bytes:
    """Return the proof of `end` (CONNECTS or LISTENS) over `nonces` and the bytes of `claim`.

    Nonces have a fixed number and size; the one of the end that connects may be in its claim.
    """
    return hmac.new(secret, b"".join((end, nonces, claim)), hashlib.sha256).digest()


def proves(given: bytes, secret: bytes, end: bytes, nonces: bytes, claim: bytes) -> bool:
    """Return whether `given` is the proof of `end`, in a time that does not depend on `given`."""
    return hmac.compare_digest(given, proof(secret, end, nonces, claim))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
