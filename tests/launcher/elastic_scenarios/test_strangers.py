"""Other processes connect to all sockets of a job: nothing comes of it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.elastic.jobs import elastic, kill
from tests.launcher.jobs import processes

pytestmark = pytest.mark.timeout(60)

LISTENS_TCP, LISTENS_UNIX = "0A", "00010000"
# Nothing, or less than the proof that is due: the connection is closed when its time is over. Then
# more than that: another protocol, lengths of a gigabyte, zeros.
SHORT = [b"", b"GET / HTTP/1.1\r\n\r\n", (1 << 30).to_bytes(4, "little")]
LONG = [b"GET / HTTP/1.1\r\n\r\n" * 50, (1 << 30).to_bytes(4, "little") * 250, bytes(1000)]


def holders(pids: dict[int, str]) -> dict[str, int]:
    """The sockets that these processes hold, and who holds each."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                target = os.readlink(path)
                if target.startswith("socket:["):
                    found[target[len("socket:[") : -1]] = pid
    return found


def listeners(pids: dict[int, str]) -> Iterator[tuple[int, str | tuple[str, int]]]:
    """Yield family and address of all sockets at which these processes listen."""
    own = holders(pids)
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENS_TCP and words[9] in own:
            address, port = words[1].split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            yield socket.AF_INET, (host, int(port, 16))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        path = words[7] if len(words) > 7 else "/proc/self/"
        if words[3] == LISTENS_UNIX and words[6] in own and not path.startswith("/proc/self/"):
            yield socket.AF_UNIX, path.replace("@", "\0", 1)
    for path in driver_sockets(pids):  # They are bound by way of their folders.
        yield socket.AF_UNIX, path


def driver_sockets(pids: dict[int, str]) -> set[str]:
    """The sockets at which agents listen for their workers."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, address = line.decode().partition("=")
            if name == "HVDLITE_ELASTIC_DRIVER":
                found.add(address.removeprefix("unix:"))
    return found


def connect(family: int, address: str | tuple[str, int], attack: bytes) -> socket.socket:
    stranger = socket.socket(family, socket.SOCK_STREAM)
    stranger.settimeout(15)
    try:
        stranger.connect(address)
        stranger.sendall(attack)
    except ConnectionError:  # It is closed already: that is right, too.
        pass
    return stranger


def wait_until_closed(stranger: socket.socket) -> None:
    """Wait until the other side has closed; raises `TimeoutError`."""
    with contextlib.suppress(ConnectionError):
        while stranger.recv(4096):
            pass


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    words = ("-np", "4", "--min-np", "1", "-H", "localhost:2,127.0.0.1:2")
    with elastic(tmp_path, *words) as job:
        first = job.watch.world(4)
        found = list(listeners(processes(str(tmp_path))))
        assert {family for family, _ in found} == {socket.AF_INET, socket.AF_UNIX}
        assert len(driver_sockets(processes(str(tmp_path)))) == 2  # One of each host.
        with contextlib.ExitStack() as stack:
            for family, address in found:
                for attack in (*SHORT, *LONG):
                    stranger = stack.enter_context(connect(family, address, attack))
                    if attack in LONG:
                        wait_until_closed(stranger)
            assert {place.epoch for place in job.watch.places()} == {1}
            kill(first[3])  # Other worlds are built while the silent ones are connected.
            three = job.watch.world(3)
            assert [place.pid for place in three] == [place.pid for place in first[:3]]
            again = job.watch.world(4, epoch=three[0].epoch + 1)
            assert [place.pid for place in again[:3]] == [place.pid for place in three]
        assert job.end() == 0
