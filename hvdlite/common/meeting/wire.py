"""What a rank and the server of a meeting say to each other, over a link.

A connection begins with the proofs of prove.py, in which the rank makes a `Claim`. Then come

    JOIN members; GATHER number body; WHO; LEAVE ->
                 <- BODIES number [body, ...]; PRESENCE missing waiting left notes; FAIL text rank;
                    GIVE_UP text; OTHER_HVDLITE rank version

This module never sends.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgpack

from hvdlite.common.base.errors import HorovodVersionMismatchError, ProtocolError
from hvdlite.common.connections import prove

RANK, SERVER = "rank", "meeting"  # The ends of a connection.
JOB_BYTES = 16
# Why a server refuses a rank. REFUSED holds for ever, DUPLICATE until another process with the same
# rank has left, and OTHER_JOB until the job that listens there has met.
REFUSED, DUPLICATE, OTHER_JOB = range(prove.FIRST_OWN, prove.FIRST_OWN + 3)
BODY_BYTES = 1 << 20  # The most that a rank gives to one allgather.
FRAME_BYTES = BODY_BYTES + (1 << 16)  # The longest message from a rank.

JOIN, GATHER, WHO, LEAVE = "join", "gather", "who", "leave"
BODIES, PRESENCE, FAIL = "bodies", "presence", "fail"
# The server ends before anybody has been answered: another one may follow at the same address.
GIVE_UP = "give up"
# A rank of the round has another protocol, and was refused.
OTHER_HVDLITE = "other hvdlite"


class Claim(NamedTuple):
    """What a connecting rank says of itself."""

    rank: int
    size: int
    job: bytes

    def pack(self) -> bytes:
        """Return the body of a claim of prove.py."""
        packed: bytes = msgpack.packb(self)
        return packed


def read_claim(body: bytes) -> Claim:
    """Return the claim of a rank that has proved itself. Raises `ProtocolError`."""
    try:
        match msgpack.unpackb(body):
            case [int(rank), int(size), bytes(job)]:
                return Claim(rank, size, job)
    except (ValueError, msgpack.UnpackException):
        pass
    raise ProtocolError("it claims what no rank claims")


def mismatch(theirs: str) -> HorovodVersionMismatchError:
    """Return the error of a rank that meets `theirs`, as `Software` is spelt."""
    return HorovodVersionMismatchError("hvdlite", theirs, str(prove.OURS))


def job_digest(label: str) -> bytes:
    """Return what stands for the job `label` in claims; jobs that differ have other digests."""
    return hashlib.sha256(label.encode()).digest()[:JOB_BYTES]


def longest_answer(size: int) -> int:
    """Return the most bytes that a server says at once: the bodies of `size` ranks."""
    return size * (BODY_BYTES + 64) + FRAME_BYTES


def check_body(body: bytes) -> None:
    """Raise `ValueError` for a body that is too long for one allgather."""
    if len(body) > BODY_BYTES:
        raise ValueError(f"{len(body)} bytes are too many for a meeting")
