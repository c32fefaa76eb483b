"""What a checkpoint refuses, and damage that it finds: errors name it, and no rank waits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from tests.checkpoint.parts import FULL, Layout, cut, load, save, sorted_files
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 7)


def spoil_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(content)


def other_tensor(file: Path) -> None:
    """Swaps the names of dtypes: the same size, other content."""
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))


@pytest.mark.parametrize("damage", [flip, truncate, spoil_header, other_tensor])
def test_damaged_files_are_named_and_no_rank_waits(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    save(tmp_path / "it", FULL, Layout([2], [0, -1]))
    damage(sorted_files(tmp_path / "it")[1])
    errors = {}

    def main(rank: int) -> None:
        state = {"w": np.zeros((12, 24), np.float32)}
        try:
            hvd.checkpoint.load(tmp_path / "it", state, {"w": Layout([2], [0, -1])})
        except Exception as error:
            errors[rank] = error
        assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2, "the job goes on"

    run_ranks(2, main)
    assert isinstance(errors[1], ValueError)
    assert "slices-00001-of-00002.safetensors is damaged, which has a part of 'w'" in str(errors[1])
    assert isinstance(errors[0], HorovodInternalError)
    assert "rank 1 failed: ValueError" in str(errors[0])
    assert errors[0].rank == 1


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"format": "other", "version": 1}', '{"format": "hvdlite"'],
    ids=str,
)
def test_a_damaged_layout_json(tmp_path: Path, content: str) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL})
    (tmp_path / "it" / "layout.json").write_text(content)
    with pytest.raises(ValueError, match=r"layout\.json is damaged"):
        hvd.checkpoint.load(tmp_path / "it", {"w": FULL.copy()})


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("device_matrix", [2], "'w' was cut for 2 ranks, and there are 1 files"),
        ("device_matrix", [10**9], "'w' was cut for 1000000000 ranks"),
        ("shape", [-24, 24], r"'w' has the shape \(-24, 24\)"),
        ("shape", [24.0, 24], r"'w' has the shape \(24\.0, 24\)"),
        ("shape", ["24", 24], r"'w' has the shape \('24', 24\)"),
        ("dtype", "float99", "'w' has the dtype 'float99'"),
    ],
)
def test_what_a_layout_json_cannot_say(tmp_path: Path, entry: str, value: Any, words: str) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL})
    path = tmp_path / "it" / "layout.json"
    content = json.loads(path.read_text())
    content["tensors"]["w"][entry] = value
    path.write_text(json.dumps(content))
    for read in (
        lambda: hvd.checkpoint.load(tmp_path / "it", {"w": FULL.copy()}),
        lambda: hvd.checkpoint.consolidate(tmp_path / "it", tmp_path / "other"),
    ):
        with pytest.raises(ValueError, match=rf"layout\.json is damaged: .*{words}"):
            read()


def test_a_layout_json_without_its_files(tmp_path: Path) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL})
    path = tmp_path / "it" / "layout.json"
    content = json.loads(path.read_text())
    for files, words in (([], "for 1 ranks, and there are 0 files"), ("a", "its files are 'a'")):
        path.write_text(json.dumps({**content, "files": files}))
        with pytest.raises(ValueError, match=rf"layout\.json is damaged: .*{words}"):
            hvd.checkpoint.load(tmp_path / "it", {"w": FULL.copy()})


def test_a_checkpoint_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL})
    path = tmp_path / "it" / "layout.json"
    path.write_text(json.dumps({"format": "hvdlite", "version": 2, "parts": {}}))
    with pytest.raises(ValueError, match=r"has version 2 .* reads version 1: load the checkpoint"):
        hvd.checkpoint.load(tmp_path / "it", {"w": FULL.copy()})


def test_what_a_load_refuses(tmp_path: Path) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"weight": FULL, "step": 1})

    def refused(state: Any, layouts: Any = None, **options: Any) -> Any:
        return hvd.checkpoint.load(tmp_path / "it", state, layouts, **options)

    with pytest.raises(KeyError, match="no 'wieght': did you mean weight"):
        refused({"wieght": FULL.copy()})
    with pytest.raises(ValueError, match=r"'weight' has the shape \(3,\) here, and \(24, 24\)"):
        refused({"weight": np.zeros(3, np.float32)}, {"weight": Layout([1], [-1, -1])})
    with pytest.raises(ValueError, match=r"'weight' is float64 here, and float32.*cast=True"):
        refused({"weight": FULL.astype(float)})
    with pytest.raises(ValueError, match="'step' is a tensor here, and a value"):
        refused({"step": np.ones(1)})
    with pytest.raises(ValueError, match="'weight' is a value here, and a tensor"):
        refused({"weight": 1})
    with pytest.raises(ValueError, match="is for 2 ranks, and the job has 1"):
        refused({"weight": FULL[:12].copy()}, {"weight": Layout([2], [0, -1])})
    with pytest.raises(ValueError, match="no tensor of the state: did you mean weight"):
        refused({"weight": FULL.copy()}, {"weigth": Layout([1], [-1, -1])})
    with pytest.raises(TypeError, match="is a Layout or a list"):
        refused({"weight": FULL.copy()}, {"weight": "rows"})
    with pytest.raises(TypeError, match="a state is a dict"):
        refused([FULL.copy()])
    with pytest.raises(FileNotFoundError, match="elsewhere does not exist"):
        hvd.checkpoint.load(tmp_path / "elsewhere", {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no layout\.json"):
        hvd.checkpoint.load(tmp_path / "empty", {})
    state = {"weight": np.zeros((24, 24)), "extra": 5}
    with pytest.warns(UserWarning, match="has no 'extra'.*kept"):
        refused(state, strict=False, cast=True)
    assert state["extra"] == 5
    assert np.array_equal(state["weight"], FULL)
    hvd.checkpoint.save(tmp_path / "it", {"weight": FULL + 1j})
    with pytest.raises(ValueError, match=r"is float32 here, and complex64.*the part of it"):
        refused({"weight": FULL.copy()}, cast=True)


def test_an_empty_dict_that_the_checkpoint_has_entries_for(tmp_path: Path) -> None:
    """A fresh optimizer's state_dict() has no state: loading nothing of it would be silent."""
    hvd.checkpoint.save(tmp_path / "it", {"optimizer": {"state": {0: FULL}, "param_groups": []}})
    for strict in (True, False):
        with pytest.raises(
            ValueError,
            match=r"'optimizer.state' of the state is empty.* 1 entries.*optimizer itself",
        ):
            fresh = {"optimizer": {"state": {}, "param_groups": []}}
            hvd.checkpoint.load(tmp_path / "it", fresh, strict=strict)


