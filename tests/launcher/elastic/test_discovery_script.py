"""The discovery script: what it may print, and scripts that fail, hang and leave children."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite.launcher.elastic import discovery_script
from hvdlite.launcher.elastic.discovery_script import DiscoveryScript
from hvdlite.launcher.processes.event_loop import EventLoop
from tests.launcher.jobs import executable

pytestmark = pytest.mark.timeout(120)


class Asked:
    """A script that is asked again and again, and all that came of it."""

    def __init__(self, script: str, longest_seconds: float) -> None:
        self.loop = EventLoop()
        self.answers: list[dict[str, int] | str] = []
        note = self.answers.append
        self.script = DiscoveryScript(
            script, 3, os.environ, self.loop, note, lambda error: note(str(error)), longest_seconds
        )

    def ask(self, count: int = 1) -> dict[str, int] | str:
        """Wait for so many answers; return the last one."""
        deadline = time.monotonic() + 10
        while len(self.answers) < count:
            assert time.monotonic() < deadline
            self.script.look(time.monotonic())
            self.loop.run_once(0.02)
        return self.answers[count - 1]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setattr(discovery_script, "EVERY_SECONDS", 0.01)
    made: list[Asked] = []

    def make(text: str, longest_seconds: float = 10.0, name: str = "find hosts.sh") -> Asked:
        path = executable(tmp_path / name, text)
        made.append(Asked(str(path), longest_seconds))
        return made[-1]

    yield make
    descriptors = len(os.listdir("/proc/self/fd"))
    for asked in made:
        asked.script.close()
        asked.loop.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_lines_are_hosts_in_their_order(ask) -> None:  # type: ignore[no-untyped-def]
    found = ask("printf '\\n z:2 \\na\\n\\n'").ask()
    assert list(found.items()) == [("z", 2), ("a", 3)]


def test_it_is_asked_again(ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    count = tmp_path / "count"
    asked = ask(f"echo x >> {count}; echo a:$(wc -l < {count})")
    assert asked.ask(3) == {"a": 3}
    assert asked.answers == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_child_that_goes_on_and_on_does_not_hold_it_up(ask, descriptor: int) -> None:  # type: ignore[no-untyped-def]
    asked = ask(f"echo a:1; yes >&{descriptor} & exit 3")
    assert "ended with exit code 3" in asked.ask()


def test_a_line_for_the_shell_will_do(ask) -> None:  # type: ignore[no-untyped-def]
    asked = Asked("echo a:1; echo b", 5.0)
    try:
        assert asked.ask() == {"a": 1, "b": 3}
    finally:
        asked.script.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo a; echo no cluster >&2; exit 3", "ended with exit code 3 and said: no cluster"),
        ("echo a; echo '<html>'", "line 2: '<html>'"),
    ],
)
def test_failures_name_script_and_reason(ask, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    answer = ask(text).ask()
    assert said in answer and "find hosts.sh" in answer


def test_one_that_hangs_is_killed_with_its_children_and_asked_again(ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    child = tmp_path / "child"
    asked = ask(f"sleep 1000 & echo $! > {child}; wait", longest_seconds=0.3)
    runs = 0
    while not runs or not child.exists() or not child.read_text():  # Slow to start: killed before.
        runs += 1
        assert "not ended within 0.3 seconds" in asked.ask(runs)
    pid = int(child.read_text())
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}/exe"):
        assert time.monotonic() < deadline
    assert "not ended" in asked.ask(runs + 1)


def test_the_group_of_a_script_without_children_is_not_empty(  # type: ignore[no-untyped-def]
    ask, signalled: list[int]
) -> None:
    """When it is signalled: else its number may be that of others."""
    assert ask("echo a:1").ask() == {"a": 1}
    assert len(signalled) == 1


def test_children_that_go_on_do_not_hold_it_up(ask) -> None:  # type: ignore[no-untyped-def]
    asked = ask("sleep 1000 & echo a:1")
    begin = time.monotonic()
    assert asked.ask() == {"a": 1}
    assert time.monotonic() - begin < 30


def test_a_loop_goes_on_meanwhile(ask) -> None:  # type: ignore[no-untyped-def]
    asked = ask("sleep 1000", longest_seconds=0.2)
    reader, writer = os.pipe()
    seen: list[bytes] = []
    asked.loop.listen(reader, lambda fd: seen.append(os.read(fd, 9)))
    asked.script.look(time.monotonic())
    os.write(writer, b"x")
    asked.loop.run_once(1.0)
    assert seen == [b"x"] and asked.answers == []
    os.close(writer)
    asked.loop.forget(reader)
    os.close(reader)
