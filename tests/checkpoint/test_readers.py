"""A load gets one checkpoint, whole, while another job saves to the same folder."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.checkpoint import manifest, opened
from hvdlite.checkpoint.files import Reader
from hvdlite.checkpoint.manifest import Folder
from tests.checkpoint.parts import Layout
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

ROWS, WHOLE = Layout([2], [0, -1]), Layout([2], [-1, -1])


class OtherJob:
    """A job of one rank, which saves 1, 2, and so on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.save()

    def save(self) -> None:
        """Save the next number, in a thread that is of no rank."""
        self.count += 1
        state = {"a": np.full((4, 2), self.count), "b": np.full((4, 2), self.count)}
        body = threading.Thread(
            target=hvd.checkpoint.save, args=(self.folder, {**state, "step": self.count})
        )
        body.start()
        body.join()


def load(folder: Path, layout: Layout) -> set[int]:
    """Load on two ranks; all numbers that these got."""

    def main(rank: int) -> set[int]:
        rows = 2 if layout is ROWS else 4
        state = {"a": np.zeros((rows, 2), int), "b": np.zeros((rows, 2), int), "step": 0}
        hvd.checkpoint.load(folder, state, {"a": layout, "b": layout})
        return {state["step"], *state["a"].flat, *state["b"].flat}  # type: ignore[attr-defined]

    return set.union(*run_ranks(2, main))


def before_files(patch: pytest.MonkeyPatch, save: Callable[[], None], times: int) -> None:
    """Save between rank 0's look at layout.json and its look at a file, that often."""
    find = Reader._file
    saved: list[int] = []

    def late(self: Reader, source: int, name: str) -> Any:
        if hvd.rank() == 0 and len(saved) < times:
            saved.append(1)
            save()
        return find(self, source, name)

    patch.setattr(Reader, "_file", late)


@pytest.mark.parametrize("layout", [ROWS, WHOLE], ids=["pieces", "whole"])
def test_saved_between_layout_json_and_the_files(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces have no digests that would tell, and those of whole tensors tell of no damage."""
    before_files(monkeypatch, OtherJob(tmp_path / "it").save, 1)
    assert load(tmp_path / "it", layout) == {2}


def test_saved_while_the_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are open, and stay what they were."""
    save, read = OtherJob(tmp_path / "it").save, Reader.read

    def late(self: Reader, name: str, wanted: Any) -> Any:
        if hvd.rank() == 0:
            save()
        return read(self, name, wanted)

    monkeypatch.setattr(Reader, "read", late)
    assert load(tmp_path / "it", ROWS) == {1}


def test_saved_between_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them finds one checkpoint that is whole."""
    other, look, looked = OtherJob(tmp_path / "it"), opened._look, threading.Event()

    def late(*given: Any) -> Any:
        if hvd.rank() == 1 and other.count == 1:
            assert looked.wait(30)
            other.save()
        result = look(*given)
        looked.set()
        return result

    monkeypatch.setattr(opened, "_look", late)
    assert load(tmp_path / "it", ROWS) == {2}


def test_saved_all_the_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are told, and have what they had."""
    monkeypatch.setattr(opened, "ATTEMPTS", 3)
    before_files(monkeypatch, OtherJob(tmp_path / "it").save, 1000)

    def main(rank: int) -> None:
        state = {"a": np.zeros((4, 2), int), "step": 0}
        words = rf"load of {tmp_path}/it: the folder was replaced while it was loaded, 3 times"
        with pytest.raises(OSError, match=words):
            hvd.checkpoint.load(tmp_path / "it", state)
        assert state["step"] == 0
        assert not np.any(state["a"])

    run_ranks(2, main)


def test_consolidated_while_another_job_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_files(monkeypatch, OtherJob(tmp_path / "it").save, 1)
    run_ranks(1, lambda rank: hvd.checkpoint.consolidate(tmp_path / "it", tmp_path / "one"))
    assert load(tmp_path / "one", WHOLE) == {2}


def test_a_look_while_names_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two names has no checkpoint at the time when it is looked at."""
    folder, other = Folder(tmp_path / "it"), OtherJob(tmp_path / "it")
    folder.path.rename(tmp_path / "1")
    other.save()
    folder.path.rename(folder.new)
    (tmp_path / "1").rename(folder.old)
    look = manifest.is_checkpoint

    def slow(path: Path) -> bool:
        found = look(path)
        if folder.new.exists():  # The other job does the rest of its save.
            folder.new.rename(folder.path)
            shutil.rmtree(folder.old)
        return found

    monkeypatch.setattr(manifest, "is_checkpoint", slow)
    state = {"step": 0}
    hvd.checkpoint.load(folder.path, state)
    assert state == {"step": 2}


def test_a_folder_that_gets_its_other_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the middle of a save: the folder is the same, and the files are elsewhere."""
    folder, read = Folder(OtherJob(tmp_path / "it").folder), manifest.read

    def late(path: Path) -> Any:
        if folder.path.exists():
            folder.path.rename(folder.old)
        return read(path)

    monkeypatch.setattr(manifest, "read", late)
    state = {"step": 0}
    hvd.checkpoint.load(folder.path, state)
    assert state == {"step": 1}
