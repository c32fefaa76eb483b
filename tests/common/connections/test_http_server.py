"""The server in the launcher's loop: what it answers, and what it bears."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.common.connections import http_server
from hvdlite.common.connections.http_server import Content, HttpServer, Request
from hvdlite.common.connections.loop import Loop

pytestmark = pytest.mark.timeout(60)
PAGE = b"x" * 3_000_000  # More than sockets hold.
GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


class Site:
    """A server, its loop, and clients that one thread drives together."""

    def __init__(self) -> None:
        self.loop = Loop()
        pages = {"/metrics": Content("text/plain", b"page"), "/long": Content("a/b", PAGE)}
        self.found: list[str] = []

        def find(request: Request) -> Content | None:
            self.found.append(request.path)
            return pages.get(request.path)

        self.server = HttpServer(self.loop, socket.create_server(("127.0.0.1", 0)), find)

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
        client.sendall(data)
        client.setblocking(False)
        return client

    def run(self, until: Callable[[], bool], seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() > end:
                return False
            self.loop.run_once(0.01)
        return True

    def answer(self, data: bytes) -> bytes:
        """What a client gets that sends `data`, and nothing more."""
        client = self.connect(data)
        client.shutdown(socket.SHUT_WR)
        read: list[bytes] = []

        def ended() -> bool:
            try:
                read.append(client.recv(1 << 20))
            except BlockingIOError:
                return False
            except OSError:
                read.append(b"")
            return not read[-1]

        assert self.run(ended), "no end"
        client.close()
        return b"".join(read)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(http_server, "MOST_A_SECOND", 1000)
    site = Site()
    yield site
    site.server.close()
    site.server.close()
    site.loop.close()


def test_pages_by_their_paths(site: Site) -> None:
    head, _, body = site.answer(GET).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4")
    assert body == b"page"
    assert site.answer(GET.replace(b"metrics", b"metrics?a=b")).endswith(b"page")
    assert site.answer(GET.replace(b"metrics", b"etc/passwd")).startswith(b"HTTP/1.1 404 ")
    assert site.answer(GET.replace(b"metrics", b"long")).endswith(b"\r\n\r\n" + PAGE)


@pytest.mark.parametrize(
    "request_", [b"POST /metrics HTTP/1.1\r\n\r\n", b"GET metrics HTTP/1.1\r\n\r\n", b"\r\n\r\n",
                 b"GET /a b HTTP/1.1\r\n\r\n", b"\0" * 50 + b"\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request(site: Site, request_: bytes) -> None:
    assert site.answer(request_).startswith(b"HTTP/1.1 400 ")
    assert site.found == []


def test_a_request_without_end(site: Site) -> None:
    assert site.answer(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000)[:13] in (b"HTTP/1.1 431 ", b"")
    assert site.answer(b"GET / HTTP/1.1\r\nA: b") == b""
    assert site.answer(GET).endswith(b"page")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.binary(max_size=200) | st.sampled_from([GET, GET[:9], b"\r\n\r\n", b"HTTP/1.1"]))
)
def test_bytes_of_any_kind(site: Site, parts: list[bytes]) -> None:
    answer = site.answer(b"".join(parts))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert site.answer(GET).endswith(b"page")


def test_who_says_nothing_has_to_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE_SECONDS", 0.2)
    silent, reads_nothing = site.connect(b"GET /"), site.connect(GET.replace(b"metrics", b"long"))
    assert site.run(lambda: len(site.server._open) == 2)
    assert site.run(lambda: not site.server._open)
    assert silent.recv(1) == b""
    silent.close()
    reads_nothing.close()


def test_no_more_than_a_few_a_second(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_A_SECOND", 3)
    clients = [site.connect(GET) for _ in range(7)]
    began = time.monotonic()
    assert site.run(lambda: len(site.found) == 3)
    assert not site.run(lambda: len(site.found) > 3, seconds=0.3)
    assert site.run(lambda: len(site.found) == 7)
    assert time.monotonic() - began > 0.9
    for client in clients:
        client.close()


def test_no_more_than_a_few_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_OPEN", 2)
    silent = [site.connect() for _ in range(2)]
    last = site.connect(GET)
    assert site.run(lambda: len(site.server._open) == 2)
    for client in silent:
        client.close()
    assert site.run(lambda: site.found == ["/metrics"])
    last.close()
