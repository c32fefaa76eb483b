"""A rank is killed while it saves: the others raise, and the old checkpoint can be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import hvdlite.numpy as hvd
from tests.forks import NUMPY
from tests.parallel.jobs import ranks, run_command
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

PROGRAM = """
import os, signal, sys
import numpy as np
import hvdlite.numpy as hvd
from hvdlite.checkpoint import files

hvd.init()
layouts = {"w": hvd.checkpoint.Layout([4], [0, -1])}
part = np.full((2, 3), hvd.rank(), np.float32)
hvd.checkpoint.save(sys.argv[1], {"w": part}, layouts)
if hvd.rank() == 2:
    files.write = lambda path, arrays: os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.checkpoint.save(sys.argv[1], {"w": part + 100}, layouts)
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()} heard of it", flush=True)
    raise
"""


def test_a_rank_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    command = ranks(4, sys.executable, "-c", PROGRAM, str(tmp_path / "it"), preload=NUMPY)
    result = run_command(command, timeout=60)
    assert result.returncode != 0
    assert "heard of it" in result.stdout
    state = {"w": np.zeros((8, 3), np.float32)}
    hvd.checkpoint.load(tmp_path / "it", state)
    assert state["w"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]

    def three(rank: int) -> None:
        columns = {"w": np.zeros((8, 1), np.float32)}
        layouts = {"w": hvd.checkpoint.Layout([3], [-1, 0])}
        hvd.checkpoint.load(tmp_path / "it", columns, layouts)
        assert np.array_equal(columns["w"], state["w"][:, rank : rank + 1])

    run_ranks(3, three)
    hvd.checkpoint.save(tmp_path / "it", state)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
