"""Checkpoints of numpy arrays: every layout to every other, and what goes wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.checkpoint import manifest
from hvdlite.checkpoint.files import Reader
from hvdlite.checkpoint.folder import Folder
from hvdlite.common.base.errors import HorovodInternalError
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

Layout = hvd.checkpoint.Layout
FULL = np.arange(24 * 24, dtype=np.float32).reshape(24, 24)


def cut(tensor: Any, layout: Any, rank: int) -> Any:
    """The part of a tensor that a rank holds, as numpy's own split gives it."""
    axes = list(np.ndindex(*layout.device_matrix))[rank]
    for dimension, axis in enumerate(layout.tensor_map):
        if axis != -1:
            count = layout.device_matrix[-1 - axis]
            tensor = np.array_split(tensor, count, axis=dimension)[axes[-1 - axis]]
    return np.array(tensor, order="C")


def save(folder: Path, tensor: Any, layout: Any, **values: Any) -> None:
    """Save a tensor on as many ranks as the layout has."""

    def main(rank: int) -> None:
        state = {"w": cut(tensor, layout, rank), **values}
        hvd.checkpoint.save(folder, state, {"w": layout})

    run_ranks(layout.ranks, main)


def load(folder: Path, like: Any, layout: Any, **options: Any) -> list[Any]:
    """Load it on as many ranks as the layout has; the parts that these got."""

    def main(rank: int) -> Any:
        state = {"w": np.zeros_like(cut(like, layout, rank))}
        hvd.checkpoint.load(folder, state, {"w": layout}, **options)
        return state["w"]

    return run_ranks(layout.ranks, main)


LAYOUTS = [
    Layout([1], [-1, -1]),
    Layout([2], [0, -1]),
    Layout([3], [-1, 0]),
    Layout([2, 2], [1, 0]),
    Layout([2, 2], [0, -1]),
    Layout([2, 4], [1, 0]),
]


