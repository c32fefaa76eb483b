"""Each version on disk: before anybody hears of it, whatever has completed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.server.server import Server
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.clocks import SYNC, Mode
from hvdlite.ps.tables.description import describe_table
from tests.ps.test_tables import SPECS, Momentum, blocks, payloads, values_of


class Witness:
    """A listener that sends nothing, and notes what is on disk meanwhile."""

    memory = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: list[tuple[Message, int]] = []  # And the newest version on disk.

    def send(self, _peer: bytes, message: Message) -> None:
        found = self.folder.rglob("*.safetensors")
        self.sent.append((message, max((int(path.stem[-12:]) for path in found), default=-1)))


def started(folder: Path) -> tuple[Server, Witness]:
    """Return a server with a table of two workers, of which one has pushed, and pulls."""
    witness = Witness(folder)
    server = Server(
        cast("Listener", witness), lambda _: Momentum(), incarnation=1, workers=[0, 1],
        snapshots=SnapshotFolder(folder, 0), snapshot_every=1,
    )  # fmt: skip
    table = describe_table(SPECS, blocks(), Mode(SYNC), average=True)
    first = payloads(values_of(-1, 0))

    def tell(worker: int, kind: str, **words: Any) -> None:
        message = Message(kind, 1, "t", incarnation=1)._replace(**words)
        for peer, answer in server.answer(b"%d" % worker, message):
            witness.send(peer, answer)

    for worker in (0, 1):
        tell(worker, "start", body={"worker": worker, "table": table})
    tell(0, "offer", payloads=first)
    tell(0, "push", payloads=payloads(values_of(0, 0)))
    tell(0, "pull", clock=1)
    return server, witness


def goes(server: Server, witness: Witness) -> None:
    for peer, answer in server.answer(b"1", Message("leave", 9)):
        witness.send(peer, answer)


def is_lost(server: Server, _witness: Witness) -> None:
    server.set_workers([0])


@pytest.mark.parametrize("end", [goes, is_lost])
def test_a_step_that_the_end_of_a_worker_completes_is_on_disk_first(
    tmp_path: Path, end: Callable[[Server, Witness], None]
) -> None:
    server, witness = started(tmp_path)
    if end is is_lost:
        server._early.clear()
    end(server, witness)
    assert [(m.clock, saved) for m, saved in witness.sent if m.kind == "values"] == [(1, 1)]


def test_what_a_killed_server_has_not_finished_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "server-0" / "t"
    folder.mkdir(parents=True)
    (folder / "000001-000000000007.unfinished").write_bytes(b"half")
    assert SnapshotFolder(tmp_path, 0).newest() == []
    assert list(folder.iterdir()) == []
