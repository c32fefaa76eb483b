"""Who may send requests: peers that have proved that they know the token of the cluster.

A stranger gets a nonce (`challenge`), whatever it has sent. Its `hello` then has the nonce and an
HMAC over it and over what the hello says. A peer that was let in is known by its identity, which
has random bytes. With CURVE, nobody else can read them on their way.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from hvdlite.common.meeting.handshake import CONNECTS, new_nonce, proof, proves

MOST_NONCES = 1024  # Of strangers: the oldest are forgotten, who have to ask again.


class Admission:
    """Asks strangers for proofs."""

    def __init__(self, token: bytes) -> None:
        self._token = token
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

    def admits(self, peer: bytes, body: Mapping[str, Any]) -> bool:
        """Return whether the proof holds; the nonce serves once."""
        nonce, given = self._nonces.pop(peer), body.get("proof")
        if not isinstance(given, bytes):
            return False
        try:
            claim = _claim_of(body)
        except (TypeError, ValueError, RecursionError):  # What no member says.
            return False
        return proves(given, self._token, CONNECTS, nonce, claim)


def proved(body: Mapping[str, Any], nonce: bytes, token: bytes) -> dict[str, Any]:
    """Return a hello with its proof."""
    claim = _claim_of(body)
    return {**body, "nonce": nonce, "proof": proof(token, CONNECTS, nonce, claim)}


def _claim_of(body: Mapping[str, Any]) -> bytes:
    """Return what a proof in a hello is about: all of the hello but the proof."""
    fields = {word: value for word, value in body.items() if word not in ("nonce", "proof")}
    return json.dumps(fields, sort_keys=True).encode()
