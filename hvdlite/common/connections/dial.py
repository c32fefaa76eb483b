"""A dial: the attempts to reach one process, at all of its addresses.

A process may have several addresses, and others may answer at some of them: another job, another
program, or another host with the same address (docker0 has 172.17.0.1 everywhere). So a dial tries
the addresses one after the other, soon several at once ("Happy Eyeballs", RFC 8305), and takes the
first connection on which the one that is meant has proved itself.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodVersionMismatchError
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Address, Target, prepare_tcp, targets
from hvdlite.common.connections.loop import WRITE, Loop
from hvdlite.common.connections.prove import Challenge, Claim, Party
from hvdlite.common.connections.strangers import RESETS, Stranger, why

STAGGER_SECONDS = 0.25  # A dial waits so long for an address before it tries the next one as well.
AGAIN_SECONDS = 0.1  # And so long before it tries one again that has reset the connection.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.5  # Between two dials of `reach`.


class Refused(Exception):  # noqa: N818 - not an error yet
    """The one who listens has refused this end; `code` is a reply of prove.py or its own."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Failure(NamedTuple):
    """Why an attempt has failed: `OSError`, `ProtocolError` or `Refused`."""

    target: Target
    error: Exception
    origin: str = ""  # The own address that the kernel has chosen.

    def __str__(self) -> str:
        origin = f" from {self.origin}" if self.origin else ""
        return f"{self.target}{origin}: {why(self.error)}"


class Limits(NamedTuple):
    """How long the attempts of a dial may take."""

    connect_seconds: float  # Until the network has answered.
    prove_seconds: float  # Until the other end has proved itself: it may be busy.


class Dial:
    """The attempts of `party` to reach who listens at one of `targets`, and to be accepted there.

    Ends with one call: ``connected(connection, target)`` or ``failed(failures)``.
    """

    def __init__(
        self,
        loop: Loop,
        targets: Sequence[Target],
        party: Party,
        body: bytes,
        connected: Callable[[socket.socket, Target], None],
        failed: Callable[[list[Failure]], None],
        limits: Limits,
    ) -> None:
        self.loop, self.party, self.body, self.limits = loop, party, body, limits
        self._connected, self._failed = connected, failed
        self._left = list(reversed(targets))
        self._attempts: list[_Attempt] = []
        self._again: list[Target] = []  # Have reset the connection, and are tried again soon.
        # Until when targets are tried again.
        self._last = loop.now() + limits.connect_seconds
        self._failures: list[Failure] = []
        self._over = False
        loop.call_after(0, self._next)  # Nobody is called before the dial is known.

    def _next(self) -> None:
        if self._over:
            return
        if self._left:
            target = self._left.pop()
            try:
                attempt = _Attempt(self, target)
            except OSError as error:  # This host has no such network.
                self._failures.append(Failure(target, error))
                self._next()
                return
            self._attempts.append(attempt)
            attempt.start()
            if self._left:
                self.loop.call_after(STAGGER_SECONDS, self._next)
        elif not self._attempts and not self._again:
            self._over = True
            self._failed(self._failures)

    def lost(self, attempt: _Attempt, error: Exception) -> None:
        """Note why `attempt` has failed, and try the next target.

        One to which many connect at once may reset a connection: it is tried again.
        """
        self._attempts.remove(attempt)
        if getattr(error, "errno", 0) in (*RESETS, errno.EAGAIN) and self.loop.now() < self._last:
            self._again.append(attempt.target)
            self.loop.call_after(AGAIN_SECONDS, self._try_again)
        else:
            self._failures.append(Failure(attempt.target, error, attempt.origin))
        self._next()

    def _try_again(self) -> None:
        self._left.append(self._again.pop(0))
        self._next()

    def won(self, attempt: _Attempt) -> None:
        """Use the connection of `attempt`, on which the other end has proved itself."""
        if attempt.say(prove.GO):
            self._attempts.remove(attempt)
            self.cancel()
            self._connected(attempt.release(), attempt.target)

    def cancel(self) -> None:
        """Close all attempts; nobody is called any more."""
        self._over = True
        for attempt in self._attempts:
            attempt.close()
        self._attempts.clear()