@pytest.mark.parametrize("held", LAYOUTS, ids=str)
def test_every_layout_becomes_every_other(tmp_path: Path, held: Any) -> None:
    save(tmp_path / "it", FULL, held)
    for wanted in LAYOUTS:
        parts = load(tmp_path / "it", FULL, wanted)
        assert all(np.array_equal(p, cut(FULL, wanted, r)) for r, p in enumerate(parts))


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (Layout([4], [0, -1]), Layout([2], [0, -1])),
        (Layout([2, 2], [1, 0]), Layout([4], [0, -1])),
        (Layout([8], [0, -1]), Layout([3], [0, -1])),
        (Layout([2, 4], [1, -1]), Layout([2, 2], [1, 0])),
    ],
    ids=str,
)
def test_a_rank_reads_only_the_files_it_needs(tmp_path: Path, held: Any, wanted: Any) -> None:
    """All other files are taken away, and the one that is needed least is missed."""
    save(tmp_path / "it", FULL, held)
    files = sorted((tmp_path / "it").glob("*.safetensors"))
    for rank in range(wanted.ranks):
        needed = hvd.checkpoint.ranks_needed(tmp_path / "it", {"w": wanted}, rank)
        assert needed == hvd.checkpoint.ranks_needed({"w": held}, {"w": wanted}, rank)
        folder = tmp_path / f"for {rank}"
        shutil.copytree(tmp_path / "it", folder)
        for source in set(range(held.ranks)) - set(needed):
            (folder / files[source].name).unlink()
        part = cut(FULL, wanted, rank)
        assert np.array_equal(read_alone(folder, wanted, rank), part)
        (folder / files[needed[-1]].name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{files[needed[-1]].name} is not there"):
            read_alone(folder, wanted, rank)


def read_alone(folder: Path, wanted: Any, rank: int) -> Any:
    with Reader(manifest.read(folder / "layout.json")) as reader:
        return reader.read("w", wanted.box(FULL.shape, rank))


DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def test_every_dtype_in_every_number_of_dimensions(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)

    def values(dtype: str, shape: tuple[int, ...]) -> Any:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return np.asarray(rng.integers(0, 200, shape)).astype(kind)

    shapes = [(), (4,), (4, 6), (4, 0, 2), (2, 4, 2, 3)]
    full = {f"{d}{s}": values(d, s) for d, s in itertools.product(DTYPES, shapes)}
    layouts = {
        name: Layout([2, 2], [1, 0][: value.ndim] + [-1] * (value.ndim - 2))
        for name, value in full.items()
    }

    def write(rank: int) -> None:
        state = {name: cut(value, layouts[name], rank) for name, value in full.items()}
        hvd.checkpoint.save(tmp_path / "it", state, layouts)

    def read(rank: int) -> None:
        for verify in (False, True):
            state = {name: np.zeros_like(value) for name, value in full.items()}
            hvd.checkpoint.load(tmp_path / "it", state, verify=verify)
            for name, value in full.items():
                assert state[name].dtype == value.dtype
                assert np.array_equal(state[name], value), name
        rows = Layout([2, 1], [1, -1])
        state = {"complex128(4, 6)": np.zeros((2, 6), complex)}
        hvd.checkpoint.load(tmp_path / "it", state, {"complex128(4, 6)": rows})
        assert np.array_equal(state["complex128(4, 6)"], cut(full["complex128(4, 6)"], rows, rank))

    run_ranks(4, write)
    run_ranks(2, read)


def test_nested_states_values_and_scalars(tmp_path: Path) -> None:
    """Without init: a process alone is the one rank of a job."""
    state = {
        "model": {"a": np.ones(3), "blocks": [np.zeros(2), {"b": np.full(2, 7)}]},
        "step": 5,
        "rate": 0.1,
        "name": "é",
        "nothing": None,
        "infinite": float("inf"),
        "groups": [{"betas": (0.9, 0.99), "params": [0, 1]}],
        "scalar": np.float32(2.5),
        "pair": (np.ones(1), 3),
        7: np.ones(2, np.int8),
    }
    hvd.checkpoint.save(tmp_path / "it", state)
    fresh: dict[Any, Any] = {
        "model": {"a": np.zeros(3), "blocks": [np.ones(2), {"b": np.zeros(2, int)}]},
        "step": 0,
        "rate": 0.0,
        "name": "",
        "nothing": 1,
        "infinite": 0.0,
        "groups": [{"betas": (0.0, 0.0), "params": []}],
        "scalar": np.float32(0),
        "pair": (np.zeros(1), 0),
        7: np.zeros(2, np.int8),
    }
    kept = fresh["model"]["a"], fresh["pair"][0]
    assert hvd.checkpoint.load(tmp_path / "it", fresh) is fresh
    assert repr(fresh) == repr(state)
    assert fresh["model"]["a"] is kept[0], "it was loaded in place"
    assert fresh["pair"][0] is kept[1]
    described = json.loads((tmp_path / "it" / "layout.json").read_text())
    assert {"device_matrix", "tensor_map", "shape", "dtype", "slices"} == set(
        described["tensors"]["model.blocks.1.b"]
    )


def test_parts_of_a_checkpoint_and_other_libraries(tmp_path: Path) -> None:
    """A state may name less than there is; the file of `consolidate` is plain safetensors."""
    import safetensors.numpy

    save(tmp_path / "it", FULL, Layout([2, 2], [0, 1]), step=3)
    state = {"step": 0}
    hvd.checkpoint.load(tmp_path / "it", state)
    assert state == {"step": 3}
    hvd.checkpoint.consolidate(tmp_path / "it", tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    assert np.array_equal(safetensors.numpy.load_file(file)["w"], FULL)
    assert np.array_equal(load(tmp_path / "one", FULL, Layout([3], [0, -1]))[2], FULL[16:])


def test_a_part_is_written_once(tmp_path: Path) -> None:
    save(tmp_path / "it", FULL, Layout([2, 4], [1, -1]))
    sizes = [path.stat().st_size > FULL.nbytes // 2 for path in sorted_files(tmp_path / "it")]
    assert sizes == [True, False, False, False, True, False, False, False]


def sorted_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_piece_is_read_without_the_rest_of_its_file(tmp_path: Path) -> None:
    """What lies elsewhere in the file may be damaged, unless all of it is to be verified."""
    save(tmp_path / "it", FULL, Layout([1], [-1, -1]))
    (file,) = sorted_files(tmp_path / "it")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # in the last row
    file.write_bytes(content)
    rows = Layout([2], [0, -1])
    assert np.array_equal(read_alone(tmp_path / "it", rows, 0), FULL[:12])
    with pytest.raises(ValueError, match=r"slices-00000-of-00001.* is damaged.*'w'.*its bytes"):
        load(tmp_path / "it", FULL, Layout([1], [-1, -1]))
    with pytest.raises(ValueError, match="is damaged"):
        load(tmp_path / "it", FULL, rows, verify=True)


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


def test_an_empty_dict_that_the_checkpoint_has_entries_for(tmp_path: Path) -> None:
    """A fresh optimizer's state_dict() has no state: loading nothing of it would be silent."""
    hvd.checkpoint.save(tmp_path / "it", {"optimizer": {"state": {0: FULL}}})
    with pytest.raises(ValueError, match=r"'optimizer.state' of the state is empty.* 1 entries"):
        hvd.checkpoint.load(tmp_path / "it", {"optimizer": {"state": {}}})


def test_what_a_save_refuses(tmp_path: Path) -> None:
    def refused(state: Any, layouts: Any = None) -> None:
        hvd.checkpoint.save(tmp_path / "it", state, layouts)

    with pytest.raises(TypeError, match=r"'a\.b' is a set, which is neither"):
        refused({"a": {"b": {1, 2}}})
    with pytest.raises(TypeError, match=r"'a' has a dict with the key 1"):
        refused({"a": [{1: 2}]})
    with pytest.raises(ValueError, match=r"two entries of the state have the name 'a\.b'"):
        refused({"a": {"b": 1}, "a.b": 2})
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
    """Neither waits for ever: one file is not where rank 0 looks, or the calls differ."""
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


def test_the_names_of_mindspore(tmp_path: Path) -> None:
    save(tmp_path / "it", FULL, Layout([4], [0, -1]))
    files = [str(path) for path in sorted_files(tmp_path / "it")]
    network = {"w": np.zeros_like(FULL)}
    assert hvd.checkpoint.load_distributed_checkpoint(network, files) is network
    assert np.array_equal(network["w"], FULL)
    elsewhere = tmp_path / "strategy.json"
    shutil.move(tmp_path / "it" / "layout.json", elsewhere)

    def main(rank: int) -> None:
        part = {"w": np.zeros((24, 12), np.float32)}
        strategy = {"w": [[2], [-1, 0], [24, 12], 0, True, ""]}
        hvd.checkpoint.load_distributed_checkpoint(part, files, strategy, str(elsewhere))
        assert np.array_equal(part["w"], FULL[:, rank * 12 : rank * 12 + 12])
        layouts = hvd.checkpoint.infer_predict_layout(network, FULL)
        assert layouts == {"w": [[2], [-1, -1], [24, 24], 0, True, ""]}

    run_ranks(2, main)


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
