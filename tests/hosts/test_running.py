"""The commands of docs/running.md that need several hosts start what the page says."""

from __future__ import annotations

import contextlib
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hosts.lab import SHARED, Lab
from tests.running_page import Block, blocks, check, prepare


@pytest.mark.parametrize("block", [pytest.param(b, id=str(b.number)) for b in blocks("run on")])
def test_hosts_meet_as_the_page_says(lab: Lab, block: Block) -> None:
    for module in block.needs:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    hosts = re.findall(r"node\w", block.where)
    with tempfile.TemporaryDirectory(dir=lab.folder / "shared") as folder:
        cwd = SHARED / Path(folder).name
        variables = prepare(Path(folder), cwd)
        if "torch" in block.needs:  # torchrun leaves a folder there.
            variables["TMPDIR"] = str(cwd)
        words = ("bash", "-euo", "pipefail", "-c", block.code)
        with contextlib.ExitStack() as stack:
            jobs = [lab.start(host, *words, cwd=cwd, **variables) for host in hosts]
            running = [stack.enter_context(job) for job in jobs]
            done = [job.finish(80) for job in running]
    output = "".join(each.stdout + each.stderr for each in done)
    assert {each.returncode for each in done} == {0}, output
    check(block, output)
