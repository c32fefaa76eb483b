"""Raw access by names, in processes."""

from __future__ import annotations

from pathlib import Path

from tests.ps.processes import cluster
from tests.ps.scripts import raw


def test_workers_push_and_pull_by_names(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 2, raw.main, tmp_path) as job:
        for number in range(2):
            assert not job.wait(f"worker{number}")
        assert not job.wait_for_all()
