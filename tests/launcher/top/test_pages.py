"""What hvdlite-top shows of two jobs, and of one that does not answer as it should."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdlite.launcher.inspection import runtime_folder
from hvdlite.launcher.live.keyboard import ENTER
from hvdlite.launcher.live.snapshot import snapshot
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.top import cli, connection, pages
from hvdlite.launcher.top.connection import JobConnection
from tests.launcher.inspection.test_service import Served
from tests.launcher.live.test_table import CODES, job

LIMIT_SECONDS = 20.0


class Job(Served):
    """A job of so many ranks, which answers with an error while it is `broken`."""

    def __init__(self, pid: int, ranks: int) -> None:
        self.broken = False
        self._about = {
            "pid": pid, "command": ["/opt/bin/python", f"{pid}.py", "x\x1b" * 40 * (pid - 1)],
            "ranks": ranks, "directory": "/", "started": 1e6 * pid,
        }  # fmt: skip
        self._job = {**snapshot(job(ranks), 7.5, 1000.0), "job": self._about}
        super().__init__()

    def _make(self, request: Any, done: Any) -> None:
        if self.broken:
            done({"error": "the answer\ncannot be read"})
        else:
            done(self._about if request == ["about"] else self._job)


class Screen:
    """Keeps what is drawn."""

    def __init__(self) -> None:
        self.text = ""

    def size(self) -> tuple[int, int]:
        return 80, 24

    def draw(self, lines: Sequence[str]) -> None:
        shown = [CODES.sub("", line) for line in lines]
        assert len(shown) <= 24 and max(map(len, shown)) < 80, shown
        self.text = "\n".join(shown)

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class Top:
    """Two jobs, and hvdlite-top without its terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(shown: pages.Pages, page: pages.Page) -> int:
            self.pages = shown
            shown.turn_to(page)
            return 0

        self.loop, self.screen = EventLoop(), Screen()
        self.services = [Job(1, 1), Job(2, 3)]
        monkeypatch.setattr(pages, "Screen", lambda: self.screen)
        monkeypatch.setattr(pages.Pages, "run", run)
        connected: list[JobConnection] = []
        monkeypatch.setattr(
            cli, "JobConnection",
            lambda *where: connected.append(JobConnection(*where)) or connected[-1],
        )  # fmt: skip
        self._connected = connected
        self.jobs, said = cli.running_jobs(self.loop)
        assert said == []

    def show(self) -> None:
        cli._show(self.jobs, None, self.loop)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.pages._press(key)

    def look(self) -> None:
        assert self.pages._page is not None
        self.pages._page.look()

    def wait(self, what: Callable[[], bool]) -> None:
        end = self.loop.now() + LIMIT_SECONDS
        while not what():
            assert self.loop.now() < end, self.screen.text
            self.loop.run_once(0.2)

    def wait_for(self, text: str) -> None:
        self.wait(lambda: text in self.screen.text)

    def close(self) -> None:
        for each in self._connected:
            each.close()
        for service in self.services:
            service.close()
        self.loop.close()


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Top]:
    pytest.importorskip("rich")
    monkeypatch.setattr(runtime_folder, "folders", lambda: [str(tmp_path / "hvdlite")])
    one = Top(monkeypatch)
    yield one
    one.close()


def test_two_jobs(top: Top) -> None:
    """The end of a job is said where that job is shown, and leads back to the list."""
    top.show()
    first, second = top.screen.text.splitlines()[2:]
    assert first == f"1  pid 1  1 rank   {cli._spell_start(1e6)}  python 1.py ''"
    assert second.startswith(f"2  pid 2  3 ranks  {cli._spell_start(2e6)}  python 2.py 'x?x?")
    assert second.endswith("…")
    now = time.time()
    assert cli._spell_start(now) == time.strftime("since %H:%M", time.localtime(now))
    top.press("2", ENTER)
    top.wait_for("3 ranks |")
    top.press("q", "1", ENTER)
    top.wait_for("1 rank |")
    top.services.pop().close()
    top.wait(lambda: not top.jobs[1][0].open)
    assert "1 rank |" in top.screen.text, "it is another that has ended"
    top.press("q")
    assert "pid 1" in top.screen.text and "pid 2" not in top.screen.text
    top.services.append(Job(3, 2))
    top.look()
    top.wait_for("2  pid 3")
    top.press("2", ENTER)
    top.wait_for("2 ranks |")
    top.services.pop().close()
    top.wait_for("the job of process 3 has ended")
    assert "pid 3" not in top.screen.text
    top.press("k")
    assert "has ended" not in top.screen.text
    top.press(ENTER)
    top.wait_for("1 rank |")
    top.jobs[0][0]._link._end("connection reset by peer")
    assert (
        "the job of process 1 cannot be asked any more: connection reset by peer" in top.screen.text
    )
    assert "running jobs" in top.screen.text
    assert not top.pages._over
    top.press("q")
    assert top.pages._over


def test_a_job_that_is_stopped(top: Top, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is asked once for a while, and keys are heard meanwhile."""
    monkeypatch.setattr(connection, "REACH_SECONDS", 0.5)
    monkeypatch.setattr(pages, "LOOK_SECONDS", 0.02)
    dialled: list[str] = []
    reach = connection.reach
    monkeypatch.setattr(
        connection, "reach", lambda *args: dialled.append(args[1][0].path) or reach(*args)
    )
    path = str(tmp_path / "hvdlite" / "7.sock")
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(path)
        stopped.listen(64)
        top.show()
        assert dialled == [path]
        end = top.loop.now() + 0.5
        top.pages._look()
        while top.loop.now() < end:
            top.loop.run_once(0.02)
    assert dialled == [path]
    assert "2  pid 2" in top.screen.text
    Path(path).unlink()


def test_a_job_that_ends_while_the_list_is_shown(top: Top) -> None:
    top.show()
    top.press("2")
    top.services.pop(0).close()
    top.wait(lambda: not top.jobs[0][0].open)
    top.press(ENTER)
    top.wait_for("3 ranks |")


def test_a_job_that_ends_when_it_has_been_found(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, said = cli.find_jobs()
    monkeypatch.setattr(cli, "find_jobs", lambda: ([*paths, f"{paths[0]}.gone"], said))
    jobs, said = cli.running_jobs(top.loop)
    for each, _ in jobs:
        each.close()
    assert (len(jobs), said) == (2, [])


def test_only_one_job(top: Top) -> None:
    cli._show(top.jobs[:1], top.jobs[0], top.loop)
    top.wait_for("1 rank |")
    top.services.pop(0).close()
    top.wait(lambda: top.pages._over)
    assert top.pages._last_words == "the job of process 1 has ended"


def test_a_job_that_answers_with_errors(top: Top, capsys: pytest.CaptureFixture[str]) -> None:
    top.show()
    top.press(ENTER)
    top.wait_for("1 rank |")
    top.services[0].broken = True
    top.look()
    top.wait_for("the answer?cannot be read")
    assert "1 rank |" in top.screen.text, "what was known stays"
    top.press("q", ENTER)
    top.wait_for("the answer?cannot be read")
    top.services[0].broken = False
    top.look()
    top.wait_for("1 rank |")
    assert "cannot be read" not in top.screen.text
    top.services[0].broken = True
    assert cli._print_once(top.jobs[0][0], top.loop) == cli.NO_JOB_CODE
    assert "the job refuses to answer: the answer" in capsys.readouterr().err
    ((connection, about),), said = cli.running_jobs(top.loop)
    connection.close()
    assert about["pid"] == 2
    assert "refuses to answer" in said[0]
