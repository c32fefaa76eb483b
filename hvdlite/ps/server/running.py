"""How a server runs, from its first words to the scheduler to the end of the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address
from hvdlite.ps.cluster.enrolment import Enrolment
from hvdlite.ps.cluster.settings import (
    ANSWER_SECONDS,
    ClusterSettings,
    address_towards,
    check_token,
)
from hvdlite.ps.connections import system
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.client import Client, name_of
from hvdlite.ps.connections.messages import SERVER
from hvdlite.ps.connections.records import OFF, Records
from hvdlite.ps.server.checkpoints import ServerCheckpoints
from hvdlite.ps.server.migration import Migration
from hvdlite.ps.server.server import Server
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.updater import Updater

# How long a cluster without workers goes on, so that last answers are not lost.
LAST_SECONDS = 1.0
NAME_SECONDS = 0.5  # Until the name of the scheduler is looked up again.


def run_server(
    settings: ClusterSettings, new_updater: Callable[[TableDescription], Updater],
    killed: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Be a server until all workers have left; end without a word when it is `killed`.

    Raises `HorovodInternalError` where a snapshot cannot be read or written, and where the cluster
    cannot go on.
    """
    check_token(settings)
    listener = Listener(
        Address(_own_address(settings).strip("[]")),
        SERVER,
        settings.token,
        encrypted=settings.tls,
    )
    listener.open_memory()
    identity = name_of(SERVER, settings.node_id)
    client = Client(identity, settings.token, encrypted=settings.tls)
    news: dict[str, Any] = {}
    client.on_failure = lambda error: news.update(client_failure=str(error))
    enrolment = Enrolment(
        client, settings, number=settings.number, address=listener.address, changed=news.update
    )
    folder: SnapshotFolder | None = None
    records = OFF
    try:
        welcome = enrolment.enter(settings.start_seconds + ANSWER_SECONDS)
        if settings.snapshots:
            folder = SnapshotFolder(settings.snapshots, welcome["number"])
            folder.belong_to(welcome["job"])
        records = Records.by_settings(os.environ, SERVER, welcome["number"])
        server = Server(
            listener, new_updater, incarnation=welcome["incarnation"],
            workers=welcome["workers"], snapshots=folder, snapshot_every=settings.snapshot_every,
            records=records, layout=welcome["layout"],
            reached=welcome["reached"], loaded=welcome["loaded"],
        )  # fmt: skip
        migration = Migration(server, welcome["number"], client, enrolment)
        checkpoints = ServerCheckpoints(
            server, welcome["number"], lambda: client.call(enrolment.tell)
        )
        ended = _end_of(server, migration, checkpoints, welcome["number"], news)
        server.serve(lambda: killed() or ended())
        if not killed():
            enrolment.leave()
    except HorovodInternalError as error:
        enrolment.leave(why=str(error))
        raise
    finally:
        if folder is not None:
            folder.close()
        records.close()
        client.close()
        listener.close()


def _own_address(settings: ClusterSettings) -> str:
    """Return the address of this host on the way to the scheduler, whose name may come late.

    Raises `HorovodInternalError` where it does not come within the time for the start.
    """
    end = system.now() + settings.start_seconds
    while True:
        try:
            return address_towards(settings.scheduler)
        except OSError as error:
            if system.now() >= end:
                where = f"{settings.scheduler} (HVDLITE_SCHEDULER)"
                why = f"the scheduler's host has no address: {where}: {error}"
                raise HorovodInternalError(why) from error
        system.sleep(NAME_SECONDS)


def _end_of(
    server: Server, migration: Migration, checkpoints: ServerCheckpoints, number: int,
    latest: Mapping[str, Any],
) -> Callable[[], bool]:  # fmt: skip
    """Return what lets a server hear of others that come and go, and says whether it has ended."""
    is_used = False  # Whether it keeps something, or has.
    empty_since: float | None = None

    def ended() -> bool:
        nonlocal is_used, empty_since
        news = dict(latest)  # Others may come at any time: a layout without its change.
        if failure := news.get("client_failure") or news.get("failure"):
            raise HorovodInternalError(failure)
        workers = news.get("workers", server.workers)
        # First: what is loaded has no push that a worker which is lost has held up.
        checkpoints.look(news)
        server.set_workers(workers)
        migration.look(news)
        keeps = number < news.get("layout_servers", 0)
        is_used |= keeps
        # One that was to go may be among the servers of the change that is under way.
        change = news.get("change")
        comes = change is not None and number < change["servers"]
        if workers and (keeps or comes or not is_used):
            empty_since = None
        elif empty_since is None:
            empty_since = system.now()
        return empty_since is not None and system.now() - empty_since > LAST_SECONDS

    return ended
