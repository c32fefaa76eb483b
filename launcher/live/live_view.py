"""The live view of one job, as the launcher's loop drives it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.http_server import Content, HttpServer
from hvdlite.launcher.command_line.live_options import LiveOptions
from hvdlite.launcher.live.job_view import JobView
from hvdlite.launcher.live.prometheus import CONTENT_TYPE, PrometheusPage
from hvdlite.launcher.live.snapshot import snapshot
from hvdlite.launcher.live.table import check_rich, lines_of
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop

STREAM = "stderr"  # Where the table is shown: standard output may go to a file.
LOOK_SECONDS = 1.0
METRICS_PATHS = ("/", "/metrics")


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
    ) -> None:
        """Begin to serve. Raises `ConfigError` where that cannot be."""
        self.job = JobView()
        self._loop, self._say, self._console = loop, say, console
        self._shown = options.show and self._can_show()
        self._servers: list[HttpServer] = []
        if options.metrics_port is not None:
            self._serve_metrics(options.metrics_address, options.metrics_port)
        if options.counts:
            loop.call_after(LOOK_SECONDS, self._look)

    def _can_show(self) -> bool:
        check_rich()
        if self._console.is_terminal(STREAM):
            return True
        self._say(
            "--live: standard error is no terminal, so no table is shown; slow ranks are named"
        )
        return False

    def _serve_metrics(self, address: str, port: int) -> None:
        page = PrometheusPage(self.job, self._loop.now)
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--metrics-port {port}: cannot listen at {address}: {why}; choose another port "
                "(0: any that is free), or --metrics-address"
            ) from None

        def find(path: str) -> Content | None:
            return Content(CONTENT_TYPE, page.text()) if path in METRICS_PATHS else None

        server = HttpServer(self._loop, listener, find)
        self._servers.append(server)
        host = f"[{address}]" if ":" in address else address
        self._say(f"metrics at http://{host}:{server.port}/metrics")

    def _look(self) -> None:
        self._loop.call_after(LOOK_SECONDS, self._look)
        straggler = self.job.look(self._loop.now())
        if straggler is not None:
            self._say(straggler.text)
        if self._shown:
            self._draw()

    def _draw(self) -> None:
        try:
            size = self._console.size(STREAM)
            lines = lines_of(snapshot(self.job, self._loop.now(), time.time()), *size)
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

    def close(self) -> None:
        """Serve no longer; idempotent."""
        self._shown = False
        self._console.show(STREAM, ())
        for server in self._servers:
            server.close()
