"""A save replaces the last checkpoint as a whole, or leaves it as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.checkpoint.manifest import Folder
from hvdlite.common.base.errors import HorovodInternalError
from tests.checkpoint.parts import FULL, Layout, cut, load, save
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")


class KilledError(BaseException):
    """What a killed process does no more: nothing after it runs."""


@pytest.mark.parametrize("step", range(6))
def test_a_save_that_is_killed_leaves_the_old_or_the_new_one(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies before the n-th change of names: one of the two is complete, and the next save works."""
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL})
    count = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > step:
                raise KilledError
            return original(*args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(Path, "mkdir", dying(Path.mkdir))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        with pytest.raises(KilledError):
            hvd.checkpoint.save(tmp_path / "it", {"w": FULL + 1})
    state = {"w": np.zeros_like(FULL)}
    hvd.checkpoint.load(tmp_path / "it", state)
    assert np.array_equal(state["w"], FULL if step < 5 else FULL + 1)
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL + 2})
    hvd.checkpoint.load(tmp_path / "it", state)
    assert np.array_equal(state["w"], FULL + 2)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_second_save_that_fails_after_a_killed_one_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL})
    (tmp_path / "it").rename(tmp_path / ".it.old")  # killed between its two renames
    monkeypatch.setattr(Folder, "commit", lambda self: self.missing)
    with pytest.raises(AttributeError):
        hvd.checkpoint.save(tmp_path / "it", {"w": FULL + 1})
    state = {"w": np.zeros_like(FULL)}
    hvd.checkpoint.load(tmp_path / "it", state)
    assert np.array_equal(state["w"], FULL)


def test_a_rank_that_cannot_write_fails_the_save_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "it", FULL, Layout([2], [0, -1]))
    original = Folder.commit

    def commit(self: Folder) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Folder, "commit", commit)

    def main(rank: int) -> None:
        state = {"w": cut(FULL + 1, Layout([2], [0, -1]), rank)}
        expected = OSError if rank == 0 else HorovodInternalError
        with pytest.raises(expected, match="no space left"):
            hvd.checkpoint.save(tmp_path / "it", state, {"w": Layout([2], [0, -1])})

    run_ranks(2, main)
    monkeypatch.setattr(Folder, "commit", original)
    assert np.array_equal(load(tmp_path / "it", FULL, Layout([1], [-1, -1]))[0], FULL)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