@pytest.mark.parametrize("name", ["history", "state"])
def test_an_empty_dict_that_is_of_no_optimizer(tmp_path: Path, name: str) -> None:
    saved = {"epoch": 1, name: {f"epoch{number}": 0.5 for number in range(4)}}
    hvd.checkpoint.save(tmp_path / "it", saved)
    state: dict[str, Any] = {"epoch": 0, name: {}}
    with pytest.raises(ValueError) as caught:
        hvd.checkpoint.load(tmp_path / "it", state)
    for part in (f"'{name}' of the state is empty", "4 entries for it, ", f"'{name}.epoch0'",
                 "the names that it has", "strict=False"):  # fmt: skip
        assert part in str(caught.value)
    assert "optimizer" not in str(caught.value)
    with pytest.warns(UserWarning, match=rf"'{name}' of the state is empty.*kept empty"):
        hvd.checkpoint.load(tmp_path / "it", state, strict=False)
    assert state == {"epoch": 1, name: {}}


def test_what_a_save_refuses(tmp_path: Path) -> None:
    def refused(state: Any, layouts: Any = None) -> None:
        hvd.checkpoint.save(tmp_path / "it", state, layouts)

    with pytest.raises(TypeError, match=r"'a\.b' is a set, which is neither"):
        refused({"a": {"b": {1, 2}}})
    with pytest.raises(TypeError, match=r"'a' has a dict with the key 1"):
        refused({"a": [{1: 2}]})
    with pytest.raises(ValueError, match=r"two entries of the state have the name 'a\.b'"):
        refused({"a": {"b": 1}, "a.b": 2})
    state: dict[str, Any] = {"a": {"b": [1]}}
    state["a"]["b"].append(state["a"])
    with pytest.raises(ValueError, match=r"'a\.b\.1' is a dict or list that contains itself"):
        refused(state)
    for value in (
        np.ones(2, ml_dtypes.float8_e4m3fn),
        np.array(["a"]),
        np.ones(2, np.longdouble),
        np.array([None]),
    ):
        with pytest.raises(ValueError, match=rf"'a\.b' is {value.dtype.name}, which checkpoints"):
            refused({"a": {"b": value}})
    with pytest.raises(TypeError, match="directory of a checkpoint is a path, not int"):
        hvd.checkpoint.save(3, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tensor 'a': .* is for 1 dimensions"):
        refused({"a": FULL}, {"a": Layout([1], [-1])})
    assert not (tmp_path / "it").exists()
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="exists and is no checkpoint"):
        refused({"a": FULL})
    assert (tmp_path / "it" / "thesis.tex").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it"]


