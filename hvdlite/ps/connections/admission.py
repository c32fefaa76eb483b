"""Who may ask, and who may answer: peers that have proved that they know the token of the cluster.

A stranger gets a nonce (`challenge`), whatever it has sent. Its `hello` then has that nonce, one
of its own, and an HMAC over both, over what the hello says, and over the role of the end that
listens. From the same words both ends make a key of this connection, and each head that is sent
from now on has a tag by it. So the tag of the `welcome` is the proof of the end that listens; who
takes the name of a member later is not heard; and a proof for a scheduler is none for a server.

Payloads have no tag. With CURVE, nobody else can read or change them on their way.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeGuard

from hvdlite.common.connections.prove import (
    CONNECTS,
    LISTENS,
    NONCE_BYTES,
    new_nonce,
    proof,
    proves,
)
from hvdlite.ps.connections.messages import TAG_BYTES, Buffer

MOST_NONCES = 1024  # Of strangers: the oldest are forgotten, who have to ask again.


class Admission:
    """Asks strangers for proofs; `role` is that of this process, a scheduler or a server."""

    def __init__(self, token: bytes, role: str) -> None:
        self._token, self._role = token, role
        self._nonces: OrderedDict[bytes, bytes] = OrderedDict()

    def nonce_for(self, peer: bytes) -> bytes:
        """Return the nonce over which a peer has to prove that it knows the token."""
        nonce = self._nonces.setdefault(peer, new_nonce())
        if len(self._nonces) > MOST_NONCES:
            self._nonces.popitem(last=False)
        return nonce

    def answers(self, peer: bytes, body: Mapping[str, Any]) -> bool:
        """Return whether a hello has a proof over the nonce that its peer was given."""
        nonce = self._nonces.get(peer)
        return nonce is not None and body.get("nonce") == nonce

    def admit(self, peer: bytes, body: Mapping[str, Any]) -> bytes | None:
        """Return the key of the connection; None: the proof is wrong. The nonce serves once."""
        nonce, given, own = self._nonces.pop(peer), body.get("proof"), body.get("own")
        if not isinstance(given, bytes) or not is_nonce(own):
            return None
        try:
            claim = _claim_of(body, self._role)
        except (TypeError, ValueError, RecursionError):  # What no member says.
            return None
        if not proves(given, self._token, CONNECTS, nonce + own, claim):
            return None
        return proof(self._token, LISTENS, nonce + own, claim)


def proved(
    body: Mapping[str, Any], nonce: bytes, token: bytes, role: str
) -> tuple[dict[str, Any], bytes]:
    """Return a hello to a process of this role, with its proof, and the key of the connection."""
    own, claim = new_nonce(), _claim_of(body, role)
    said = {**body, "nonce": nonce, "own": own, "proof": proof(token, CONNECTS, nonce + own, claim)}
    return said, proof(token, LISTENS, nonce + own, claim)


def is_nonce(given: object) -> TypeGuard[bytes]:
    """Return whether a value that has come from outside can be a nonce."""
    return isinstance(given, bytes) and len(given) == NONCE_BYTES


def tagged(head: Buffer, key: bytes, end: bytes) -> bytes:
    """Return a head with the tag of the end (CONNECTS or LISTENS) that sends it."""
    return bytes(head) + _tag_of(head, key, end)


def untagged(head: Buffer, key: bytes, end: bytes) -> memoryview | None:
    """Return a head without its tag; None where that is not by `end` and this key."""
    words, tag = memoryview(head)[:-TAG_BYTES], memoryview(head)[-TAG_BYTES:]
    return words if hmac.compare_digest(tag, _tag_of(words, key, end)) else None


def _tag_of(head: Buffer, key: bytes, end: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=TAG_BYTES, key=key, person=end).digest()


def _claim_of(body: Mapping[str, Any], role: str) -> bytes:
    """Return what a proof in a hello is about: what the hello says, and to whom."""
    words = {word: value for word, value in body.items() if word not in ("nonce", "own", "proof")}
    return json.dumps([role, words], sort_keys=True).encode()
