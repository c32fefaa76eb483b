"""The numbers of real jobs at the launcher: over agents, by mpirun, and of an elastic one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.launcher.jobs import launch, start
from tests.limits import HANG_SECONDS

pytestmark = pytest.mark.timeout(120)

# Reduces until a file exists.
SCRIPT = """
import os, sys, time
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
hvd.progress(1000)
if hvd.rank() == 1 and "late" in sys.argv:
    time.sleep(1.5)
done = 0.0
while not done:
    ends = np.array([float(os.path.exists(sys.argv[1]))])
    done = float(hvd.allreduce(ends, op=hvd.Max, name="done")[0])
    time.sleep(0.01)
"""


def page_of(process: subprocess.Popen[str], wanted: str) -> str:
    """The page of metrics once two ranks and what is `wanted` are in it."""
    assert process.stderr is not None
    line = next(line for line in process.stderr if "page at" in line)
    assert b"<title>" in urllib.request.urlopen(re.search(r"http://\S+", line)[0]).read()  # type: ignore[index]
    line = next(line for line in process.stderr if "metrics at" in line)
    address = re.search(r"http://\S+", line)[0]  # type: ignore[index]
    assert address.startswith("http://127.0.0.1:")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with urllib.request.urlopen(address, timeout=20) as answer:
            text: str = answer.read().decode()
        if text.count("hvdlite_collective_calls_total{") == 2 and re.search(wanted, text):
            return text
        time.sleep(0.2)
    raise AssertionError(text)


def check(words: tuple[str, ...], folder: Path, *arguments: str, wanted: str = "") -> str:
    end = folder / "end"
    command = [sys.executable, "-c", SCRIPT, str(end), *arguments]
    report = folder / "report.html"
    flags = ("--metrics-port", "0", "--live-page", "0", "--live-report", str(report))
    with start(*words, *flags, *command) as process:
        text = page_of(process, wanted)
        end.touch()
        _, err = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, err
        assert "{" not in err, "the lines of ranks are for nobody's eyes"
    (data,) = re.findall(r'id="data">(.*?)</script>', report.read_text())
    found = json.loads(data)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1] and found["ended"] == ""
    assert found["progress"]["total"] == 1000
    assert 'collective_calls_total{collective="allreduce",host="' in text
    assert re.search(r'hvdlite_progress_total_steps\{host="[^"]+",rank="1"\} 1000.0', text)
    return text


@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
def test_the_numbers_of_a_job(launcher: str, tmp_path: Path) -> None:
    """Those over agents are in the next test."""
    pytest.importorskip("prometheus_client")
    check(("-np", "2"), tmp_path)


def test_a_stall_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    words = ("-np", "2", "--stall-check-warning-time-seconds", "0.3", "--launcher", "ssh")
    check(words, tmp_path, "late", wanted=r'hvdlite_events_total\{kind="stall"\} [1-9]')
    (data,) = re.findall(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text())
    stalls = [event["text"] for event in json.loads(data)["events"] if event["kind"] == "stall"]
    assert any("done" in text for text in stalls), "the tensor that rank 1 is late with"


CIRCLE = """
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
for name in "ab" if hvd.rank() else "ba":
    hvd.allreduce(np.ones(3), name=name)
"""


def test_ranks_that_wait_for_each_other_are_an_event(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    flags = ("--live-report", str(report), "--stall-check-shutdown-time-seconds", "2")
    assert launch("-np", "2", *flags, sys.executable, "-c", CIRCLE).returncode != 0
    (data,) = re.findall(r'id="data">(.*?)</script>', report.read_text())
    stalls = [event["text"] for event in json.loads(data)["events"] if event["kind"] == "stall"]
    assert stalls and stalls[0].startswith(
        "2 ranks wait for each other, and none of them will ever go on: rank 0 waits for "
        "'allreduce.b', not yet submitted by rank 1: "
    )


def test_the_numbers_of_an_elastic_job(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    text = check(("-np", "2", "--min-np", "2"), tmp_path)
    assert re.search(r'hvdlite_world\{host="[^"]+",rank="1"\} 1.0', text)
    assert 'hvdlite_events_total{kind="world"} 1.0' in text


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
while not done:
    time.sleep([0.02, 0.2][hvd.rank()])
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    done = hvd.allreduce(torch.tensor([float(os.path.exists(sys.argv[1]))]), op=hvd.Max)
"""


@pytest.mark.soak  # The same is said, and more, in test_causes.py, at shorter intervals.
def test_a_rank_with_a_slow_data_loader_is_named(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("torch")
    end = tmp_path / "end"
    command = [sys.executable, "-c", TRAINING, str(end)]
    with start("-np", "2", "--metrics-port", "0", *command, may_leave="torch*") as process:
        assert process.stderr is not None
        # Where others use the machine, a collection of garbage may be the first cause.
        said = r"hvdlite-run: rank 1 \(host .*makes the others wait .*its data takes \d+ ms, theirs"
        assert any(re.match(said, line) for line in process.stderr)
        end.touch()
        process.communicate(timeout=HANG_SECONDS)


def test_flags_that_contradict() -> None:
    done = launch("--metrics-address", "0.0.0.0", "true")
    assert (done.returncode, done.stderr) == (
        2, "hvdlite-run: --metrics-address needs --metrics-port\n"
    )  # fmt: skip
    assert "ports go up to 65535" in launch("--metrics-port", "70000", "true").stderr
