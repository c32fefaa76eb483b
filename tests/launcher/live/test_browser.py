"""The page in a real browser."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdlite.common.base.metrics import Sample, pack
from hvdlite.common.connections.http_server import HttpServer
from hvdlite.launcher.live.job_view import STALL, JobView
from hvdlite.launcher.live.page import LivePage
from hvdlite.launcher.live.snapshot import snapshot
from hvdlite.launcher.live.stragglers import Straggler
from hvdlite.launcher.processes.event_loop import EventLoop
from tests.launcher.live.browser import Browser, browser, needs_browser

pytestmark = [pytest.mark.timeout(120), needs_browser]
HOSTILE = "</script><script>stolen=1</script><img src=x onerror=stolen=1>&lt;"
STATE = "document.getElementById('state').textContent"
ENTER, LEFT, HOME = "\ue007", "\ue012", "\ue011"


class Served:
    """A page of two ranks with hostile names, of which rank 1 is slow, at one port."""

    def __init__(self) -> None:
        self.page, self._job, self.second = LivePage("train.py"), JobView(), 0
        self._job.note(STALL, f"{HOSTILE} waits", 0.0)
        self.port = 0
        for _ in range(8):
            self.go_on()

    def go_on(self) -> None:
        """Let a second pass, in which ten steps are made."""
        self.second += 1
        for rank in range(2):
            steps, compute = 10 * self.second, (0.4, 0.8)[rank]
            values = {
                "steps_total": steps, "step_seconds_total": self.second,
                "compute_seconds_total": compute * self.second,
                "exchange_waited_seconds_total": (1 - compute) * self.second,
                "memory_bytes": 5 << 20, "progress_steps": steps, "progress_total_steps": 700,
            }  # fmt: skip
            line = pack(Sample(rank, 2, values, HOSTILE))
            self._job.take(f"{HOSTILE}{rank}", rank, line, float(self.second))
        self._job.watch.current = Straggler((1,), "b", 0.04, 0.4, "data", f"rank 1 ({HOSTILE})")
        now = time.time() if self.second > 8 else time.time() - 8 + self.second
        self.page.look(snapshot(self._job, float(self.second), now))

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve the page at its address."""
        loop, ends = EventLoop(), threading.Event()
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        server = HttpServer(loop, listener, self.page.find)

        def run() -> None:
            while not ends.is_set():
                loop.run_once(1.0)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{self.port}/{self.page.token}/"
        finally:
            ends.set()
            loop.wake()
            thread.join(10)
            server.close()
            loop.close()


def test_the_page(tmp_path: Path) -> None:
    served = Served()
    with browser(tmp_path) as window:
        with served.serve() as url:
            window.open(url)
            window.wait("document.querySelectorAll('#ranks tbody tr').length == 4")
            look_at(window)
            use_keys(window)
            switch_colors(window)
            served.go_on()
            window.run("ask()")
            window.wait("document.getElementById('facts').textContent.includes('90 of 700')")
            assert window.complaints() == []
            refuse_others(window, url)
            window.open(url)
        window.wait("!document.getElementById('facts').textContent || job")
        window.run("heard -= 60000; ask()")
        window.wait(f"/^no answer for 6\\d s: the job has ended, or/.test({STATE})")
        with served.serve():
            window.wait(f"{STATE} == '● runs'")
            served.page.end("rank 1 failed")
            window.wait(f"{STATE}.endsWith(': rank 1 failed')")
        window.complaints()  # That nobody has answered.
        report = tmp_path / "report.html"
        report.write_text(served.page.report(), "utf-8")
        window.open(report.as_uri())
        look_at(window)
        use_keys(window)
        assert window.run(f"return {STATE}").endswith(": rank 1 failed")
        assert window.complaints() == []


def switch_colors(window: Browser) -> None:
    """What is written can be read by day and by night."""
    color = "return getComputedStyle(document.body)"
    for scheme, page in (("dark", "rgb(20, 24, 30)"), ("light", "rgb(255, 255, 255)")):
        window.prefer(scheme)
        text = window.run(f"{color}.color")
        light = sum(map(int, text[4:-1].split(","))) > 380
        assert window.run(f"{color}.backgroundColor") == page
        assert light == (scheme == "dark"), text


def look_at(window: Browser) -> None:
    """All is shown, names as they are, at both widths."""
    window.resize(1280, 900)
    text = window.run("return document.body.innerText")
    assert f"◀ rank 1 ({HOSTILE})" in text and f"{HOSTILE} waits" in text
    assert f"{HOSTILE}0 1 rank" in text
    assert window.run("return [window.stolen, document.images.length]") == [None, 0]
    assert window.run("return document.scripts.length") == 2
    rows = window.run("return [...document.querySelectorAll('tr.slow')].map(row => row.innerText)")
    assert len(rows) == 1 and "◀ slow" in rows[0] and "80 ms" in rows[0]
    widths = "return [...document.querySelectorAll('tr .compute')].map(bar => bar.style.width)"
    assert window.run(widths) == ["40%", "80%"]
    labels = window.run("return charts.map(each => each.drawing.getAttribute('aria-label'))")
    assert labels[0].startswith("Steps a second: steps a second 10. ")
    assert "compute 60 ms, data 0 ms, waited exchange 40 ms, hidden exchange 0 ms" in labels[1]
    assert "least to most of all ranks 20 % to 60 %, waited 40 %" in labels[2]
    for width in (1280, 400):
        window.resize(width, 900)
        assert window.run("return document.documentElement.scrollWidth") <= width
    assert window.run("return [...document.querySelectorAll('svg path')].every(each => "
                      "!/NaN|Infinity|undefined/.test(each.getAttribute('d')))")  # fmt: skip


def use_keys(window: Browser) -> None:
    """A rank is chosen, and a moment of a chart, without a pointer."""
    window.run("document.querySelectorAll('#ranks button')[1].focus()")
    window.press(ENTER)
    window.wait("document.querySelector('figure:nth-child(2)').innerText.includes(', rank 1')")
    window.wait("charts[1].drawing.getAttribute('aria-label').includes('compute 80 ms')")
    assert window.run("return document.getElementById('chosen').value") == "1"
    window.run("charts[0].drawing.focus()")
    window.press(HOME)
    assert window.run("return charts[0].index") == 0
    window.run("charts[0].drawing.blur()")
    assert window.run("return charts[0].index") is None


def refuse_others(window: Browser, url: str) -> None:
    """A page of another origin gets nothing, though it knows the address."""
    window.open("data:text/html,<iframe></iframe>")
    script = """
        const frame = document.querySelector("iframe");
        const loaded = new Promise(done => { frame.onload = done; });
        frame.src = arguments[0];
        await loaded;
        const answers = [];
        for (const mode of ["cors", "no-cors"])
            try { answers.push((await fetch(arguments[0] + "data/", {mode})).type); }
            catch (error) { answers.push(error.name); }
        return answers;"""
    assert window.run(f"return (async (...arguments) => {{{script}}})(arguments[0])", url) == [
        "TypeError", "TypeError"
    ]  # fmt: skip
    window.complaints()
