"""The script of docs/parameter_server.md, run as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import ROOT, environment
from tests.ps.sites import held_port

BLOCK = re.compile(r"<!-- (script|started by|prints) -->\n```\w*\n(.*?)\n```\n", re.DOTALL)
PAGE = ROOT / "docs" / "parameter_server.md"


@pytest.mark.scripts
def test_the_script_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    (tmp_path / "script.py").write_text(blocks["script"])
    # A line goes to the pipe in one piece, then, whatever the tests were started with.
    variables = environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="")
    with held_port() as port:
        commands = blocks["started by"].replace("4242", str(port))
        commands = re.sub(r"\bpython\b", sys.executable, commands)
        done = subprocess.run(
            ["bash", "-ec", commands], env=variables, cwd=tmp_path,
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == blocks["prints"].splitlines(), done.stderr


def test_the_page_names_every_setting() -> None:
    """Those of docs/settings.md that are about servers."""
    flags = re.findall(r"`(--ps-[a-z-]+)`", (ROOT / "docs" / "settings.md").read_text())
    text = PAGE.read_text()
    assert flags and [flag for flag in flags if flag not in text] == []
