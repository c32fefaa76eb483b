"""The processes that are no workers: the scheduler, and servers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdlite.ps.channel import Listener, new_context
from hvdlite.ps.client import Client
from hvdlite.ps.enrolment import Enrolment
from hvdlite.ps.membership import ClusterPlan
from hvdlite.ps.scheduler import Scheduler
from hvdlite.ps.server import Server, TableDescription
from hvdlite.ps.settings import ClusterSettings, address_towards
from hvdlite.ps.snapshots import SnapshotFolder
from hvdlite.ps.tables import Updater

# How long a cluster without workers goes on, so that last answers are not lost.
LAST_SECONDS = 1.0


def run_scheduler(
    settings: ClusterSettings, plan: ClusterPlan, state_file: Path | None = None
) -> None:
    """Be the scheduler until all workers have left and the servers have gone."""
    context = new_context()
    port = settings.scheduler.rpartition(":")[2]
    listener = Listener(context, f"tcp://*:{port}")
    scheduler = Scheduler(listener, plan, settings.token, state_file)

    def ended() -> bool:
        members = scheduler.membership.members
        return scheduler.membership.formed and not members

    try:
        scheduler.serve(ended)
        scheduler.forget()
    finally:
        listener.close()
        context.term()


def run_server(
    settings: ClusterSettings, new_updater: Callable[[TableDescription], Updater], *,
    number: int | None = None, snapshots: str | None = None, snapshot_every: int = 0,
    start_seconds: float = 1800.0,
) -> None:  # fmt: skip
    """Be a server until all workers have left."""
    context = new_context()
    listener = Listener(context, f"tcp://{address_towards(settings.scheduler)}:*")
    client = Client(f"server {settings.node_id} {os.getpid()}".encode())
    news: dict[str, Any] = {}

    def hear(body: Mapping[str, Any]) -> None:
        news.update(body)

    enrolment = Enrolment(client, settings, number=number, address=listener.address, changed=hear)
    try:
        welcome = enrolment.enter(start_seconds)
        own = welcome["number"]
        folder = SnapshotFolder(snapshots, own) if snapshots and snapshot_every else None
        server = Server(
            listener, new_updater, incarnation=welcome["incarnation"],
            workers=welcome["workers"], snapshots=folder, snapshot_every=snapshot_every,
        )  # fmt: skip
        empty_since: float | None = None

        def ended() -> bool:
            nonlocal empty_since
            workers = news.get("workers", welcome["workers"])
            server.set_workers(workers)
            if workers:
                empty_since = None
            elif empty_since is None:
                empty_since = time.monotonic()
            return empty_since is not None and time.monotonic() - empty_since > LAST_SECONDS

        server.serve(ended)
        if folder is not None:
            folder.close()
        enrolment.leave()
    finally:
        client.close()
        listener.close()
        context.term()
