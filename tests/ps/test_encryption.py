"""Connections that are encrypted with a key that both ends make of the token."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from itertools import count

import pytest

from hvdlite.common.connections.loop import Loop
from hvdlite.ps.connections.encryption import Encryption, N, _times, certificate

CHECK_OWN_SIGNATURE = 0x4000  # X509_V_FLAG_CHECK_SS_SIGNATURE, which Python does not name.
LIMIT_SECONDS = 20.0


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


@pytest.mark.parametrize("token", [b"", b"a token", b"\0" * 64, bytes(range(256))])
def test_openssl_agrees_with_key_certificate_and_signature(
    token: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("key") / "key.pem"
    path.write_text(certificate(token))
    contexts: list[Callable[..., ssl.SSLSocket]] = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= CHECK_OWN_SIGNATURE
        context.load_verify_locations(str(path))
        context.load_cert_chain(path)  # Raises where the key is not that of the certificate.
        contexts.append(context.wrap_socket)
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(LIMIT_SECONDS)
    served: list[ssl.SSLSocket] = []
    thread = threading.Thread(
        target=lambda: served.append(contexts[0](ends[0], server_side=True)), daemon=True
    )
    thread.start()
    with contexts[1](ends[1]) as connected:
        thread.join(LIMIT_SECONDS)
        with served[0]:
            assert connected.getpeercert(binary_form=True) == served[0].getpeercert(
                binary_form=True
            )


def test_multiples_of_the_base_point_are_those_of_the_standard() -> None:
    """The last one is the base point mirrored, as N times it is the point at infinity."""
    x, y = _times(2)
    assert x == 0x7CF27B188D034F7E8A52380304B51AC3C08969E277F21B35A60B48FC47669978
    assert y == 0x07775510DB8ED040293D9AC69F7430DBBA7DADE63CE982299E04B79D227873D1
    (mirrored_x, mirrored_y), (base_x, base_y) = _times(N - 1), _times(1)
    p = 2**256 - 2**224 + 2**192 + 2**96 - 1
    assert (mirrored_x, mirrored_y) == (base_x, p - base_y)
