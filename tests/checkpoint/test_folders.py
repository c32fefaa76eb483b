"""Ranks that give different folders are told, whatever hosts call a folder that they share."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from tests.checkpoint.parts import FULL
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")


def test_ranks_that_load_different_checkpoints(tmp_path: Path) -> None:
    """They have the same names and shapes."""
    for name in ("a", "b"):
        hvd.checkpoint.save(tmp_path / name, {"w": FULL + ord(name)})

    def main(rank: int) -> None:
        state = {"w": FULL.copy()}
        words = rf"rank 0 has that of {tmp_path}/a, rank 2 that of {tmp_path}/b\. Let rank 0"
        with pytest.raises(HorovodInternalError, match=words) as caught:
            hvd.checkpoint.load(tmp_path / "aab"[rank], state)
        assert caught.value.rank == 2
        assert np.array_equal(state["w"], FULL)
        assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 3, "the job goes on"

    run_ranks(3, main)


def test_ranks_with_copies_of_one_checkpoint(tmp_path: Path) -> None:
    hvd.checkpoint.save(tmp_path / "0", {"w": FULL})
    shutil.copytree(tmp_path / "0", tmp_path / "1")

    def main(rank: int) -> None:
        state = {"w": np.zeros_like(FULL)}
        hvd.checkpoint.load(tmp_path / str(rank), state)
        assert np.array_equal(state["w"], FULL)

    run_ranks(2, main)


def test_ranks_that_save_to_different_folders(tmp_path: Path) -> None:
    hvd.checkpoint.save(tmp_path / "0", {"w": FULL})

    def main(rank: int) -> None:
        words = (
            rf"rank 1, which saves to {tmp_path}/1, does not find the folder that rank 0 has made "
            rf"for {tmp_path}/0: .* all hosts share; threads must save in the same order"
        )
        with pytest.raises(HorovodInternalError, match=words) as caught:
            hvd.checkpoint.save(tmp_path / str(rank), {"w": FULL + 1})
        assert caught.value.rank == 1
        assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2, "the job goes on"

    run_ranks(2, main)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    state = {"w": np.zeros_like(FULL)}
    hvd.checkpoint.load(tmp_path / "0", state)
    assert np.array_equal(state["w"], FULL)
