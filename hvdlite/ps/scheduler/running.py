"""How a scheduler runs: as a process, or as a thread of the one that starts the cluster."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address, parse_address
from hvdlite.ps.cluster.settings import ClusterSettings, check_token
from hvdlite.ps.connections import system
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import SCHEDULER
from hvdlite.ps.scheduler.scheduler import Scheduler

LOOPBACK = "127.0.0.1"
STATE_FILE = "scheduler.json"
FAILURE_SECONDS = 5.0  # For which a scheduler tells all members why the cluster cannot go on.


def run_scheduler(settings: ClusterSettings) -> None:
    """Be the scheduler until all workers have left and the servers have gone.

    What it has to know again after an end lies beside the snapshots, where there are any.
    """
    check_token(settings)
    address = parse_address(settings.scheduler, "HVDLITE_SCHEDULER")
    if settings.token:  # Others may know this host by any of its addresses.
        address = Address(port=address.port)
    listener = _listen(address, settings)
    state_file = Path(settings.snapshots) / STATE_FILE if settings.snapshots else None
    scheduler = Scheduler(listener, settings, state_file)
    failed_since: float | None = None

    def ended() -> bool:
        nonlocal failed_since
        membership = scheduler.membership
        if membership.failure and failed_since is None:
            failed_since = system.now()
        if failed_since is not None and system.now() - failed_since > FAILURE_SECONDS:
            return True
        return membership.is_over

    try:
        scheduler.serve(ended)
        scheduler.file.forget()
    finally:
        listener.close()
    if failed_since is not None:
        raise HorovodInternalError(scheduler.membership.failure)


def _listen(address: Address, settings: ClusterSettings) -> Listener:
    return Listener(address, SCHEDULER, settings.token, encrypted=settings.tls, carries=False)


class HostedScheduler:
    """A scheduler that listens at the host of `settings.scheduler`, at any port that is free."""

    def __init__(self, settings: ClusterSettings) -> None:
        host = settings.scheduler.rpartition(":")[0]
        self._listener = _listen(Address(host if host == LOOPBACK else ""), settings)
        port = self._listener.address.rpartition(":")[2]
        self.settings = replace(settings, scheduler=f"{host}:{port}")
        self._scheduler = Scheduler(self._listener, settings)
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
