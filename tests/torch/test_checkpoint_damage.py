"""Damaged descriptions of checkpoints of PyTorch's DCP, which are pickles."""

from __future__ import annotations

from pathlib import Path

import pytest

import hvdlite.torch as hvd


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
