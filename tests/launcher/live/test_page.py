"""The page of a job: to whom it is served, and what is in it."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.metrics import Sample, pack
from hvdlite.common.connections import http_server
from hvdlite.common.connections.http_server import HttpServer, Request
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.launcher.command_line.live_options import LiveOptions, live_options
from hvdlite.launcher.live import live_view
from hvdlite.launcher.live.job_view import STALL, JobView
from hvdlite.launcher.live.live_view import LiveView
from hvdlite.launcher.live.page import LivePage
from hvdlite.launcher.live.snapshot import snapshot
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop
from tests.common.connections.test_http_server import Site

pytestmark = pytest.mark.timeout(60)
HOSTILE = "</script><script>document.title='stolen'</script><img src=x onerror=alert(1)>"


def page_of_a_job() -> LivePage:
    """The page of two ranks whose names are hostile, after eight seconds."""
    page, job = LivePage("train.py"), JobView()
    job.note(STALL, HOSTILE, 0.0)
    for second in range(8):
        for rank in range(2):
            values = {
                "steps_total": 10 * second, "step_seconds_total": second, "memory_bytes": 5 << 20,
                "compute_seconds_total": 0.75 * second,
                "exchange_waited_seconds_total": 0.25 * second,
                "progress_steps": 10 * second, "progress_total_steps": 700,
            }  # fmt: skip
            job.take(f"{HOSTILE}{rank}", rank, pack(Sample(rank, 2, values, HOSTILE)), 1.0 * second)
        page.look(snapshot(job, 1.0 * second, 1e9 + second))
    return page


def ask(page: LivePage, rest: str = "", *lines: str, host: str = "127.0.0.1:80") -> str:
    """The status that a request gets."""
    content = page.find(Request(f"/{page.token}{rest}", (f"Host: {host}", *lines)))
    return "404" if content is None else content.status[:3]


def test_who_does_not_know_the_token_finds_nothing() -> None:
    page = page_of_a_job()
    assert len(page.token) == 32 and page.token != page_of_a_job().token
    for path in ("/", "/data/", f"/{page.token[:-1]}/", f"/{page.token}x/", f"//{page.token}/"):
        assert page.find(Request(path, ("Host: localhost",))) is None, path
    assert (ask(page), ask(page, "/"), ask(page, "/data/"), ask(page, "/data/1")) == ("200",) * 4
    for rest in ("/data", "/data/x", "/data/-1", "/data/1/", "/../", "/x", "/data/" + "1" * 10):
        assert ask(page, rest) == "404", rest


def test_names_that_a_stranger_may_let_stand_for_this_host() -> None:
    page = page_of_a_job()
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "10.0.0.7:80", socket.gethostname()):
        assert ask(page, "/", host=host) == "200", host
    for host in ("evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil.example:1"):
        assert ask(page, "/", host=host) == ask(page, "/data/", host=host) == "403", host
    assert ask(page, "/data/", "Host: evil.example") == "403", "one of two"
    named = LivePage("train.py", "Node1.Example")  # As hvdlite-run prints it, and browsers ask.
    assert ask(named, "/", host="node1.example:80") == "200"
    assert ask(named, "/", host="evil.example:80") == ask(named, "/", host="") == "403"


def test_other_origins() -> None:
    page, own = page_of_a_job(), "Origin: http://127.0.0.1:80"
    assert ask(page, "/data/", own, "Sec-Fetch-Site: same-origin") == "200"
    for line in ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site", "Origin: null",
                 "Origin: http://evil.example", "Origin: http://127.0.0.1:81"):  # fmt: skip
        assert ask(page, "/", line) == ask(page, "/data/", line) == "403", line
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert ask(page, "/", *link, "Sec-Fetch-Dest: document") == "200"
    assert ask(page, "/", *link, "Sec-Fetch-Dest: iframe") == "403"
    assert ask(page, "/data/", *link, "Sec-Fetch-Dest: document") == "403"
    content = page.find(Request(f"/{page.token}/", ("Host: localhost",)))
    assert content is not None
    headers = dict(content.headers)
    assert not any(name.startswith("Access-Control") for name in headers)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert headers["Referrer-Policy"] == "no-referrer"


def test_what_it_tells() -> None:
    page = page_of_a_job()
    content = page.find(Request(f"/{page.token}/data/1", ("Host: localhost",)))
    assert content is not None
    data = json.loads(content.body)
    assert (data["title"], data["ended"], data["steps_a_second"]) == ("train.py", None, 10)
    assert data["ranks"][1]["host"] == HOSTILE + "1"
    assert list(data["history"]["ranks"]) == ["1"]
    assert data["history"]["ranks"]["1"]["share"][-1] == 0.25


def test_the_report_has_all_and_asks_nobody() -> None:
    page = page_of_a_job()
    page.end("rank 1 failed")
    report = page.report()
    (text,) = re.findall(r'id="data">(.*?)</script>', report)
    data = json.loads(text)
    assert data["ended"] == "rank 1 failed" and list(data["history"]["ranks"]) == ["0", "1"]
    assert data["ranks"][0]["tensor"] == HOSTILE
    assert report.count("<script") == 2 and "<img" not in report
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", report)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, LivePage]]:
    monkeypatch.setattr(http_server, "MOST_A_SECOND", 10_000)
    site, page = Site(), page_of_a_job()
    site.server.close()
    site.server = HttpServer(site.loop, socket.create_server(("127.0.0.1", 0)), page.find)
    yield site, page
    site.server.close()
    site.loop.close()


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def test_requests_by_a_socket(site: tuple[Site, LivePage]) -> None:
    server, page = site
    path = f"/{page.token}/"
    answer = server.answer(get(path) + get(path))  # The second is not read.
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.count(b"HTTP/1.1 ") == 1
    head = answer.partition(b"\r\n\r\n")[0]
    for line in (
        b"Cache-Control: no-store",
        b"X-Content-Type-Options: nosniff",
        b"Referrer-Policy: no-referrer",
        b"Content-Security-Policy: default-src 'none'",
    ):
        assert line in head
    assert server.answer(get(path + "?a=b")).startswith(b"HTTP/1.1 200 ")
    assert server.answer(get(path + "x" * 300)).startswith(b"HTTP/1.1 400 ")
    for method in ("POST", "PUT", "HEAD", "OPTIONS", "get"):
        assert server.answer(get(path, method)).startswith(b"HTTP/1.1 400 "), method
    assert server.answer(get(path)[:-2]) == b"", "its headers have no end"


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_bytes_of_any_kind(site: tuple[Site, LivePage], data: st.DataObject) -> None:
    server, page = site
    words = ["/", page.token, page.token[:9], "data", "/data/", "0", "9" * 300, "..", "%2f", "?"]
    path = "".join(data.draw(st.lists(st.sampled_from(words), max_size=6)))
    known = b"Host: localhost", b"Host: [", b"host:::1", b":", b"Origin: \xff"
    lines = st.sampled_from(known)
    head = data.draw(st.lists(lines | st.binary(max_size=30), max_size=5))
    sent = b"\r\n".join([f"GET {path} HTTP/1.1".encode(), *head, b"", b""])
    answer = server.answer(sent + data.draw(st.binary(max_size=40)))
    assert re.match(rb"HTTP/1.1 (200|400|403|404) ", answer), answer[:80]
    assert (b"train.py" in answer) <= (page.token in path and b"Host: localhost" in sent)


def test_what_fails_inside_is_said_and_ends_nothing(site: tuple[Site, LivePage]) -> None:
    server, page = site
    page._now = {"at": float("nan")}
    assert server.answer(get(f"/{page.token}/data/")).startswith(b"HTTP/1.1 500 ")
    loop, said = EventLoop(), list[str]()
    view = LiveView(LiveOptions(page=("127.0.0.1", 0)), loop, said.append, Console())
    assert re.match(r"page at http://127\.0\.0\.1:\d+/[\w-]{32}/$", said[0])
    assert view._page is not None
    view._keep(view._page, {"ranks": [{}]})
    assert said[1].startswith("--live-page: the page stays as it is: ")
    view.end("")
    view.close()
    loop.close()


def test_an_open_page_hears_of_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(live_view, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(http_server, "MOST_A_SECOND", 10_000)
    loop, said, heard = EventLoop(), list[str](), list[str | None]()
    file = tmp_path / "gone" / "report.html"
    view = LiveView(LiveOptions(page=("::1", 0), report=str(file)), loop, said.append, Console())
    url = said[0].removeprefix("page at ") + "data/"

    def look() -> None:
        while not heard or heard[-1] is None:
            # As a page does, it asks again where a connection is lost.
            with suppress(OSError), urllib.request.urlopen(url, timeout=20) as answer:
                heard.append(json.load(answer)["ended"])
            if any(text.startswith("closed") for text in said):
                return

    thread = threading.Thread(target=look)
    thread.start()
    while not heard:
        loop.run_once(0.1)
    view.end("rank 1 failed\nhvdlite-run: hint: so it is")
    said.append("closed")
    view.close()
    thread.join(20)
    assert heard[0] is None and heard[-1] == "rank 1 failed"
    assert said[1] == f"--live-report: {file}: No such file or directory"
    loop.close()


def options(*flags: str) -> LiveOptions:
    return live_options(parse_args([*flags, "python", "a/train.py", "--key=secret", "b.py"]))


def test_flags(tmp_path: Path) -> None:
    for place in ("70000", "a b:1", ":1", "x", "-1", "[::1]", "9" * 5000):
        with pytest.raises(ConfigError, match=r"must be a port \(0: any that is free\), ADDRESS:P"):
            options(f"--live-page={place}")
    with pytest.raises(ConfigError, match=r"--live-report /nowhere/a\.html: must be a file in"):
        options("--live-report", "/nowhere/a.html")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, why in (("pipe", "a device or a pipe"), ("to pipe", "a device or a pipe"),
                      ("", "a folder"), ("loop", "in a folder that can be written")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^--live-report .*{name}: must be .*{why}"):
            options("--live-report", str(tmp_path / name))
    (tmp_path / "link").symlink_to("target")  # What it names is written, and it stays a link.
    assert options("--live-report", str(tmp_path / "link")).report == str(tmp_path / "target")
    found = options("--live-page", "[::]:80", "--live-report", str(tmp_path / "a"))
    assert (found.page, found.report) == (("::", 80), str(tmp_path / "a"))
    assert found.title == "train.py" and found.counts
    loop = EventLoop()
    with pytest.raises(ConfigError, match=r"--live-page 0: cannot listen at 203\.0\.113\.1"):
        LiveView(LiveOptions(page=("203.0.113.1", 0)), loop, print, Console())
    loop.close()
