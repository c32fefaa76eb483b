"""The five minutes of docs/elastic.md, step by step, in the order of the page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.elastic.jobs import Watch
from tests.launcher.jobs import launch, start

pytestmark = [pytest.mark.scripts, pytest.mark.torch]
ROOT = Path(__file__).parents[3]
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 60
LEFT = "torchinductor*"  # A folder of PyTorch.


PAGE = (ROOT / "docs" / "elastic.md").read_text()
SCRIPTS = [block for block in PYTHON.findall(PAGE) if "hvd.init()" in block]


def commands() -> list[str]:
    """The shell commands of the tutorial."""
    tutorial = PAGE.partition("## Five minutes")[2].partition("\n## ")[0]
    return [block.strip() for block in BASH.findall(tutorial)]


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
    with start(*words, may_leave=LEFT) as process:
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


def test_the_example_goes_on_when_ranks_change_after_the_last_step_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch of one step: the function is called again when nothing of it is left to do."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    prepare, run, _, add, remove = commands()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    subprocess.run(prepare, shell=True, check=True, timeout=LIMIT_SECONDS)
    words = run.replace("-np 2", "-np 1").replace("--epochs 300", "--epochs 99999").split()[1:]
    with start(*words, "--batch-size", "1500", may_leave=LEFT) as process:
        watch = Watch(process)
        watch.said(r"epoch +1:", LIMIT_SECONDS)
        ends = {add: "workers have come; .* has 3 ranks", remove: "were removed; .* has 1 rank"}
        for change, came in ends.items():
            subprocess.run(change, shell=True, check=True, timeout=LIMIT_SECONDS)
            watch.line(came, LIMIT_SECONDS)  # Newcomers may come one after the other.
        process.send_signal(signal.SIGINT)
        assert watch.finish(LIMIT_SECONDS) == 130


@pytest.mark.parametrize("script", SCRIPTS, ids=["torch", "numpy"])
def test_the_scripts_of_the_page_run(script: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(script)
    words = ("-np", "2", "--min-np", "2", sys.executable, str(path))
    done = launch(*words, timeout=LIMIT_SECONDS, may_leave=LEFT)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"<stdout>:.*?(\[[-+.e\d].*|\[\[.*)$", done.stdout, re.MULTILINE)
    assert len(weights) == 2 and weights[0] == weights[1]
