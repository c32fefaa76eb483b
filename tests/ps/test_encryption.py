"""Connections that are encrypted with a key that both ends make of the token."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from itertools import count

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.loop import Loop
from hvdlite.ps.connections import encryption as rules
from hvdlite.ps.connections.encryption import Encryption, certificate

LIMIT_SECONDS = 20.0


def test_one_reading_ends_though_more_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for the thread that reads; what is left makes another event."""
    monkeypatch.setattr(rules, "MOST_BYTES", 1000)
    ends, loop, done = socket.socketpair(), Loop(), list[rules.Encrypted]()
    encryption, sent = Encryption(b"a token"), bytes(range(250)) * 240
    for own, listens in zip(ends, (True, False), strict=True):
        own.setblocking(False)
        encryption.begin(loop, own, listens=listens, done=done.append)  # type: ignore[arg-type]
    while len(done) < 2:
        loop.run_once(LIMIT_SECONDS)
    done[0].settimeout(LIMIT_SECONDS)
    done[0].sendall(sent)
    came, counts = bytearray(len(sent)), []
    rest = memoryview(came)
    while rest:
        with contextlib.suppress(BlockingIOError):
            counts.append(done[1].recvmsg_into([rest[:7], rest[7:]])[0])
            assert not done[1].pending()
            rest = rest[counts[-1] :]
    assert came == sent and len(counts) > 2 and max(counts) <= 1000 + (1 << 14)
    for each in done:
        each.close()
    loop.close()


def meet(listens: Encryption, connects: Encryption) -> tuple[list[socket.socket], list[str], bytes]:
    """Let both ends begin; return the connections, why they have failed, and the wire's bytes."""
    ends = [socket.socketpair() for _ in range(2)]
    loop, done, failed, wire = Loop(), list[socket.socket](), list[str](), bytearray()

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # An end that is closed while something comes.
            while data := source.recv(1 << 16):
                wire.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    middle = ends[0][1], ends[1][1]
    threads = [
        threading.Thread(target=carry, args=each, daemon=True) for each in (middle, middle[::-1])
    ]
    for thread in threads:
        thread.start()
    for (own, _), encryption, is_listening in zip(
        ends, (listens, connects), (True, False), strict=True
    ):
        own.setblocking(False)
        encryption.begin(loop, own, listens=is_listening, done=done.append, failed=failed.append)
    for _ in count():
        loop.run_once(LIMIT_SECONDS)
        if len(done) + len(failed) == 2:
            break
    if len(done) == 2:
        for each in done:
            each.settimeout(LIMIT_SECONDS)
        done[0].sendall(b"a weight of the model")
        assert done[1].recv(100) == b"a weight of the model"
    for each in done:
        each.close()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    for each in middle:
        each.close()
    loop.close()
    return done, failed, bytes(wire)


def test_what_is_sent_cannot_be_read_on_its_way() -> None:
    done, failed, wire = meet(Encryption(b"a token"), Encryption(b"a token"))
    assert (len(done), failed) == (2, [])
    assert len(wire) > 100 and b"weight" not in wire
    assert b"parameter server" not in wire  # Nor is the certificate.


@pytest.mark.parametrize("swapped", [False, True])
def test_who_has_another_token_gets_no_further(swapped: bool) -> None:
    one, other = Encryption(b"a token"), Encryption(b"a tokem")
    _, failed, wire = meet(*((other, one) if swapped else (one, other)))
    assert failed and all("could not be encrypted" in each for each in failed)
    assert b"weight" not in wire


def test_both_ends_make_the_same_certificate_and_others_another_one() -> None:
    assert certificate(b"a token") == certificate(b"a token")
    assert (
        len({pem for token in (b"a token", b"a tokem", b"\0" * 64) for pem in certificate(token)})
        == 6
    )


def test_without_the_package_that_makes_certificates_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'hvdlite\[ps\]'"):
        Encryption(b"a token")


def test_a_connection_that_was_reset_is_closed() -> None:
    """It has no end yet that could say so, and `wrap_socket` raises."""
    loop, failures = Loop(), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    descriptor = near.fileno()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    Encryption(b"a secret").begin(
        loop, near, listens=True, done=lambda _: None, failed=failures.append
    )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert len(failures) == 1
    loop.close()
