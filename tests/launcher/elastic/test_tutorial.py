"""The five minutes of docs/elastic.md, step by step, in the order of the page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launcher.elastic.jobs import Watch
from tests.launcher.jobs import start

ROOT = Path(__file__).parents[3]
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 60


def commands() -> list[str]:
    """The shell commands of the tutorial."""
    page = (ROOT / "docs" / "elastic.md").read_text()
    tutorial = page.partition("## Five minutes")[2].partition("\n## ")[0]
    return [block.strip() for block in BASH.findall(tutorial)]


@pytest.mark.torch
def test_the_tutorial_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    prepare, run, kill, add, remove = commands()
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def shell(command: str) -> None:
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, timeout=LIMIT_SECONDS)

    shell(prepare)
    monkeypatch.chdir(tmp_path)
    launcher, *words = run.split()
    assert launcher == "hvdlite-run"
    with start(*words, may_leave="torchinductor*") as process:  # PyTorch leaves that one.
        watch = Watch(process)
        watch.line("world 1 has 2 ranks", LIMIT_SECONDS)
        watch.said(r"epoch +1:", LIMIT_SECONDS)
        (pid,) = watch.said(r"rank 1 is process (\d+)", LIMIT_SECONDS)
        assert kill.startswith("kill -9 ")
        os.kill(int(pid), signal.SIGKILL)
        watch.line("rank 1 .* was lost: killed by SIGKILL; .* world 2 has 1 rank", LIMIT_SECONDS)
        watch.line("world 3 has 2 ranks; rank 1 is new", LIMIT_SECONDS)
        shell(add)
        watch.line("world 4 has 3 ranks; rank 2 is new", LIMIT_SECONDS)
        shell(remove)
        watch.line("ranks 1-2 .* were removed; .* world 5 has 1 rank", LIMIT_SECONDS)
        process.send_signal(signal.SIGINT)
        assert watch.finish(LIMIT_SECONDS) == 130
