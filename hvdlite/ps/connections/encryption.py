"""Encryption of connections: TLS 1.3 with a key that both ends make of the token.

The key is one of the curve P-256. Each end shows a certificate that this key has signed itself,
and accepts no other: so who does not know the token gets no further, from either side, and what is
sent is encrypted with keys of this one connection, which the token does not tell afterwards. TLS
begins when both ends have proved themselves: OpenSSL reads nothing of a stranger.

The standard library makes no certificates, and Python has keys without them (PSK) from 3.13 on; so
the one of these few fixed fields is written here, in DER (X.690), with its signature (FIPS 186-5).
The arithmetic takes a time that depends on the key: it is done once, before anything is sent.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import socket
import ssl
from collections.abc import Callable

from hvdlite.common.connections.frames import Buffer
from hvdlite.common.connections.loop import READ, WRITE, Loop
from hvdlite.common.connections.prove import proof

HANDSHAKE_SECONDS = 60.0  # The other end may be busy.

# The curve P-256: its field, order, coefficient b and base point (SP 800-186, 3.2.1.3).
P = 2**256 - 2**224 + 2**192 + 2**96 - 1
N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int]

INTEGER, BITS, OCTETS, OID, TEXT, TIME, SEQUENCE, SET = 2, 3, 4, 6, 12, 24, 48, 49
EC_KEY = bytes.fromhex("2a8648ce3d0201")
P256 = bytes.fromhex("2a8648ce3d030107")
ECDSA_SHA256 = bytes.fromhex("2a8648ce3d040302")
COMMON_NAME = bytes.fromhex("550403")


def _add(one: Point | None, other: Point | None) -> Point | None:
    """Return the sum of two points; None is the one at infinity."""
    if one is None or other is None:
        return one or other
    (x1, y1), (x2, y2) = one, other
    if x1 == x2:
        if (y1 + y2) % P == 0:
            return None
        slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, P)  # The coefficient a is -3.
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, P)
    x = (slope * slope - x1 - x2) % P
    return x, (slope * (x1 - x) - y1) % P


def _times(factor: int) -> Point:
    """Return a multiple of the base point."""
    total: Point | None = None
    power: Point | None = G
    while factor:
        if factor & 1:
            total = _add(total, power)
        power = _add(power, power)
        factor >>= 1
    assert total is not None
    return total


def _number(words: bytes, *, key: bytes) -> int:
    """Return a number from 1 to N - 1 that only who knows the key can tell."""
    wide = b"".join(proof(key, half, b"", words) for half in (b"first", b"second"))
    return 1 + int.from_bytes(wide, "big") % (N - 1)


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 0x80:
        return bytes([tag, len(body)]) + body
    length = len(body).to_bytes(2, "big").lstrip(b"\0")
    return bytes([tag, 0x80 | len(length)]) + length + body


def _integer(value: int) -> bytes:
    return _der(INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _sign(secret: int, words: bytes) -> bytes:
    """Return a signature of the curve, whose random number is made of what is signed."""
    digest = hashlib.sha256(words).digest()
    once = _number(digest, key=secret.to_bytes(32, "big"))
    r = _times(once)[0] % N
    s = pow(once, -1, N) * (int.from_bytes(digest, "big") + r * secret) % N
    return _der(SEQUENCE, _integer(r), _integer(s))


def certificate(token: bytes) -> str:
    """Return a certificate and its private key, as PEM, that are made of a token."""
    secret = _number(b"hvdlite parameter server TLS key", key=token)
    x, y = _times(secret)
    public = _der(BITS, b"\0\4" + x.to_bytes(32, "big") + y.to_bytes(32, "big"))
    algorithm = _der(SEQUENCE, _der(OID, ECDSA_SHA256))
    text = _der(TEXT, b"hvdlite parameter server")
    name = _der(SEQUENCE, _der(SET, _der(SEQUENCE, _der(OID, COMMON_NAME), text)))
    always = _der(SEQUENCE, _der(TIME, b"20000101000000Z"), _der(TIME, b"99991231235959Z"))
    key = _der(SEQUENCE, _der(SEQUENCE, _der(OID, EC_KEY), _der(OID, P256)), public)
    about = _der(SEQUENCE, _der(0xA0, _integer(2)), _integer(1), algorithm, name, always, name, key)
    signed = _der(SEQUENCE, about, algorithm, _der(BITS, b"\0", _sign(secret, about)))
    private = _der(
        SEQUENCE, _integer(1), _der(OCTETS, secret.to_bytes(32, "big")),
        _der(0xA0, _der(OID, P256)), _der(0xA1, public),
    )  # fmt: skip
    return _pem("CERTIFICATE", signed) + _pem("EC PRIVATE KEY", private)


def _pem(what: str, der: bytes) -> str:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN {what}-----\n{text}-----END {what}-----\n"


class Encryption:
    """What the connections of a process need that are encrypted with keys of a token."""

    def __init__(self, token: bytes) -> None:
        pem = certificate(token)
        self._contexts = {
            True: _context(ssl.PROTOCOL_TLS_SERVER, pem),
            False: _context(ssl.PROTOCOL_TLS_CLIENT, pem),
        }

    def begin(
        self, loop: Loop, connection: socket.socket, *, listens: bool,
        done: Callable[[socket.socket], None], failed: Callable[[str], None] = lambda why: None,
    ) -> Callable[[], None]:  # fmt: skip
        """Encrypt a connection; `done` gets what is used instead of it, unless it has failed.

        What is returned gives it up.
        """
        try:
            encrypted = self._contexts[listens].wrap_socket(
                connection, server_side=listens, do_handshake_on_connect=False
            )
        except OSError as error:
            connection.close()
            failed(str(error))
            return lambda: None
        pending = True

        def end(why: str) -> None:
            nonlocal pending
            if pending:
                pending = False
                loop.forget(encrypted.fileno())
                encrypted.close()
                failed(why)

        def step(_events: int = 0) -> None:
            nonlocal pending
            try:
                encrypted.do_handshake()
            except ssl.SSLWantReadError:
                loop.watch(encrypted.fileno(), READ, step)
            except ssl.SSLWantWriteError:
                loop.watch(encrypted.fileno(), WRITE, step)
            except OSError as error:
                end(f"it could not be encrypted: {error}")
            else:
                pending = False
                loop.forget(encrypted.fileno())
                done(encrypted)

        loop.call_after(HANDSHAKE_SECONDS, lambda: end("it did not begin to encrypt"))
        step()
        return lambda: end("it was given up")


def _context(protocol: ssl._SSLMethod, pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = Encrypted
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.load_verify_locations(cadata=pem.partition("-----BEGIN EC")[0])
    memory = os.memfd_create("hvdlite-ps-key", os.MFD_CLOEXEC)  # OpenSSL wants a file.
    try:
        os.write(memory, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


class Encrypted(ssl.SSLSocket):
    """A connection that is encrypted, with the methods of a socket as a `Link` calls them."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Return at most so many bytes; none at the end."""
        try:
            return super().recv(buflen, flags)
        except ssl.SSLError as error:
            raise _plain(error) from None

    def recvmsg_into(  # type: ignore[override]
        self, buffers: list[memoryview]
    ) -> tuple[int]:
        """Fill `buffers` in order; return how many bytes came, none at the end."""
        total = 0
        try:
            for buffer in buffers:
                while buffer:
                    count = self.recv_into(buffer)
                    if not count:
                        return (total,)
                    buffer, total = buffer[count:], total + count  # noqa: PLW2901
        except ssl.SSLError as error:
            if not total:
                raise _plain(error) from None
        return (total,)

    def send(self, data: Buffer, flags: int = 0) -> int:  # type: ignore[override]
        """Send some of `data`; return how much."""
        try:
            return super().send(data)
        except ssl.SSLError as error:
            raise _plain(error) from None

    def sendmsg(  # type: ignore[override]
        self, parts: list[Buffer], ancillary: tuple[()] = (), flags: int = 0
    ) -> int:
        """Send some of the first of `parts`; return how many bytes."""
        return self.send(parts[0])

    def shutdown(self, how: int) -> None:
        """Let the other end read the end of what was written; what it sends stays encrypted."""
        socket.socket.shutdown(self, how)


def _plain(error: ssl.SSLError) -> OSError:
    """Return what a socket would have raised."""
    if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return ConnectionError(f"what came is not encrypted as it should be ({error.reason})")
