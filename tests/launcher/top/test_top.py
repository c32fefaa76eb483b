"""hvdlite-top, and the keys of --live, with a real job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdlite.launcher.top import cli
from tests.launcher.jobs import MARK, processes, start
from tests.launcher.top import shell
from tests.launcher.top.terminal import Terminal, terminal
from tests.limits import HANG_SECONDS
from tests.parallel.jobs import environment

pytestmark = pytest.mark.timeout(120)
TOP = [
    sys.executable,
    "-c",
    "import sys; from hvdlite.launcher.top.cli import main; sys.exit(main())",
]

TRAINING = """
import os, sys, time
import torch
import hvdlite.torch as hvd
hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
plain = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
batch, done = torch.ones(4, 8), 0.0
def slow_part():
    time.sleep([0.02, 0.06][hvd.rank()])
while not done:
    slow_part()
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    done = hvd.allreduce(torch.tensor([float(os.path.exists(sys.argv[1]))]), op=hvd.Max)
    open(sys.argv[2], "w").close()
"""


def top(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run hvdlite-top, and leave out what it says of other tests' jobs that do not answer."""
    done = subprocess.run(
        [*TOP, *words], env=environment(XDG_RUNTIME_DIR=str(folder), COLUMNS="140"), text=True,
        capture_output=True, timeout=HANG_SECONDS, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = done.stderr.splitlines(keepends=True)
    done.stderr = "".join(each for each in lines if "the job at /tmp/hvdlite-" not in each)
    return done


def test_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("rich")
    end, trains, runtime = tmp_path / "end", tmp_path / "trains", tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", TRAINING, str(end), str(trains)]
    words = ("-np", "2", *command)
    how: dict[str, Any] = {"may_leave": "torch*", "forked": ()}  # A stack shows what forks a rank.
    with start(*words, XDG_RUNTIME_DIR=str(runtime), **how) as process:
        folder = runtime / "hvdlite"
        while not trains.exists():
            time.sleep(0.02)
        pid = str(process.pid)
        check_once(top(runtime, "--once", "--job", pid))
        with terminal([*TOP, "--job", pid], XDG_RUNTIME_DIR=str(runtime)) as screen:
            check_keys(screen)
            screen.press("q")
            assert screen.wait() == 0
            assert screen.is_usual()
        done = top(runtime, "--job", "999999999", "--once")
        assert (done.returncode, "there is none" in done.stderr) == (2, True)
        assert "this is no terminal" in top(runtime, "--job", pid).stderr
        with terminal([*TOP, "--job", pid], XDG_RUNTIME_DIR=str(runtime)) as screen:
            screen.wait_for("2 ranks")
            end.touch()
            screen.wait_for("the job of process [0-9]+ has ended")
            assert screen.wait() == 0
            assert screen.is_usual()
        out, err = process.communicate(timeout=HANG_SECONDS)
        assert (process.returncode, out, err) == (0, "", ""), "nobody who looks leaves a trace"
    assert not folder.exists()


def check_once(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert re.match(r"2 ranks \| [0-9.]+ steps a second", lines[0]), lines
    assert lines[1].split()[:4] == ["host", "rank", "a", "step"]
    assert re.search(r" 0 .*ms.*MiB", lines[2]), lines
    assert re.search(r" 1 .*ms.*MiB", lines[3]), lines


def check_keys(screen: Terminal) -> None:
    screen.wait_for("q: quit")
    assert not screen.is_usual()
    screen.press("1s")
    screen.wait_for(r"main thread of rank 1:\s+File \"<string>\", line \d+, in ")
    screen.press("tx\x15weight\r")
    screen.wait_for(r"allreduce.weight on 2 ranks[^|]*rank 1: rank 0 waited [0-9.]+ ms")
    screen.press("w")
    text = screen.wait_for(r"hvdlite-timeline-\d+-\d+\.json on host ")
    file = re.findall(r"\S+hvdlite-timeline-\d+-\d+\.json", text)[-1]
    screen.wait_for(r"rank 0 has written 10 steps to hvdlite-timeline-")
    events = json.loads(Path(file).read_text())
    reduced = [each for each in events if each.get("name") == "ALLREDUCE"]
    assert 10 <= len(reduced) < 60
    screen.press("\x1b")


def test_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Its socket is not taken for that of a job, and is removed."""
    pytest.importorskip("rich")
    folder = tmp_path / "hvdlite"
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    variables = {"XDG_RUNTIME_DIR": str(tmp_path), MARK: str(tmp_path)}
    left = "hvdlite-agent-*"
    with start("-np", "1", *command, may_leave=left, **variables) as process:
        while not list(folder.glob("*.sock")):
            time.sleep(0.02)
        path = folder / f"{process.pid}.sock"
        assert path.exists()
        process.send_signal(signal.SIGSTOP)
        for pid in processes(str(tmp_path)):  # An agent that lives longer would remove it.
            if pid != process.pid:
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        assert path.exists()
        done = top(tmp_path, "--once", "--job", str(process.pid))
        assert done.returncode in (cli.USAGE_CODE, cli.NO_JOB_CODE)
        assert not path.exists()


def test_keys_below_the_output(tmp_path: Path) -> None:
    """A rank whose main thread hangs shows where."""
    pytest.importorskip("rich")
    script = """
import threading
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(3), name="w")
def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
deadlock()
"""
    launcher = [sys.executable, "-m", "hvdlite.launcher", "-np", "1", "--live", sys.executable]
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with terminal([*launcher, "-c", script], **runtime) as screen:
        screen.wait_for(r"1 rank [\s\S]*rank: arrows, number")
        assert not screen.is_usual()
        screen.press("s")
        screen.wait_for(r"main thread of rank 0:\s+File \"<string>\"[^|]* in deadlock")
        screen.process.send_signal(2)
        screen.wait()
        assert screen.is_usual(), "also after Ctrl-C"


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["--once"]) == 2
    assert "hvdlite-top needs rich: pip install 'hvdlite[live]'" in capsys.readouterr().err


def test_jobs_of_a_shell_have_keys_in_turn() -> None:
    """See shell.py."""
    with terminal([sys.executable, shell.__file__]) as screen:
        text = screen.wait_for("all is well|Error.*", shell.LIMIT_SECONDS + 20)
        assert screen.wait() == 0, text
