"""The socket of a running job: who may use it, and what may come over it."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections import strangers
from hvdlite.common.connections.address import Address, connect
from hvdlite.launcher.inspection import runtime_folder, service
from hvdlite.launcher.inspection.service import LocalService
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.top.connection import JobConnection, Unreachable, find_jobs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hvdlite"
    monkeypatch.setattr(runtime_folder, "folders", lambda: [str(path)])
    return path


class Served:
    """A service whose loop runs in a thread; it answers each request with itself."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.asked: list[Any] = []
        self.answer: dict[str, Any] | None = None  # None: the request.
        self.service = LocalService(self.loop, self._make, print)
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _make(self, request: Any, done: Any) -> None:
        self.asked.append(request)
        if request != ["later"]:
            done(self.answer or {"request": list(request)})

    def _run(self) -> None:
        while not self._over:
            self.loop.run_once(5.0)

    def close(self) -> None:
        def end() -> None:
            self.service.close()
            self._over = True

        self.loop.post(end)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.loop.close()


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    one = Served()
    yield one
    one.close()
    assert not folder.exists(), "the last one leaves no folder"


def test_a_request_is_answered(served: Served, folder: Path) -> None:
    assert (folder.stat().st_mode & 0o777, len(list(folder.iterdir()))) == (0o700, 1)
    loop = EventLoop()
    paths, refused = find_jobs()
    assert (len(paths), refused) == (1, [])
    one, other = JobConnection(loop, paths[0]), JobConnection(loop, paths[0])
    assert other.ask_now(["stack", 3]) == {"request": ["stack", 3]}
    assert one.ask_now(["look"]) == {"request": ["look"]}
    one.close()
    assert other.ask_now(["look"]) == {"request": ["look"]}
    for _ in range(service.MOST_OPEN):
        other.ask(["later"], lambda answer: None)
    assert other.ask_now(["one too many"]) == {"error": "8 questions are open already"}
    assert ["one too many"] not in served.asked
    other.close()
    loop.close()


@pytest.mark.parametrize("value", ["\ud800", 1 << 64, object()])
def test_an_answer_that_cannot_be_sent(served: Served, value: object) -> None:
    served.answer = {"stack": value}
    loop = EventLoop()
    connection = JobConnection(loop, find_jobs()[0][0])
    for _ in range(2):
        answer = connection.ask_now(["stack", 0])
        assert re.match("the answer cannot be sent: .*Error", answer["error"]), answer
    assert list(served.service._viewers.values()) == [0]
    connection.close()
    loop.close()


def test_hostile_bytes(served: Served) -> None:
    """Neither before nor after the proof does anything but a request reach the job."""
    path, generator = find_jobs()[0][0], random.Random(5)
    for number in range(60):
        with socket.socket(socket.AF_UNIX) as hostile:
            hostile.connect(path)
            hostile.sendall(generator.randbytes(generator.randrange(1, 3000)))
            if number % 2:
                hostile.close()
    loop = EventLoop()
    bad = [
        b"\xff" * 8, b"\0" * 100, b"\x05\0\0\0\0\0\0\0\x93\xa3ask", b"\x04\0\0\0\0\0\0\0\x91\xa2as",
        b"\x10\0\0\0\xff\xff\0\0" + bytes(100), generator.randbytes(500),
    ]  # fmt: skip
    for data in bad:
        connection, ended = JobConnection(loop, path), list[bool]()
        connection.ended = lambda ended=ended: ended.append(True)  # type: ignore[misc]
        connection._link.send_bytes(data)
        connection._link.finish()
        while not ended:
            assert loop.run_once(10.0)
    assert served.asked == []
    connection = JobConnection(loop, path)
    assert connection.ask_now(["look"]) == {"request": ["look"]}
    connection.close()
    loop.close()


def test_another_user(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers.os, "geteuid", lambda: os.getuid() + 1)
    path = find_jobs()
    assert path[0] == [], "the folder is another user's now"
    with pytest.raises(Unreachable):
        JobConnection(EventLoop(), str(next(iter_sockets(served))))
    assert served.asked == []


def iter_sockets(served: Served) -> Iterator[str]:
    yield served.service._path


def test_stale_sockets_go(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for name in ("1.sock", "2.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / name))
    for name, age in ((".7-0123abcd", 100.0), (".8-0123abcd", 0.0)):  # Before they listen.
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / name))
        os.utime(folder / name, (time.time() - age,) * 2)
    (folder / "other").touch()
    assert find_jobs() == ([], [])
    assert {path.name for path in folder.iterdir()} == {"other", ".8-0123abcd"}
    listener, path = runtime_folder.publish()
    os.rename(path, folder / "3.sock")
    again, second = runtime_folder.publish()
    assert sorted(find_jobs()[0]) == sorted([str(folder / "3.sock"), second])
    connect(Address(path=second), 1.0).close()
    listener.close()
    again.close()
    assert find_jobs() == ([], [])


def test_folders_that_are_not_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match=r"others may enter .*: chmod 700"):
        runtime_folder.publish()
    assert "chmod 700" in find_jobs()[1][0]
    folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(runtime_folder.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match="belongs to user"):
            runtime_folder.publish()
    folder.rmdir()
    folder.symlink_to(folder.parent)
    with pytest.raises(ConfigError, match="is no folder"):
        runtime_folder.publish()
    folder.unlink()


def test_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job goes on without a socket, and who looks finds no job."""

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(runtime_folder.tempfile, "gettempdir", none)
    monkeypatch.setattr(runtime_folder.os, "access", lambda *_: False)
    said, loop = list[str](), EventLoop()
    LocalService(loop, lambda request, done: None, said.append).close()
    assert len(said) == 1 and "set XDG_RUNTIME_DIR to a folder of your own" in said[0]
    assert find_jobs() == ([], [])
    loop.close()


def test_a_socket_goes_where_nobody_listens_at_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(service, "Listener", fails)
    said, loop = list[str](), EventLoop()
    LocalService(loop, lambda request, done: None, said.append)
    assert said == ["hvdlite-top cannot look at this job: Too many open files"]
    assert not folder.exists()
    loop.close()


def test_a_socket_does_not_grow_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TOUCH_SECONDS", 0.01)
    loop = EventLoop()
    one = LocalService(loop, lambda request, done: None, print)
    os.utime(one._path, (0, 0))
    while not os.stat(one._path).st_mtime:
        loop.run_once(1.0)
    one.close()
    loop.close()


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder.folders()[0] == str(tmp_path / "hvdlite")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert f"/tmp/hvdlite-{os.geteuid()}" in runtime_folder.folders()
