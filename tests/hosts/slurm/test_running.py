"""The commands of docs/running.md for Slurm, and the script of docs/howto/slurm.md, are right."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tests.hosts.lab import SHARED
from tests.hosts.slurm.cluster import Cluster
from tests.running_page import Block, blocks, check, prepare
from tests.scripts_of_pages import scripts


@pytest.mark.parametrize("block", [pytest.param(b, id=str(b.number)) for b in blocks("run in")])
def test_tasks_meet_as_the_page_says(slurm: Cluster, block: Block) -> None:
    with tempfile.TemporaryDirectory(dir=slurm.lab.folder / "shared") as folder:
        cwd = SHARED / Path(folder).name
        variables = prepare(Path(folder), cwd)
        done = slurm.run("bash", "-euo", "pipefail", "-c", f"cd {cwd}\n{block.code}", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    check(block, done.stdout + done.stderr)


@pytest.mark.parametrize("code, lines", scripts("slurm"))
def test_the_script_of_the_page_prints_what_it_says(
    slurm: Cluster, code: str, lines: list[str]
) -> None:
    with tempfile.TemporaryDirectory(dir=slurm.lab.folder / "shared") as folder:
        cwd = SHARED / Path(folder).name
        (Path(folder) / "this.py").write_text(code)
        command = f"cd {cwd}; salloc --nodes=2 --ntasks-per-node=2 {sys.executable} this.py"
        done = slurm.run("sh", "-c", command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {*lines} <= {*done.stdout.splitlines()}, done.stdout
