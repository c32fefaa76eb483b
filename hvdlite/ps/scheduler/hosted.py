"""The scheduler as a thread of the process that starts a cluster, such as hvdlite-run."""

from __future__ import annotations

import threading
from dataclasses import replace

from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.channel import Listener, new_context
from hvdlite.ps.scheduler.scheduler import Scheduler

LOOPBACK = "127.0.0.1"


class HostedScheduler:
    """A scheduler that listens at the host of `settings.scheduler`, at any port that is free."""

    def __init__(self, settings: ClusterSettings) -> None:
        host = settings.scheduler.rpartition(":")[0]
        self._context = new_context(settings.curve_token)
        where = host if host == LOOPBACK else "*"  # ZeroMQ listens at no name of a host.
        self._listener = Listener(self._context, f"tcp://{where}:*")
        port = self._listener.address.rpartition(":")[2]
        self.settings = replace(settings, scheduler=f"{host}:{port}")
        self._scheduler = Scheduler(self._listener, settings.plan, settings.token)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite scheduler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._scheduler.serve(self._closed.is_set)
        self._listener.close()
        self._context.term()

    @property
    def formed(self) -> bool:
        """All servers and workers have come at some time."""
        return self._scheduler.membership.formed

    def fail(self, why: str) -> None:
        """Tell all members why the cluster cannot go on; the first reason counts."""
        self._scheduler.membership.fail(why)

    def begin_close(self) -> None:
        """Let the thread end soon."""
        self._closed.set()

    def close(self) -> None:
        """Wait for the end of the thread, half a second at most."""
        self._closed.set()
        self._thread.join()
