"""Proofs that both ends of a connection know the secret of the job, without saying it.

The listening end sends a nonce. The connecting end answers with a nonce of its own and an
HMAC-SHA256, keyed with the secret, over both nonces and over what it claims (its rank, the rank
that it wants, the epoch ...). The listening end answers with an HMAC over the same and a word that
differs, so that neither proof serves as the other. Nothing else is parsed before the proof holds.

The scheme is the challenge and response of RFC 2104's HMAC as in SCRAM (RFC 5802), without its
passwords. This module never sends.
"""

from __future__ import annotations

import hashlib
import hmac
import os

NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
CONNECTS, LISTENS = b"connects", b"listens"  # Which end proves.


def new_nonce() -> bytes:
    """Return random bytes that are used for one connection."""
    return os.urandom(NONCE_BYTES)


def proof(secret: bytes, end: bytes, nonces: bytes, claim: bytes) -> bytes:
    """Return the proof of `end` (CONNECTS or LISTENS); `nonces` are the listener's and the other's.

    `claim` is what the connecting end says of itself, in its exact bytes.
    """
    return hmac.new(secret, b"\0".join((end, nonces, claim)), hashlib.sha256).digest()


def proves(given: bytes, secret: bytes, end: bytes, nonces: bytes, claim: bytes) -> bool:
    """Return whether `given` is the proof of `end`, in a time that does not depend on `given`."""
    return hmac.compare_digest(given, proof(secret, end, nonces, claim))
