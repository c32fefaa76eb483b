"""Connects to sockets of a job, whose list it is given, and says what nobody of the job says."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time

# Nothing, or less than the proof that is due: the connection is closed when its time is over. Then
# more than that: another protocol, lengths of a gigabyte, zeros.
SHORT = [b"", b"GET / HTTP/1.1\r\n\r\n", (1 << 30).to_bytes(4, "little")]
LONG = [b"GET / HTTP/1.1\r\n\r\n" * 50, (1 << 30).to_bytes(4, "little") * 250, bytes(1000)]


def connect(family: int, address: str | tuple[str, int], attack: bytes) -> socket.socket:
    stranger = socket.socket(family, socket.SOCK_STREAM)
    stranger.settimeout(15)
    stranger.connect(address)
    with contextlib.suppress(ConnectionError):  # It is closed already: that is right, too.
        stranger.sendall(attack)
    return stranger


def wait_until_closed(stranger: socket.socket) -> None:
    """Wait until the other side has closed; raises `TimeoutError`."""
    with contextlib.suppress(ConnectionError):
        while stranger.recv(4096):
            pass


def main() -> None:
    """Say "closed" when all that say too much were closed; the others stay until this ends."""
    strangers = []
    for family, address in json.loads(sys.argv[1]):
        where = tuple(address) if isinstance(address, list) else address
        for attack in (*SHORT, *LONG):
            strangers.append(connect(family, where, attack))
            if attack in LONG:
                wait_until_closed(strangers[-1])
    print("closed", flush=True)
    time.sleep(100)


if __name__ == "__main__":
    main()
