"""Raw access by names, in processes."""

from __future__ import annotations

from tests.ps.processes import cluster
from tests.ps.scripts import raw
from tests.ps.sites import Site


def test_workers_push_and_pull_by_names(site: Site) -> None:
    with cluster(site, 2, 2, raw.main) as job:
        for number in range(2):
            assert not job.wait(f"worker{number}")
        assert not job.wait_for_all()
