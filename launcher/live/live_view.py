"""The live view of one job, as the launcher's loop drives it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.http_server import Content, HttpServer, Request
from hvdlite.launcher.command_line.live_options import LiveOptions
from hvdlite.launcher.inspection.asking import Asking
from hvdlite.launcher.inspection.requests import Requests
from hvdlite.launcher.live.job_view import OTHER, JobView
from hvdlite.launcher.live.keyboard import Keyboard
from hvdlite.launcher.live.prometheus import CONTENT_TYPE, PrometheusPage
from hvdlite.launcher.live.snapshot import Snapshot, snapshot
from hvdlite.launcher.live.table import check_rich, lines_of
from hvdlite.launcher.live.viewer import Viewer
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop

if TYPE_CHECKING:
    from hvdlite.launcher.inspection.service import LocalService
    from hvdlite.launcher.live.page import LivePage

STREAM = "stderr"  # Where the table is shown: standard output may go to a file.
LOOK_SECONDS = 1.0
METRICS_PATHS = ("/", "/metrics")
EVERY_ADDRESS = ("0.0.0.0", "::")
# A page asks each second. If one has asked of late, it is answered for so long after the end.
LINGER_SECONDS = 1.5


class WayDown(Protocol):
    """How the ranks of a job are reached; see `Job`, which makes this view."""

    def order(self, number: int, line: str) -> str:
        """Give an order to a process, if it listens; return why that cannot be, or ""."""

    def let_count(self) -> None:
        """Let all ranks count from now on, also those that are not started yet."""


class LiveView:
    """Gathers what the ranks of a job count, and shows it where `options` say so.

    `say` prints a line of hvdlite-run's own.
    """

    def __init__(
        self,
        options: LiveOptions,
        loop: EventLoop,
        say: Callable[[str], None],
        console: Console,
        way: WayDown | None = None,
    ) -> None:
        """Begin to serve. Raises `ConfigError` where that cannot be."""
        self.job = JobView()
        self._loop, self._say, self._console, self._way = loop, say, console, way
        self._names = self._counts = options.counts
        self.orders = Asking(loop, way.order if way is not None else lambda number, line: "")
        self._requests = Requests(self.job, self.orders, self.look, partial(self.note, OTHER))
        self._service: LocalService | None = None
        self._viewer: Viewer | None = None
        self._keyboard: Keyboard | None = None
        if options.show:
            check_rich()
        self._shown = options.show and console.is_terminal(STREAM)
        if options.show and not self._shown:
            say("--live: standard error is no terminal, so no table is shown; slow ranks are named")
        self._servers: list[HttpServer] = []
        self._page: LivePage | None = None
        self._page_listener: socket.socket | None = None
        self._asked: deque[int] = deque(maxlen=3)  # By the page, in the last looks.
        self._report = options.report
        if options.has_page:
            self._page = self._make_page(options)
        if options.metrics_port is not None:
            self._serve_metrics(options.metrics_address, options.metrics_port)
        if options.counts:
            loop.call_after(LOOK_SECONDS, self._look)

    def _serve_metrics(self, address: str, port: int) -> None:
        page = PrometheusPage(self.job, self._loop.now)
        listener = _listen(address, port, f"--metrics-port {port}", ", or --metrics-address")

        def find(request: Request) -> Content | None:
            return Content(CONTENT_TYPE, page.text()) if request.path in METRICS_PATHS else None

        self._servers.append(HttpServer(self._loop, listener, find))
        self._say(f"metrics at {_url(address, listener)}/metrics")

    def _make_page(self, options: LiveOptions) -> LivePage:
        from hvdlite.launcher.live.page import LivePage

        page = LivePage(options.title, options.page[0] if options.page is not None else "")
        if options.page is not None:
            address, port = options.page
            listener = _listen(address, port, f"--live-page {port}")
            self._servers.append(HttpServer(self._loop, listener, page.find))
            self._page_listener = listener
            if address in EVERY_ADDRESS:
                address = socket.gethostname()
            self._say(f"page at {_url(address, listener)}/{page.token}/")
        return page

    def serve(self, about: Mapping[str, Any]) -> None:
        """Let `hvdlite-top` ask from now on, and the terminal by keys; the job is begun."""
        from hvdlite.launcher.inspection.service import LocalService  # It takes 15 ms.

        self._requests.about = dict(about)
        self._service = LocalService(self._loop, self._requests.make, self._say)
        if self._shown:
            viewer = Viewer(self._requests.make, self._draw_again)
            keyboard = Keyboard(self._loop, viewer.press, left=self._erase)
            if keyboard.start():
                self._viewer, self._keyboard = viewer, keyboard

    def look(self) -> Snapshot:
        """Return the job as it is now; the ranks count from the first call on."""
        if not self._counts and self._way is not None:
            self._counts = True
            self._way.let_count()
            self._loop.call_after(LOOK_SECONDS, self._look)
        return snapshot(self.job, self._loop.now(), time.time())

    def _look(self) -> None:
        self._loop.call_after(LOOK_SECONDS, self._look)
        straggler = self.job.look(self._loop.now())
        if straggler is not None and self._names:  # Else it is told to who looks.
            self._say(straggler.text)
        if self._keyboard is not None:
            self._keyboard.look()
        if not self._shown and self._page is None:
            return
        now = snapshot(self.job, self._loop.now(), time.time())
        if self._page is not None:
            self._asked.append(self._page.asked)
            self._keep(self._page, now)
        if self._shown:
            self._draw(now)

    def _keep(self, page: LivePage, now: Snapshot) -> None:
        try:
            page.look(now)
        except Exception as error:  # No reason to end a training.
            self._page = None
            self._say(f"--live-page: the page stays as it is: {error}")

    def _erase(self) -> None:
        self._console.show(STREAM, ())

    def _draw_again(self) -> None:
        if self._shown:
            self._draw(self.look())

    def _draw(self, job: Snapshot) -> None:
        viewer, panel = self._viewer, list[str]()
        if viewer is not None:
            viewer.job, panel = job, [*viewer.panel, viewer.help]
        try:
            size = self._console.size(STREAM)
            chosen = None if viewer is None else viewer.chosen
            lines = lines_of(job, *size, chosen=chosen, panel=panel)
        except Exception as error:  # Such as a terminal that is gone: no reason to end a training.
            self._shown, lines = False, []
            self._say(f"--live: the table ends: {error}")
        self._console.show(STREAM, lines)

    # -- what is told of ranks

    def receive(self, host: str, lines: Mapping[int, str]) -> None:
        """Take the lines of the processes of a host, by the launcher's numbers of them."""
        now = self._loop.now()
        for number, line in lines.items():
            self.job.take(host, number, line, now)

    def note(self, kind: str, text: str) -> None:
        """Take an event."""
        self.job.note(kind, text, self._loop.now())

    def end(self, sentence: str) -> None:
        """Take note that the job has ended; `sentence` is empty where all is well.

        Writes the report, and lets pages that are open know.
        """
        page = self._page
        if page is None:
            return
        self._keep(page, snapshot(self.job, self._loop.now(), time.time()))
        page.end(sentence.partition("\n")[0])
        if self._report is not None:
            self._write(page, self._report)
        if self._page_listener is not None and page.asked > min(self._asked, default=0):
            loop = EventLoop()  # The handlers of the job are for a job that runs.
            server = HttpServer(loop, self._page_listener.dup(), page.find)
            self.close()  # Who has just asked asks again.
            until = loop.now() + LINGER_SECONDS
            while (left := until - loop.now()) > 0:
                loop.run_once(left)
            server.close()
            loop.close()

    def _write(self, page: LivePage, file: str) -> None:
        part = Path(f"{file}.part")
        try:
            part.write_text(page.report(), "utf-8")
            part.replace(file)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._say(f"--live-report: {file}: {getattr(error, 'strerror', None) or error}")

    def close(self) -> None:
        """Serve no longer; idempotent."""
        self._shown = False
        self._erase()
        if self._keyboard is not None:
            self._keyboard.close()
        if self._service is not None:
            self._service.close()
        for server in self._servers:
            server.close()


def _listen(address: str, port: int, flag: str, remedy: str = ", or address") -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{flag}: cannot listen at {address}: {why}; choose another port (0: any that is "
            f"free){remedy}"
        ) from None


def _url(address: str, listener: socket.socket) -> str:
    return f"http://{Address(address, listener.getsockname()[1])}"