class _Attempt(Stranger):
    """One attempt: connect, be challenged, claim and prove, check the other end's proof."""

    def __init__(self, dial: Dial, target: Target) -> None:
        super().__init__(
            dial.loop, dial.loop.new_socket(target.family), lambda error: dial.lost(self, error)
        )
        self.target = target
        self.origin = ""
        self._dial = dial
        self._answered = False  # Whether the network has answered.
        self._challenge: Challenge
        self._claim: Claim

    def start(self) -> None:
        try:
            code = self.target.connect(self.connection)
        except OSError as error:  # The folder of a Unix socket does not exist.
            self.fail(error)
            return
        if code not in (0, errno.EINPROGRESS):
            self.fail(OSError(code, os.strerror(code)))
            return
        if self.target.family != socket.AF_UNIX:
            self.origin = self.connection.getsockname()[0]
        loop, limits = self._dial.loop, self._dial.limits
        loop.watch(self.connection.fileno(), WRITE, self._on_connected)
        loop.call_after(limits.connect_seconds, self._no_answer)
        loop.call_after(limits.prove_seconds, lambda: self.fail(TimeoutError(
            f"it did not say within {limits.prove_seconds:g} s who it is: it is another program, "
            "or stopped"
        )))  # fmt: skip

    def _no_answer(self) -> None:
        if not self._answered:
            limit = self._dial.limits.connect_seconds
            self.fail(TimeoutError(f"no answer within {limit:g} s"))

    def _on_connected(self, events: int) -> None:
        code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and self.target.family != socket.AF_UNIX:
            try:
                prepare_tcp(self.connection)
            except OSError as error:
                code = error.errno or errno.ECONNRESET
        if code:
            self.fail(OSError(code, os.strerror(code)))
            return
        self._answered = True
        self.expect(prove.CHALLENGE.size, self._on_challenge)

    def _on_challenge(self, body: bytes) -> None:
        self._challenge = Challenge.unpack(body)
        self._claim = Claim.new(self._dial.party, self._dial.body)
        if self.say(prove.prove_claim(self._dial.party.secret, self._challenge, self._claim)):
            self.expect(prove.REPLY.size, self._on_reply)

    def _on_reply(self, body: bytes) -> None:
        code, length = prove.REPLY.unpack(body)
        length = max(1, min(length, prove.MOST_SENTENCE_BYTES))
        self.expect(length, lambda rest: self._on_reason(code, rest))

    def _on_reason(self, code: int, rest: bytes) -> None:
        secret = self._dial.party.secret
        if code == prove.OTHER_PROTOCOL:
            self.fail(HorovodVersionMismatchError(
                "hvdlite", str(self._challenge.software), str(self._claim.software)
            ))  # fmt: skip
        elif code != prove.ACCEPTED:
            self.fail(Refused(code, rest.decode(errors="replace")))
        elif prove.check_acceptance(secret, self._challenge, self._claim, rest):
            self._dial.won(self)
        else:
            self.fail(Refused(
                prove.OTHER_SECRET, f"the {self._claim.wanted} does not know the secret of this job"
            ))  # fmt: skip


def reach(
    loop: Loop,
    addresses: Sequence[Address],
    party: Party,
    body: bytes,
    limits: Callable[[], Limits],
    failed: Callable[[list[Failure]], None],
) -> socket.socket:
    """Return a connection, dialled again and again until ``failed(failures)`` raises; it blocks.

    Between two dials, whose `limits` are asked for each time, is a pause, which grows. Names of
    hosts may come to resolve. The loop runs meanwhile.
    """
    connections: list[socket.socket] = []
    pause = FIRST_PAUSE_SECONDS
    while True:
        failures: list[list[Failure]] = []
        found, unknown = _resolve(addresses)
        dial = Dial(
            loop, found, party, body, lambda connection, _: connections.append(connection),
            failures.append, limits(),
        )  # fmt: skip
        try:
            while not connections and not failures:
                loop.run_once()
        finally:
            if not connections:
                dial.cancel()
        if connections:
            return connections[0]
        failed(failures[0] + unknown)
        end = loop.now() + pause
        while (left := end - loop.now()) > 0:
            loop.run_once(left)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _resolve(addresses: Sequence[Address]) -> tuple[list[Target], list[Failure]]:
    found: list[Target] = []
    unknown: list[Failure] = []
    for address in addresses:
        try:
            found += targets(address)
        except OSError as error:
            target = Target(socket.AF_UNSPEC, (address.host, address.port))
            unknown.append(Failure(target, error))
    return found, unknown
