"""The tools that keep the code in shape find nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def check(*command: str, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    check("ruff", "check")


def test_the_code_is_formatted() -> None:
    check("ruff", "format", "--check")


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("torch") is None, reason="mypy reads the types of PyTorch")
@pytest.mark.timeout(420)
def test_mypy_finds_nothing(tmp_path: Path) -> None:
    """In a tree that is laid out as it is installed, where launcher/ is hvdlite/launcher."""
    package = tmp_path / "hvdlite"
    package.mkdir()
    for entry in [*(ROOT / "hvdlite").iterdir(), ROOT / "launcher"]:
        (package / entry.name).symlink_to(entry)
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    check("mypy", "--config-file", str(ROOT / "pyproject.toml"), *cache, cwd=tmp_path)
