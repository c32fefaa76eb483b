"""Addresses of processes, such as ``unix:/path``, ``node1:2222`` and ``[fe80::1]:2222``."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.loop import Loop

UNIX = "unix:"
BACKLOG = 4096  # All ranks of a job may connect at once. The kernel limits it further.
LARGEST_PORT = 65535
# Why a connection that waits cannot be accepted now: there are too many open files, or no memory.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Address(NamedTuple):
    """A Unix socket (`path`), or a host name or IP address and a port."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def may_be_served(self) -> bool:
        """Return whether somebody may come to listen here: not where the folder has gone."""
        return not self.path or os.path.isdir(os.path.dirname(self.path) or ".")


def parse_address(text: str, source: str) -> Address:
    """Return the address that `text` says. Raises `ConfigError` that names its `source`."""
    if text.startswith(UNIX) and text != UNIX:
        return Address(path=text.removeprefix(UNIX))
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    if not (colon and bare and port.isdecimal() and 0 < int(port) <= LARGEST_PORT):
        raise ConfigError(f"{source}={text!r}: must be host:port, [IPv6]:port or unix:/path")
    if ":" in bare and not bracketed:
        raise ConfigError(f"{source}={text!r}: an IPv6 address needs brackets, as in [::1]:2222")
    return Address(bare, int(port))


class Target(NamedTuple):
    """What a socket connects to."""

    family: int
    address: Any

    def __str__(self) -> str:
        if self.family == socket.AF_UNIX:
            named = isinstance(self.address, str)
            return f"{UNIX}{self.address}" if named else "its socket on this host"
        host, port = self.address[:2]
        return str(Address(host, port))

    def connect(self, connection: socket.socket) -> int:
        """Begin to connect; return the number of an error, as `socket.connect_ex`.

        Raises `OSError` where the folder of a Unix socket does not exist.
        """
        if self.family == socket.AF_UNIX and isinstance(self.address, str):
            with short_path(self.address) as short:
                return connection.connect_ex(short)
        return connection.connect_ex(self.address)


def targets(address: Address) -> list[Target]:
    """Return what to try to reach `address`. Raises `OSError` while its name does not resolve."""
    if address.path:
        return [Target(socket.AF_UNIX, address.path)]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [Target(family, name) for family, _, _, _, name in found]


def look_up(loop: Loop, address: Address, done: Callable[[list[Target] | OSError], None]) -> None:
    """Call `done` in the loop with the `targets` of `address`, or with why its name has none.

    A slow name server holds up a thread of its own, and not the loop.
    """

    def run() -> None:
        found: list[Target] | OSError
        try:
            found = targets(address)
        except OSError as error:
            found = error
        loop.post(lambda: done(found))

    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        threading.Thread(target=run, name="hvdlite look-up", daemon=True).start()
    else:
        run()


def connect(address: Address, seconds: float) -> socket.socket:
    """Return a connection to `address`, tried for `seconds`. Raises `OSError`."""
    if address.path:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connection = socket.create_connection((address.host, address.port), timeout=seconds)
    try:
        if address.path:
            connection.settimeout(seconds)
            with short_path(address.path) as short:
                connection.connect(short)
        else:
            prepare_tcp(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare_tcp(connection: socket.socket) -> None:
    """Set the options of a new TCP connection.

    Raises `OSError` where the other end has reset it already, and where it has no other end: TCP
    may connect a port of the system's choice with itself while nobody listens there.
    """
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at `address`. Raises `OSError`.

    It is bound to the one address that the host's name stands for, so that other networks do not
    reach it. It is bound to all of them where the name is not an address of this host (behind a
    translated address), does not resolve yet (the name of a pod), or stands for loopback here only
    (as a hostname in many /etc/hosts).
    """
    if address.path:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(address.path) as short:
                listener.bind(short)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    refused: OSError | None = None
    for family, host in _resolve(address):
        loopback = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        if loopback and address.host not in ("localhost", host):
            continue  # The other ranks do not look there.
        try:
            return socket.create_server((host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            refused = error
    if refused is not None and refused.errno == errno.EACCES:  # a port below 1024
        raise refused
    return listen_everywhere(address.port)


def listen_everywhere(port: int) -> socket.socket:
    """Return a socket that listens at `port` of all addresses of this host. Raises `OSError`."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=BACKLOG)


def is_here(address: Address) -> bool:
    for family, host in _resolve(address):
        try:
            socket.create_server((host, 0), family=family).close()
        except OSError:
            continue
        return True
    return False


def _resolve(address: Address) -> list[tuple[socket.AddressFamily, str]]:
    """Return the IP addresses of a name; none while it does not resolve.

    The name of a pod may resolve only after the pod is ready, and rank 0 needs none to listen.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return [(family, str(host)) for family, _, _, _, (host, *_) in found]


@contextmanager
def short_path(path: str) -> Iterator[str]:
    """Yield a name of the file `path` that is short enough for a socket (107 bytes at most)."""
    folder = os.open(os.path.dirname(path) or ".", os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
