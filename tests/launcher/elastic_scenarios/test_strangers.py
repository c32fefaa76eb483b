"""Other processes connect to all sockets of a job: nothing comes of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.elastic.jobs import elastic, kill
from tests.launcher.jobs import processes

pytestmark = pytest.mark.timeout(60)

LISTENS_TCP, LISTENS_UNIX = "0A", "00010000"
# Nothing at all, another protocol, and the length of a message of a gigabyte.
ATTACKS = [b"", b"GET / HTTP/1.1\r\n\r\n", (1 << 30).to_bytes(4, "little") * 4, bytes(1000)]


def inodes(pids: dict[int, str]) -> set[str]:
    """The sockets that these processes hold."""
    found = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(path)
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found


def listeners(pids: dict[int, str]) -> Iterator[tuple[int, str | tuple[str, int]]]:
    """Yield family and address of all sockets at which these processes listen."""
    own = inodes(pids)
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENS_TCP and words[9] in own:
            address, port = words[1].split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            yield socket.AF_INET, (host, int(port, 16))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENS_UNIX and words[6] in own and len(words) > 7:
            yield socket.AF_UNIX, words[7].replace("@", "\0", 1)


def connect(family: int, address: str | tuple[str, int], attack: bytes) -> socket.socket:
    stranger = socket.socket(family, socket.SOCK_STREAM)
    stranger.settimeout(15)
    try:
        stranger.connect(address)
        stranger.sendall(attack)
    except ConnectionError:  # It is closed already: that is right, too.
        pass
    except OSError as error:  # Not a stream.
        assert "wrong type" in str(error), error
    return stranger


def is_closed(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        return True
    return True


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    words = ("-np", "4", "--min-np", "1", "-H", "localhost:2,127.0.0.1:2")
    with elastic(tmp_path, *words) as job:
        first = job.watch.world(4)
        found = list(listeners(processes(str(tmp_path))))
        assert {family for family, _ in found} == {socket.AF_INET, socket.AF_UNIX}
        strangers = [
            (attack, connect(family, address, attack))
            for family, address in found
            for attack in ATTACKS
        ]
        assert all(is_closed(each) for attack, each in strangers if attack)
        time.sleep(0.2)  # They would disturb by now; those who are silent stay.
        assert {place.epoch for place in job.watch.places()} == {1}
        kill(first[3])  # Another world is built while they are connected.
        three = job.watch.world(3)
        assert [place.pid for place in three] == [place.pid for place in first[:3]]
        again = job.watch.world(4, epoch=three[0].epoch + 1)
        assert [place.pid for place in again[:3]] == [place.pid for place in three]
        for _, stranger in strangers:
            stranger.close()
        assert job.end() == 0
