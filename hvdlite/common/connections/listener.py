"""Accept connections whose other ends prove who they are, on any number of listening sockets.

A stranger costs what one claim has of bytes, some seconds, and one descriptor. There are never more
than `most_strangers`: the oldest is closed when another one comes, with a reset, after which an
honest one tries again. Where the process has no descriptor left, the oldest makes room as well;
where there is none, the sockets wait, and are looked at again after a while.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import EXHAUSTED
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.prove import Challenge, Claim, Party
from hvdlite.common.connections.strangers import Stranger, check_credentials, peer_name

STRANGER_SECONDS = 10.0
MOST_LATE_SECONDS = 1.0  # With which the loop comes to a timer, unless it was busy elsewhere.
PAUSE_SECONDS = 0.5  # Without descriptors left, connections are accepted again after this time.
MOST_STRANGERS = 256

log = logging.getLogger("hvdlite")


class Refusal(NamedTuple):
    """Why one who has proved itself cannot be accepted; `code` is from `prove.FIRST_OWN` on."""

    code: int
    sentence: str


class Listener:
    """Listens on `sockets`, which it closes, for those who play the other role of `party`.

    ``judge(claim)`` is asked about each proven claim of this protocol and these roles, and may
    raise `ProtocolError`, which closes without a word. ``accepted(claim, connection)`` is called
    when the other end uses the connection, if the judgement is still the same.
    ``refused(code, sentence, claim)`` hears of all others: `claim` is None where no proof held.
    ``left(claim)`` hears of one that was judged well and is gone before its connection was used.
    `same_user` refuses other users' processes on Unix sockets.
    """

    def __init__(
        self,
        loop: Loop,
        sockets: Sequence[socket.socket],
        party: Party,
        accepted: Callable[[Claim, socket.socket], None],
        *,
        judge: Callable[[Claim], Refusal | None] = lambda claim: None,
        refused: Callable[[int, str, Claim | None], None] = lambda code, sentence, claim: None,
        left: Callable[[Claim], None] = lambda claim: None,
        most_strangers: int = MOST_STRANGERS,
        stranger_seconds: float = STRANGER_SECONDS,
        same_user: bool = False,
        other_secret: str = "has another secret",
    ) -> None:
        self.party, self.same_user, self.other_secret = party, same_user, other_secret
        self.judge, self.accepted, self.refused = judge, accepted, refused
        self._left = left
        self._loop, self._sockets = loop, list(sockets)
        self._most_strangers, self._seconds = most_strangers, stranger_seconds
        self._strangers: dict[_Guest, None] = {}  # In the order in which they came.
        self._armed = False  # Whether the timer of the oldest stranger runs.
        self._due = 0.0  # When it is to be called.
        self._full_is_logged = False
        for each in self._sockets:
            each.setblocking(False)
        self._listen()

    def names(self) -> list[object]:
        return [each.getsockname() for each in self._sockets]

    def claims(self) -> list[Claim]:
        """Return the claims of those who were judged well, and have not begun yet."""
        return [guest.claim for guest in self._strangers if guest.claim is not None]

    def _listen(self) -> None:
        for each in self._sockets:
            self._loop.watch(each.fileno(), READ, partial(self._accept, each))

    def _accept(self, listening: socket.socket, _events: int) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno in EXHAUSTED and self._strangers:
                self._push_out()  # The loop calls again.
            else:
                self._pause(error)
            return
        connection.setblocking(False)
        if len(self._strangers) >= self._most_strangers:
            self._push_out()
        guest = _Guest(self, self._loop, connection)
        self._strangers[guest] = None
        guest.deadline = self._loop.now() + self._seconds
        self._arm()
        guest.greet()

    def _arm(self) -> None:
        if self._strangers and not self._armed:
            self._armed, self._due = True, next(iter(self._strangers)).deadline
            self._loop.call_at(self._due, self._close_late)

    def _close_late(self) -> None:
        now, self._armed = self._loop.now(), False
        if now - self._due > MOST_LATE_SECONDS:  # This end was busy, and has answered nobody.
            for guest in self._strangers:
                guest.deadline = now + self._seconds
        for guest in [*self._strangers]:
            if guest.deadline > now:
                break
            guest.fail(TimeoutError("it did not prove who it is"))
        self._arm()

    def _push_out(self) -> None:
        guest = next(iter(self._strangers))
        guest.close(reset=True)
        self.drop(guest)

    def _pause(self, error: OSError) -> None:
        for each in self._sockets:
            self._loop.forget(each.fileno())
        self._loop.call_after(PAUSE_SECONDS, self._listen)
        if not self._full_is_logged:
            self._full_is_logged = True
            remedy = ""
            if error.errno in EXHAUSTED:
                remedy = ": this process has too many; `ulimit -n` allows more open files"
            log.warning(
                "connections from others have to wait (%s)%s", error, remedy,
            )  # fmt: skip

    def let_in(self, guest: _Guest, claim: Claim) -> None:
        """Hand on the connection of a stranger that is one no longer."""
        self._strangers.pop(guest, None)
        self.accepted(claim, guest.release())

    def drop(self, guest: _Guest) -> None:
        """Forget a stranger that was closed."""
        self._strangers.pop(guest, None)
        if guest.claim is not None:
            self._left(guest.claim)

    def close(self) -> None:
        """Stop to listen, and close what is not accepted yet; what was accepted stays."""
        for each in self._sockets:
            self._loop.forget(each.fileno())
            each.close()
        self._sockets = []
        for guest in self._strangers:
            guest.close()
        self._strangers.clear()


class _Guest(Stranger):
    """One that connects here: it is challenged, and has to prove its claim."""

    def __init__(self, listener: Listener, loop: Loop, connection: socket.socket) -> None:
        super().__init__(loop, connection, self._gone)
        self.claim: Claim | None = None  # Once it was judged well.
        self.deadline = 0.0
        self._listener = listener
        self._challenge = Challenge.new()

    def greet(self) -> None:
        if self.connection.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # It is gone, as the next call tells.
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif self._listener.same_user:
            try:
                check_credentials(self.connection)
            except ProtocolError as error:
                log.warning("%s", error)
                self.fail(error)
                return
        if self.say(self._challenge.pack()):
            self.expect(prove.PROVEN_CLAIM_BYTES, self._on_claim, prove.is_claim)

    def _on_claim(self, body: bytes) -> None:
        party = self._listener.party
        claim = prove.check_claim(party.secret, self._challenge, body)
        if claim is None:
            who = f"a process at {peer_name(self.connection)}"
            self._refuse(Refusal(prove.OTHER_SECRET, f"{who} {self._listener.other_secret}"), None)
            return
        refusal: Refusal | None
        if claim.software.protocol != prove.OURS.protocol:
            sentence = (
                f"{claim.role} runs hvdlite {claim.software}, and this job has protocol "
                f"{prove.OURS.protocol}"
            )
            refusal = Refusal(prove.OTHER_PROTOCOL, sentence)
        elif (claim.role, claim.wanted) != (party.other, party.role):
            sentence = f"a {party.role} listens here, and no {claim.wanted} for a {claim.role}"
            refusal = Refusal(prove.OTHER_ROLE, sentence)
        else:
            refusal = self._listener.judge(claim)
        if refusal is not None:
            self._refuse(refusal, claim)
        elif self.say(prove.acceptance(party.secret, self._challenge, claim)):
            self.claim = claim
            self.expect(len(prove.GO), partial(self._on_go, claim))

    def _refuse(self, refusal: Refusal, claim: Claim | None) -> None:
        """Say why, and let the other end close: what is closed with data unread loses words."""
        if self.say(prove.refusal(*refusal)):
            self._listener.refused(*refusal, claim)
            with contextlib.suppress(OSError):  # It is gone, as the next read tells.
                self.connection.shutdown(socket.SHUT_WR)
            self.expect(1, lambda byte: self.fail(ConnectionError("it was refused")))

    def _on_go(self, claim: Claim, body: bytes) -> None:
        if body != prove.GO or self._listener.judge(claim) is not None:
            self.fail(ProtocolError("it says what none of us says"))
            return
        self._listener.let_in(self, claim)

    def _gone(self, error: Exception) -> None:
        self._listener.drop(self)
        log.debug("a connection is closed: %s", error)
        if isinstance(error, ProtocolError):
            peer = "another program" if self.claim is None else self.claim.role
            self._listener.refused(prove.OTHER_ROLE, f"{peer}: {error}", self.claim)
