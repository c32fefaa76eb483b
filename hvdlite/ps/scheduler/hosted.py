"""The scheduler as a thread of the process that starts a cluster, such as hvdlite-run."""

from __future__ import annotations

import threading
from dataclasses import replace

from hvdlite.common.connections.address import Address
from hvdlite.ps.cluster.settings import SCHEDULER, ClusterSettings
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.scheduler.scheduler import Scheduler

LOOPBACK = "127.0.0.1"


class HostedScheduler:
    """A scheduler that listens at the host of `settings.scheduler`, at any port that is free."""

    def __init__(self, settings: ClusterSettings) -> None:
        host = settings.scheduler.rpartition(":")[0]
        where = host if host == LOOPBACK else ""
        self._listener = Listener(
            Address(where), SCHEDULER, settings.token, encrypted=settings.curve, carries=False
        )
        port = self._listener.address.rpartition(":")[2]
        self.settings = replace(settings, scheduler=f"{host}:{port}")
        self._scheduler = Scheduler(self._listener, settings.plan)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite scheduler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._scheduler.serve(self._closed.is_set)
        self._listener.close()

    @property
    def formed(self) -> bool:
        """All servers and workers have come at some time."""
        return self._scheduler.membership.formed

    def fail(self, why: str) -> None:
        """Tell all members why the cluster cannot go on; the first reason counts."""
        self._scheduler.membership.fail(why)

    def close(self) -> None:
        """Wait for the end of the thread, half a second at most."""
        self._closed.set()
        self._thread.join()
