"""The table of a job on the terminal, and what is printed above it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.metrics import Sample, pack
from hvdlite.launcher.live.job_view import STALL, JobView
from hvdlite.launcher.live.snapshot import snapshot
from hvdlite.launcher.live.stragglers import Straggler
from hvdlite.launcher.live.table import check_rich, lines_of
from hvdlite.launcher.processes.console import Console
from tests.launcher.jobs import launch
from tests.parallel.jobs import environment

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def job(ranks: int) -> JobView:
    """A job of two hosts with steps of 100 ms: rank 1 computes for 80 of them, others for 40."""
    view = JobView()
    for rank in range(ranks):
        compute = 80 if rank == 1 else 40
        for second in range(8):
            steps = 10 * second
            values = {
                "steps_total": steps, "step_seconds_total": second, "memory_bytes": 5 << 20,
                "compute_seconds_total": steps * compute / 1000,
                "exchange_waited_seconds_total": steps * (100 - compute) / 1000,
                "progress_steps": steps, "progress_total_steps": 6070,
            }  # fmt: skip
            view.take(
                "ab"[2 * rank // ranks], rank, pack(Sample(rank, ranks, values)), 1.0 * second
            )
    view.watch.current = Straggler((1,), "a", 0.04, 0.4, "compute", "rank 1 ...")
    view.note(STALL, "[bold]x[/bold] waits", 2.0)
    return view


def shown(view: JobView, columns: int = 120, height: int = 40) -> list[str]:
    pytest.importorskip("rich")
    return [CODES.sub("", line) for line in lines_of(snapshot(view, 7.5, 1000.0), columns, height)]


def test_what_is_shown() -> None:
    lines = shown(job(4))
    assert lines[0].startswith(
        "4 ranks | 10 steps a second | 70 of 6070 steps | ends in 10 min, at"
    )
    rows = [line.split() for line in lines[2:6]]
    assert [row[:2] for row in rows[:2]] == [["a", "0"], ["1", "█" * 16 + "░" * 4]]
    assert lines[2].split()[2:] == [
        "█" * 8 + "░" * 12, "10", "40", "ms", "0", "ms", "0", "ms", "60", "ms", "5", "MiB"
    ]  # fmt: skip
    assert [line.endswith("<- slow") for line in lines[2:6]] == [False, True, False, False]
    assert lines[4].split()[:2] == ["b", "2"]
    assert lines[-1].strip() == "6 s ago: [bold]x[/bold] waits"


def test_an_end_that_no_calendar_has() -> None:
    view = JobView()
    for second in range(8):
        values = {"progress_steps": 1 + second / 1e5, "progress_total_steps": 9e17}
        view.take("a", 0, pack(Sample(0, 1, values)), float(second))
    assert shown(view)[0].endswith(" steps | ends in more than a year")


def test_small_terminals() -> None:
    lines = shown(job(64), columns=60, height=24)
    assert len(lines) <= 12
    assert max(map(len, lines)) < 60
    assert any("<- slow" in line or "1 " in line for line in lines)
    assert len(shown(job(64), columns=80, height=7)) <= 5
    assert shown(JobView())[0] == "no rank counts yet"


def test_output_goes_on_above_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = (tmp_path / "out").open("w+")
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", file)
    console = Console()
    console.show("stderr", ["one", "two"])
    console.write("stdout", b"text\n")
    console.show("stderr", ["three"])
    console.show("stderr", [])
    console.write("stdout", b"end\n")
    screen: list[str] = []
    for part in re.split(r"(\r\x1b\[\dA\x1b\[J)", (tmp_path / "out").read_bytes().decode()):
        if part.startswith("\r"):
            del screen[-int(part[3]) :]
        else:
            screen += part.splitlines()
    assert screen == ["text", "end"]
    file.close()


def test_a_broken_stream_leaves_the_table_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the next lines would be drawn over those of somebody else."""
    file, (reader, writer) = (tmp_path / "out").open("w+"), os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", file)
        console = Console()
        console.show("stderr", ["one"])
        with pytest.raises(BrokenPipeError):
            console.write("stdout", b"text\n")
        assert (tmp_path / "out").read_bytes() == b"one\n\r\x1b[1A\x1b[Jone\n"
    file.close()


def test_a_job_without_and_with_a_terminal() -> None:
    pytest.importorskip("rich")
    command = [sys.executable, "-c", "import time; print('said'); time.sleep(2.5)"]
    done = launch("-np", "1", "--live", *command)
    assert done.stderr == (
        "hvdlite-run: --live: standard error is no terminal, so no table is shown; slow ranks are "
        "named\n"
    )
    assert done.stdout == "[0]<stdout>:said\n"
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "hvdlite.launcher", "-np", "1", "--live", *command]
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    out, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        try:
            out += os.read(ours, 4096)
        except OSError:  # The other end is closed.
            break
    os.close(ours)
    assert process.wait(20) == 0, out
    assert b"[0]<stdout>:said" in out and b"no rank counts yet" in out


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = launch("-np", "2", "--live", "--debug-rank", "1", "true").stderr
    assert "--live contradicts --debug-rank" in text
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ConfigError, match=r"pip install 'hvdlite\[live\]'"):
        check_rich()


# -- the job as a plain dict


def test_a_job() -> None:
    found = snapshot(job(4), 7.5, 1000.0)
    assert json.loads(json.dumps(found)) == found
    rank = found["ranks"][1]
    assert (rank["rank"], rank["host"], rank["slow"], rank["steps"]) == (1, "a", True, 70)
    assert (rank["step"], rank["compute"], rank["waited"]) == pytest.approx((0.1, 0.08, 0.02))
    assert (rank["age"], rank["steps_a_second"]) == pytest.approx((0.5, 10))
    assert [host["ranks"] for host in found["hosts"]] == [[0, 1], [2, 3]]
    assert found["events"] == [
        {"at": 994.5, "kind": "stall", "text": "[bold]x[/bold] waits"}
    ]  # fmt: skip
    assert found["progress"] == {"done": 70, "total": 6070, "left": 600, "ends_at": 1600}
    assert found["straggler"]["cause"] == "compute"


def test_nothing_is_known_yet() -> None:
    found = snapshot(JobView(), 1.0, 1000.0)
    assert (found["ranks"], found["hosts"], found["progress"]) == ([], [], None)
    view = JobView()
    view.take("a", 0, '[1,0,1,"",{"memory_bytes":5}]', 1.0)
    rank = snapshot(view, 1.0, 1000.0)["ranks"][0]
    assert (rank["step"], rank["compute"], rank["memory"]) == (None, None, 5)
