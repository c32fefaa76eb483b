"""A folder of snapshots is for one job, and keeps two of each table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.layouts.blocks import Array, Block
from hvdlite.ps.layouts.layout import Part
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.clocks import SYNC, Mode
from hvdlite.ps.tables.description import TableDescription, describe_table
from hvdlite.ps.tables.saved import SavedTable, join
from hvdlite.ps.tables.table import Saved
from tests.ps.cluster import NewCluster, train_in_one, trainers, with_one
from tests.ps.cluster import bits as bits_of


def test_snapshots_of_another_job_do_not_become_first_weights(new_cluster: NewCluster) -> None:
    cluster, trainer = with_one(new_cluster, 1, 3, every=1)
    trainer.worker.leave()
    cluster.servers[0].wait()
    cluster.scheduler.end()
    cluster.state.file.forget()
    cluster.start_scheduler()
    server = cluster.start_server(0)
    with pytest.raises(HorovodInternalError, match=r"server-0 has snapshots of another job"):
        trainers(cluster, 1)
    server.wait()
    assert "remove the folder" in str(server.error)


def test_a_job_goes_on_from_its_own_snapshots_when_all_of_it_was_killed(
    new_cluster: NewCluster,
) -> None:
    cluster, trainer = with_one(new_cluster, 1, 3, every=1)
    trainer.worker.close()
    cluster.servers[0].end()
    cluster.scheduler.end()
    cluster.start_scheduler()
    cluster.servers[0] = cluster.start_server(0)
    (again,) = trainers(cluster, 1)
    assert again.table.clock == 3
    again.train(6)
    assert bits_of(again.values) == train_in_one(6, lambda _step: [0])


@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_a_server_joins_hundreds_of_blocks() -> None:
    """It answers nobody meanwhile, so the work may not grow with a power of their number."""
    blocks = [Block("float32", 0, (Part(key, 0, 2, 0),)) for key in range(800)]
    sources = []
    for half in (blocks[:400], blocks[400:]):
        values = [np.full(2, block.parts[0].key, np.float32) for block in half]
        state: dict[str, Array] = {}
        for number, value in enumerate(values):
            state |= {f"{number}.m": -value, f"{number}.v": 2 * value, f"{number}.t": np.array(7)}
        about = describe_table([], half, Mode(SYNC), average=True)
        saved = Saved(values, state, 7, {0: 7}, [])
        sources.append(SavedTable(TableDescription("table", about), saved))
    about = describe_table([], blocks, Mode(SYNC), average=True)
    joined, state = join(TableDescription("table", about), sources)
    assert [array.tolist() for array in joined] == [[key, key] for key in range(800)]
    assert len(state) == 3 * 800
    assert all(state[f"{key}.m"].tolist() == [-key, -key] for key in range(800))
    assert all(state[f"{key}.t"] == 7 for key in range(800))


def test_the_newest_two_of_a_table_are_kept(tmp_path: Path) -> None:
    """One that is damaged has another before it; the file that is written is none of them."""
    folder = SnapshotFolder(tmp_path, 0)
    for version in range(5):
        for table in ("a/b", "second"):
            values = [np.full(3, float(version))]
            block = Block("float64", 0, (Part(0, 0, 3, 0),))
            about = describe_table([], [block], Mode(SYNC), average=True)
            saved = Saved(values, {"0.momentum": -values[0]}, version, {0: version}, [])
            whole = SavedTable(TableDescription(table, about), saved)
            (folder.write if table == "a/b" else folder.write_soon)(whole)
    folder.close()
    found = sorted(path.relative_to(tmp_path / "server-0") for path in tmp_path.rglob("*.*"))
    assert [(path.parts[0], int(path.stem.split("-")[1])) for path in found] == [
        ("a%2Fb", 3), ("a%2Fb", 4), ("second", 3), ("second", 4),
    ]  # fmt: skip
    for snapshot in SnapshotFolder(tmp_path, 0).newest():
        saved = snapshot.saved
        assert (saved.version, saved.finished) == (4, {0: 4})
        np.testing.assert_array_equal(saved.values, [[4.0] * 3])
        np.testing.assert_array_equal(saved.state["0.momentum"], [-4.0] * 3)
    damaged = next(tmp_path.rglob("*-000000000004.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 1
    damaged.write_bytes(data)
    why = r"000004\.safetensors of server 0 cannot be read"
    with pytest.raises(HorovodInternalError, match=why):
        SnapshotFolder(tmp_path, 0).newest()


def test_what_a_killed_server_has_not_finished_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "server-0" / "t"
    folder.mkdir(parents=True)
    (folder / "000001-000000000007.unfinished").write_bytes(b"half")
    assert SnapshotFolder(tmp_path, 0).newest() == []
    assert list(folder.iterdir()) == []
