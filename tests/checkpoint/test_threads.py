"""Checkpoints that several threads of a rank ask for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.checkpoint import files, manifest
from hvdlite.common.runtime.current import current, use
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")


def test_one_thread_of_a_rank_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that begins while a save is at work: their exchanges have the same names."""
    read, write = manifest.read, files.write
    loading, saved = threading.Event(), threading.Event()
    early: list[bool] = []

    def slow_write(*given: Any) -> Any:
        load.start()
        early.append(loading.wait(0.2))
        saved.set()
        return write(*given)

    def noted_read(*given: Any) -> Any:
        loading.set()
        assert saved.is_set()
        return read(*given)

    found = {"w": np.zeros(3)}

    def main(rank: int) -> None:
        nonlocal load
        hvd.checkpoint.save(tmp_path / "a", {"w": np.ones(3)})
        runtime = current()

        def body() -> None:
            with use(runtime):
                hvd.checkpoint.load(tmp_path / "a", found)

        load = threading.Thread(target=body, daemon=True)
        monkeypatch.setattr(files, "write", slow_write)
        monkeypatch.setattr(manifest, "read", noted_read)
        hvd.checkpoint.save(tmp_path / "b", {"w": np.ones(3)})
        load.join(30)

    load = threading.Thread()
    run_ranks(1, main)
    assert early == [False]
    assert found["w"].tolist() == [1.0] * 3
