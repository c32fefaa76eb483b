"""The commands of docs/running.md for Slurm start what the page says."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.hosts.lab import SHARED
from tests.hosts.slurm.cluster import Cluster
from tests.running_page import Block, blocks, check, prepare


@pytest.mark.parametrize("block", [pytest.param(b, id=str(b.number)) for b in blocks("run in")])
def test_tasks_meet_as_the_page_says(slurm: Cluster, block: Block) -> None:
    with tempfile.TemporaryDirectory(dir=slurm.lab.folder / "shared") as folder:
        cwd = SHARED / Path(folder).name
        variables = prepare(Path(folder), cwd)
        done = slurm.run("bash", "-euo", "pipefail", "-c", f"cd {cwd}\n{block.code}", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    check(block, done.stdout + done.stderr)
