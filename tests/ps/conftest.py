"""Clusters in threads, with the short times of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.ps import enrolment, scheduler, server, worker
from tests.ps.cluster import Cluster


@pytest.fixture
def new_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a cluster of so many servers and workers."""
    monkeypatch.setattr(enrolment, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(scheduler, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(worker, "WATCH_SECONDS", 0.05)
    made: list[Cluster] = []

    def new(servers: int, workers: int, **words: Any) -> Cluster:
        folder = tmp_path / words.pop("folder", "")
        folder.mkdir(exist_ok=True)
        made.append(Cluster(folder, servers, workers, **words))
        return made[-1]

    yield new
    for cluster in made:
        cluster.close()
