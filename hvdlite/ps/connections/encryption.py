"""Encryption of connections: TLS 1.3 with a key that both ends make of the token.

The key is of Ed25519 (RFC 8032). Each end shows a certificate that this key has signed itself, the
same at both, and accepts no other: so who does not know the token gets no further, from either
side, and what is sent is encrypted with keys of this one connection, which the token does not tell
afterwards. TLS begins when both ends have proved themselves: OpenSSL reads nothing of a stranger.

The standard library makes no certificates, and Python has keys without them (PSK) from 3.13 on, so
the package `cryptography` makes them.
"""

from __future__ import annotations

import datetime
import errno
import os
import socket
import ssl
from collections.abc import Callable

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.frames import Buffer
from hvdlite.common.connections.loop import READ, WRITE, Loop
from hvdlite.common.connections.prove import proof
from hvdlite.common.connections.strangers import Stranger

HANDSHAKE_SECONDS = 60.0  # The other end may be busy.
MOST_BYTES = 1 << 20  # Of one reading: others wait for the same thread.
PURPOSE = b"hvdlite parameter server TLS key"


def certificate(token: bytes) -> tuple[str, str]:
    """Return a certificate and its private key, as PEM, that are the same for the same token.

    Raises `ConfigError` where the package that makes them is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigError(
            f"HVDLITE_PS_TLS=1 needs a package that is not there ({error}): "
            "pip install 'hvdlite[ps]'"
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(proof(token, PURPOSE, b"", b""))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hvdlite parameter server")])
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), serial_number=1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )  # fmt: skip
    return built.public_bytes(pem).decode(), private.decode()


class Encryption:
    """What the connections of a process need that are encrypted with keys of a token."""

    def __init__(self, token: bytes) -> None:
        shown, private = certificate(token)
        self._contexts = {
            True: _context(ssl.PROTOCOL_TLS_SERVER, shown, private),
            False: _context(ssl.PROTOCOL_TLS_CLIENT, shown, private),
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
        stranger = Stranger(loop, encrypted, lambda error: failed(str(error)))

        def end(why: str) -> None:
            stranger.fail(ConnectionError(why))

        def step(_events: int = 0) -> None:
            try:
                encrypted.do_handshake()
            except ssl.SSLWantReadError:
                loop.watch(encrypted.fileno(), READ, step)
            except ssl.SSLWantWriteError:
                loop.watch(encrypted.fileno(), WRITE, step)
            except OSError as error:
                end(f"it could not be encrypted: {error}")
            else:
                stranger.release()
                done(encrypted)

        loop.call_after(HANDSHAKE_SECONDS, lambda: end("it did not begin to encrypt"))
        step()
        return lambda: end("it was given up")


def _context(protocol: ssl._SSLMethod, shown: str, private: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = Encrypted
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.load_verify_locations(cadata=shown)
    memory = os.memfd_create("hvdlite-ps-key", os.MFD_CLOEXEC)  # OpenSSL wants a file.
    try:
        os.write(memory, (shown + private).encode())
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
        except OSError:
            if self.version() is None:  # `wrap_socket` reads what was reset, and leaves it open.
                self.close()
            raise

    def recvmsg_into(  # type: ignore[override]
        self, buffers: list[memoryview]
    ) -> tuple[int]:
        """Fill `buffers` in order, at most `MOST_BYTES` and the record that was begun.

        Return how many bytes came, none at the end.
        """
        total = 0
        try:
            for buffer in buffers:
                while buffer:
                    most = len(buffer) if total < MOST_BYTES else self.pending()
                    if not most:
                        return (total,)
                    count = self.recv_into(buffer[:most])
                    if not count:
                        return (total,)
                    buffer, total = buffer[count:], total + count  # noqa: PLW2901
        except ssl.SSLError as error:
            if not total:
                raise _plain(error) from None
        return (total,)

    def send(self, data: Buffer, flags: int = 0) -> int:  # type: ignore[override]
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
