"""A dial: the attempts to reach one rank, at all of its addresses.

A rank has several addresses, and others may answer at some of them: another job, another program,
or another host with the same address (docker0 has 172.17.0.1 everywhere). So a dial tries the
addresses one after the other, soon several at once ("Happy Eyeballs", RFC 8305), and takes the
first connection on which the rank that is meant has proved itself.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence

from hvdlite.common.connections.address import Target
from hvdlite.common.connections.dial import AGAIN_SECONDS, STAGGER_SECONDS, Limits
from hvdlite.common.connections.loop import WRITE, Loop
from hvdlite.common.connections.strangers import RESETS, why
from hvdlite.common.meeting import handshake
from hvdlite.common.meeting.handshake import NONCE_BYTES, PROOF_BYTES
from hvdlite.common.transport.tcp.strangers import GO, Identity, Slot, Stranger


class Dial:
    """The attempts for one slot. Ends with `connected` (socket, target) or `failed` (reasons)."""

    def __init__(
        self,
        poller: Loop,
        me: Identity,
        slot: Slot,
        targets: Sequence[Target],
        limits: Limits,
    ) -> None:
        self.poller, self.me, self.slot, self.limits = poller, me, slot, limits
        self.connected: Callable[[Dial, socket.socket, Target], None]
        self.failed: Callable[[Dial, str], None]
        self._left = list(reversed(targets))
        self._attempts: list[_Attempt] = []
        self._again: list[Target] = []  # Have reset the connection, and are tried again soon.
        self._last = 0.0  # Until when targets are tried again, in monotonic seconds.
        self._reasons: list[str] = []
        self._over = False

    def start(self) -> None:
        """Try the first target."""
        self._last = time.monotonic() + self.limits.connect_seconds
        self._next()

    def _next(self) -> None:
        if self._over:
            return
        if self._left:
            target = self._left.pop()
            try:
                attempt = _Attempt(self, target)
            except OSError as error:  # This host has no such network.
                self._reasons.append(f"{target}: {why(error)}")
                self._next()
                return
            self._attempts.append(attempt)
            attempt.start()
            if self._left:
                self.poller.call_at(time.monotonic() + STAGGER_SECONDS, self._next)
        elif not self._attempts and not self._again:
            self._over = True
            self.failed(self, "; ".join(self._reasons) or "it has no address that fits")

    def lost(self, attempt: _Attempt, reason: str, *, reset: bool) -> None:
        """Note why `attempt` has failed, and try the next target.

        A rank on which many connect at once may `reset` a connection: it is tried again.
        """
        self._attempts.remove(attempt)
        now = time.monotonic()
        if reset and now < self._last:
            self._again.append(attempt.target)
            self.poller.call_at(now + AGAIN_SECONDS, self._try_again)
            self._next()
            return
        origin = f" from {attempt.origin}" if attempt.origin else ""
        self._reasons.append(f"{attempt.target}{origin}: {reason}")
        self._next()

    def _try_again(self) -> None:
        self._left.append(self._again.pop(0))
        self._next()

    def won(self, attempt: _Attempt) -> None:
        """Use the connection of `attempt`, on which the rank has proved itself."""
        if attempt.say(GO):
            self._attempts.remove(attempt)
            self.cancel()
            self.connected(self, attempt.release(), attempt.target)

    def cancel(self) -> None:
        """Close all attempts."""
        self._over = True
        for attempt in self._attempts:
            attempt.close()
        self._attempts.clear()


class _Attempt(Stranger):
    """One attempt: connect, read the nonce, claim and prove, read the proof."""

    def __init__(self, dial: Dial, target: Target) -> None:
        super().__init__(dial.poller, _new_socket(target.family))
        self.target = target
        self.origin = ""  # The own address that the kernel has chosen.
        self._dial = dial
        self._said = b""
        self._answered = False  # Whether the network has answered.

    def start(self) -> None:
        """Begin to connect."""
        code = self.connection.connect_ex(self.target.address)
        if code not in (0, errno.EINPROGRESS):
            self.ended(os.strerror(code).lower())
            return
        if self.target.family != socket.AF_UNIX:
            self.origin = self.connection.getsockname()[0]
        now, limits = time.monotonic(), self._dial.limits
        self._dial.poller.watch(self.connection.fileno(), WRITE, self._on_connected)
        self._dial.poller.call_at(now + limits.connect_seconds, self._no_answer)
        self._dial.poller.call_at(now + limits.prove_seconds, self._no_proof)

    def _no_answer(self) -> None:
        if self.pending and not self._answered:
            self.ended(f"no answer within {self._dial.limits.connect_seconds:g} s")

    def _no_proof(self) -> None:
        if self.pending:
            limit = self._dial.limits.prove_seconds
            self.ended(f"it did not say within {limit:g} s who it is, so it is another program")

    def _on_connected(self, events: int) -> None:
        code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.ended(os.strerror(code).lower(), reset=code in RESETS)
            return
        self._answered = True
        self.expect(NONCE_BYTES, self._on_nonce)

    def _on_nonce(self, nonce: bytes) -> None:
        me, mine = self._dial.me, handshake.new_nonce()
        claim = me.claim(self._dial.slot)
        self._said = nonce + mine
        if self.say(mine + claim + handshake.proof(me.key, handshake.CONNECTS, self._said, claim)):
            self.expect(PROOF_BYTES, self._on_proof)

    def _on_proof(self, given: bytes) -> None:
        me = self._dial.me
        claim = me.claim(self._dial.slot)
        if handshake.proves(given, me.key, handshake.LISTENS, self._said, claim):
            self._dial.won(self)
        else:
            self.ended("another program or another job answers there")

    def ended(self, reason: str, *, reset: bool = False) -> None:
        """See `Stranger.ended`."""
        self.close()
        self._dial.lost(self, reason, reset=reset)


def _new_socket(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
