"""Checkpoints of PyTorch's DCP that are damaged, not written, or replaced while they are read.

Much in them is pickles.
"""

from __future__ import annotations

import pkgutil
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
import hvdlite.torch.checkpoint as forms
from hvdlite.checkpoint.manifest import Folder
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "content",
    [
        b"", b"garbage", b"cno_such_module\nX\n.", b"cos\nno_such_name\n.", b"K\x01)R.",
        b"coperator\ngetitem\n(}K\x01tR.", b"coperator\ngetitem\n()K\x01tR.",
    ],
    ids=["empty", "garbage", "module", "name", "type", "key", "index"],
)  # fmt: skip
def test_a_damaged_description_is_said_to_be_one(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/\.metadata is damaged: "):
        hvd.checkpoint.load(tmp_path, {"w": 1})


@pytest.fixture
def by_dcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have states saved as those with DTensors are."""
    monkeypatch.setattr(forms, "_has_dtensors", lambda tree: True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damage", ["cut", "spoiled", "empty"])
@pytest.mark.parametrize("kind", ["tensor", "value"])
def test_the_damaged_file_is_named(by_dcp: None, tmp_path: Path, kind: str, damage: str) -> None:
    state: Any = {"w": torch.ones(3000)} if kind == "tensor" else {"w": ["a" * 3000]}
    hvd.checkpoint.save(tmp_path / "it", state)
    (path,) = (tmp_path / "it").glob("*.distcp")
    content = path.read_bytes()
    path.write_bytes({"cut": content[:100], "spoiled": b"x" * len(content), "empty": b""}[damage])
    with pytest.raises(ValueError, match=rf"{path} is damaged: \w+"):
        hvd.checkpoint.load(tmp_path / "it", state)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        hvd.checkpoint.load(tmp_path / "it", state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_that_cannot_be_written(by_dcp: None, tmp_path: Path) -> None:
    """The checkpoint that was there stays."""
    hvd.checkpoint.save(tmp_path / "it", {"w": torch.ones(9000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(
            OSError, match=r"could not be written \(is the disk full.*: \S"
        ) as caught:
            hvd.checkpoint.save(tmp_path / "it", {"w": torch.zeros(9000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "damaged" not in str(caught.value)
    assert str(caught.value).endswith("File too large")
    state = {"w": torch.zeros(9000)}
    hvd.checkpoint.load(tmp_path / "it", state)
    assert state["w"].sum() == 9000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("call", "where", "expected"),
    [
        ("load", "hvdlite.checkpoint.loading.plan_of", 2),
        ("load", "torch.distributed.checkpoint.filesystem.FileSystemReader.read_data", 1),
        ("consolidate", "torch.distributed.checkpoint.filesystem.FileSystemReader.read_data", 2),
    ],
    ids=["before the files are open", "before they are read", "consolidate"],
)
def test_saved_by_another_job_meanwhile(
    by_dcp: None,
    tmp_path: Path,
    call: str,
    where: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is read is one checkpoint, whose files have the tensors at other places."""
    folder = tmp_path / "it"
    hvd.checkpoint.save(folder, {"w": torch.ones(3)})
    original = pkgutil.resolve_name(where)
    saved = []

    def late(*given: Any) -> Any:
        if not saved:
            saved.append(1)
            hvd.checkpoint.save(folder, {"a": torch.zeros(5000), "w": torch.full((3,), 2.0)})
        return original(*given)

    monkeypatch.setattr(where, late)
    if call == "consolidate":
        hvd.checkpoint.consolidate(folder, tmp_path / "whole")
        monkeypatch.setattr(where, original)
        folder = tmp_path / "whole"
    state = {"w": torch.zeros(3)}
    hvd.checkpoint.load(folder, state)
    assert saved
    assert state["w"].tolist() == [expected] * 3


def test_a_save_begins_while_the_kind_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was just renamed has no layout.json, and is not one of DCP therefore."""
    folder = Folder(tmp_path / "it")
    hvd.checkpoint.save(folder.path, {"w": torch.ones(3)})
    existing = Folder.existing

    def early(self: Folder) -> Path:
        path = existing(self)
        if path == folder.path:
            path.rename(folder.old)
        return path

    monkeypatch.setattr(Folder, "existing", early)
    state = {"w": torch.zeros(3)}
    hvd.checkpoint.load(folder.path, state)
    assert state["w"].tolist() == [1] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_with_different_folders(by_dcp: None, tmp_path: Path) -> None:
    for name in "01":
        hvd.checkpoint.save(tmp_path / name, {"w": torch.ones(3)})

    def main(rank: int) -> None:
        state, here = {"w": torch.zeros(3)}, tmp_path / str(rank)
        with pytest.raises(hvd.HorovodInternalError, match=rf"has that of {tmp_path}/0, rank 1 "):
            hvd.checkpoint.load(here, state)
        assert not torch.any(state["w"])
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1, .* does not find the folder"):
            hvd.checkpoint.save(here, state)

    run_ranks(2, main)
