"""Checkpoints of numpy arrays: every layout to every other, and what is written and read."""

from __future__ import annotations

import enum
import itertools
import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.checkpoint import manifest
from hvdlite.checkpoint.files import Reader
from tests.checkpoint.parts import FULL, LAYOUTS, Layout, cut, load, save, sorted_files
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")


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


class Counted:
    """A file of safetensors, or a tensor in it, that counts the bytes of the values it returns."""

    def __init__(self, file: Any, read: list[int]) -> None:
        self._file, self._read = file, read

    def get_slice(self, name: str) -> Counted:
        return Counted(self._file.get_slice(name), self._read)

    def get_shape(self) -> list[int]:
        shape: list[int] = self._file.get_shape()
        return shape

    def get_tensor(self, name: str) -> Any:
        return self._count(self._file.get_tensor(name))

    def __getitem__(self, place: Any) -> Any:
        return self._count(self._file[place])

    def _count(self, values: Any) -> Any:
        self._read.append(values.nbytes)
        return values


@pytest.mark.parametrize("held", LAYOUTS, ids=str)
def test_every_layout_becomes_every_other_and_no_rank_reads_more_than_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Any
) -> None:
    save(tmp_path / "it", FULL, held, step=3)
    read: dict[str, list[int]] = {}
    find = Reader._file

    def counted(self: Reader, source: int, name: str) -> Counted:
        of_rank = read.setdefault(threading.current_thread().name, [])
        return Counted(find(self, source, name), of_rank)

    monkeypatch.setattr(Reader, "_file", counted)
    of_four = [([4], [0, -1]), ([4], [-1, 0]), ([2, 2], [-1, 1]), ([4], [-1, -1])]
    for wanted in [*LAYOUTS, *(Layout(*each) for each in of_four)]:
        read.clear()
        parts = load(tmp_path / "it", FULL, wanted)
        assert all(np.array_equal(p, cut(FULL, wanted, r)) for r, p in enumerate(parts))
        counts = {name: sum(each) for name, each in read.items()}
        assert counts == {f"rank-{rank}": part.nbytes for rank, part in enumerate(parts)}


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


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_arrays_in_the_byte_order_of_another_machine(tmp_path: Path, dtype: str) -> None:
    values = np.arange(6).astype(dtype).reshape(2, 3)
    hvd.checkpoint.save(tmp_path / "it", {"w": values})
    for fresh in (np.zeros_like(values), np.zeros((2, 3), values.dtype.newbyteorder("="))):
        hvd.checkpoint.load(tmp_path / "it", {"w": fresh}, verify=True)
        assert fresh.tolist() == values.tolist()


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


class Point(NamedTuple):
    x: int
    y: tuple[int, ...]


def test_tuples_on_every_level(tmp_path: Path) -> None:
    """JSON has lists: what the state has decides. The generator goes on as it would have."""
    generator = random.Random(1)
    state = {"random": generator.getstate(), "point": Point(1, (2, 3)), "pairs": [(1, 2), [3]]}
    hvd.checkpoint.save(tmp_path / "it", state)
    drawn = generator.random()
    blank = {"random": generator.getstate(), "point": Point(0, (0, 0)), "pairs": [(0, 0), [0]]}
    assert hvd.checkpoint.load(tmp_path / "it", blank) == state
    assert type(blank["point"]) is Point
    generator.setstate(blank["random"])  # type: ignore[arg-type]
    assert generator.random() == drawn


class Mode(str, enum.Enum):
    FAST = "fast"
    EXACT = "exact"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def test_enums_come_back_as_such(tmp_path: Path) -> None:
    state = {"mode": Mode.FAST, "levels": (Level.LOW, [Level.HIGH]), "none": None}
    hvd.checkpoint.save(tmp_path / "it", state)
    blank = {"mode": Mode.EXACT, "levels": (Level.HIGH, [Level.LOW]), "none": Mode.FAST}
    hvd.checkpoint.load(tmp_path / "it", blank)
    assert repr(blank) == repr(state)


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
