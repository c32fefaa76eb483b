"""Checkpoints of PyTorch's DCP that are damaged, of which much is pickles, or not written."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
import hvdlite.torch.checkpoint as forms


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