def test_a_name_that_the_format_lacks_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "it", FULL, Layout([2], [0, -1]))

    def main(rank: int) -> None:
        with pytest.raises((ValueError, HorovodInternalError), match="'__metadata__' is no name"):
            hvd.checkpoint.save(tmp_path / "it", {"w": FULL, "__metadata__": FULL})

    run_ranks(2, main)
    assert np.array_equal(load(tmp_path / "it", FULL, Layout([1], [-1, -1]))[0], FULL)
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL, "__metadata__": 3})


@pytest.mark.parametrize("own", ["notes.txt", "mine.safetensors", "best/layout.json"])
def test_what_is_beside_a_checkpoint_is_not_removed(tmp_path: Path, own: str) -> None:
    folder = tmp_path / "it"
    hvd.checkpoint.save(folder, {"a": FULL})
    hvd.checkpoint.consolidate(folder, folder)
    hvd.checkpoint.save(folder, {"a": FULL})
    (folder / own).parent.mkdir(exist_ok=True)
    (folder / own).write_text("precious")
    for write in (
        lambda: hvd.checkpoint.save(folder, {"a": FULL + 1}),
        lambda: hvd.checkpoint.consolidate(folder, folder),
    ):
        with pytest.raises(ValueError, match=rf"has '{Path(own).parts[0]}' in it"):
            write()
    assert (folder / own).read_text() == "precious"
    state = {"a": np.zeros_like(FULL)}
    hvd.checkpoint.load(folder, state)
    assert np.array_equal(state["a"], FULL)


@pytest.mark.parametrize("call", ["save", "load"])
def test_ranks_that_disagree(tmp_path: Path, call: str) -> None:
    save(tmp_path / "it", FULL, Layout([2], [0, -1]))

    def main(rank: int) -> None:
        layout = Layout([2], [[0, -1], [-1, 0]][rank])
        state = {"w": cut(FULL, layout, rank)}
        with pytest.raises(HorovodInternalError, match=r"'w': rank 0 has .*0, -1.*, rank 1 has .*"):
            getattr(hvd.checkpoint, call)(tmp_path / "it", state, {"w": layout})

    run_ranks(2, main)
    assert np.array_equal(load(tmp_path / "it", FULL, Layout([1], [-1, -1]))[0], FULL)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_state_that_another_rank_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    def main(rank: int) -> None:
        state = {"w": FULL, "note": object() if rank else None}
        with pytest.raises((TypeError, HorovodInternalError), match="'note' is a"):
            hvd.checkpoint.save(tmp_path / "it", state)

    run_ranks(2, main)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_save_to_different_folders_or_make_different_calls(tmp_path: Path) -> None:
    """Neither waits for ever: one file is not where rank 0 looks, or the calls differ.

    The new folder of rank 1 is one that a killed save has left.
    """
    hvd.checkpoint.save(tmp_path / "it", {"w": FULL})

    def folders(rank: int) -> None:
        (tmp_path / f".{rank}.new").mkdir(exist_ok=True)
        expected = FileNotFoundError if rank == 0 else HorovodInternalError
        with pytest.raises(expected, match=r"rank 0 does not see slices-00001.*all hosts share"):
            hvd.checkpoint.save(tmp_path / str(rank), {"w": FULL})

    def calls(rank: int) -> None:
        call = (hvd.checkpoint.save, hvd.checkpoint.load)[rank]
        with pytest.raises(HorovodInternalError, match=r"rank 0 a save of .*, rank 1 a load of"):
            call(tmp_path / "it", {"w": FULL.copy()})

    run_ranks(2, folders)
    run_ranks(2, calls)
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        ([], ValueError, "is empty"),
        ("a.safetensors", TypeError, "a list of str, not str"),
        (["a", 3], TypeError, "has 3"),
        (["a"], FileNotFoundError, "layout.json does not exist"),
    ],
)
def test_files_that_are_refused(files: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hvd.checkpoint.load_distributed_checkpoint({}, files)


def test_another_number_of_files_than_ranks(tmp_path: Path) -> None:
    save(tmp_path / "it", FULL, Layout([4], [0, -1]))
    files = [str(path) for path in sorted_files(tmp_path / "it")]
    with pytest.raises(ValueError, match=r"3 files are given, .*4 ranks"):
        hvd.checkpoint.load_distributed_checkpoint({"w": FULL.copy()}, files[:3])


def test_strategies_are_for_pytorch() -> None:
    with pytest.raises(ValueError, match="for models of PyTorch"):
        hvd.checkpoint.infer_layout({"w": FULL}, strategies={"w": ((2, 1),)})


def test_the_library_is_asked_for_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'hvdlite\[checkpoint\]'"):
        hvd.checkpoint.save(tmp_path / "it", {"w": FULL})
