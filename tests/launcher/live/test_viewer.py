"""What keys do with the table of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.common.base.metrics import LONGEST_NAME
from hvdlite.launcher.live.keyboard import keys_in
from hvdlite.launcher.live.snapshot import snapshot
from hvdlite.launcher.live.table import lines_of
from hvdlite.launcher.live.viewer import Viewer
from tests.launcher.live.test_table import CODES, job


class Asked:
    """Keeps what a viewer asks."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.answer: Callable[[dict[str, Any]], None] = lambda answer: None

    def ask(self, request: Any, done: Callable[[dict[str, Any]], None]) -> None:
        self.requests.append(list(request))
        self.answer = done


def viewer(ranks: int = 12) -> tuple[Viewer, Asked, list[str]]:
    asked, quits = Asked(), list[str]()
    one = Viewer(asked.ask, lambda: None, lambda: quits.append("quit"))
    one.job = snapshot(job(ranks), 7.5, 1000.0)
    return one, asked, quits


def press(one: Viewer, keys: str) -> None:
    for key in keys_in(keys):
        one.press(key)


def test_ranks_are_chosen() -> None:
    one, asked, _ = viewer()
    press(one, "\x1b[A")
    assert one.chosen == 0
    press(one, "\x1b[B\x1bOBk")
    assert one.chosen == 1
    press(one, "11")
    assert one.chosen == 11
    press(one, "2")
    assert one.chosen == 2, "there is no rank 112, and none 12"
    press(one, "\x1b[B1")
    assert one.chosen == 1
    one.chosen = None
    press(one, "s")
    assert (one.chosen, asked.requests) == (1, [["stack", 1]]), "the slow one"


def test_digits_of_one_number_are_typed_soon() -> None:
    one, _, _ = viewer()
    times = iter([1.0, 2.9, 10.0, 12.1])
    one._now = lambda: next(times)
    press(one, "11")
    assert one.chosen == 11
    press(one, "11")
    assert one.chosen == 1


def test_questions() -> None:
    one, asked, quits = viewer()
    press(one, "3s")
    asked.answer({"stack": '  File "x", line 1\n    wait()\n'})
    assert one.panel == ["main thread of rank 3:", '  File "x", line 1', "    wait()"]
    older = asked.answer
    press(one, "w")
    older({"stack": "too late"})
    assert one.panel == ["a timeline of the next 10 steps of rank 0: ..."]
    asked.answer({"file": "/a.json", "host": "b", "steps": 10})
    assert one.panel[0] == "rank 0 writes its next 10 steps, and an event tells when it has:"
    assert one.panel[1] == "/a.json on host b"
    press(one, "tx\x15layerx\x7f3\r")
    assert asked.requests[1:] == [["timeline", 10], ["tensor", "layer3"]]
    asked.answer({"error": "rank 1: no"})
    assert one.panel == ["rank 1: no"]
    press(one, "t\r")
    none = {"name": "x", "ranks": 3, "others": [], "calls": [], "asked": [0, 1, 2, 3]}
    asked.answer({**none, "waits": [[0, 12.0], [2, 3.0]]})
    (said,) = one.panel
    assert said == "x is outstanding: submitted by ranks 0, 2, 12 s ago, and not by ranks 1, 3"
    press(one, "t\r")
    asked.answer({"calls": [{"ago": "?"}], "name": "x", "waits": [], "asked": []})
    assert one.panel[0].startswith("the answer cannot be read: ")
    press(one, "tq\x1b")
    assert not quits
    press(one, "t" + "x" * 5000 + "\r")
    ((_, name),) = asked.requests[5:]
    assert len(name) == LONGEST_NAME, "a longer request would not be read"
    press(one, "\x1b")
    assert (one.panel, quits) == ([], [])
    press(one, "q")
    assert quits == ["quit"]


def test_what_is_drawn() -> None:
    one, _, _ = viewer()
    assert one.job is not None
    one.job["job"] = {"pid": 5, "command": ["python", "\x1b[2Jx.py"]}
    one.chosen, panel = 7, ["main thread:", *("line \x1b[31m" for _ in range(50)), one.help]
    for columns, height in ((80, 24), (160, 50), (40, 10)):
        lines = lines_of(
            one.job, columns, height, share=1.0, chosen=7, panel=panel, title=True
        )  # fmt: skip
        shown = [CODES.sub("", line) for line in lines]
        assert len(lines) < height or height == 10
        assert max(map(len, shown)) < columns
        assert "\x1b[2J" not in "".join(lines)
        assert "\x1b[31m" not in "".join(lines)
    lines = lines_of(one.job, 160, 50, share=1.0, chosen=7, title=True, panel=[one.help])
    assert len([line for line in lines if "\x1b[7m" in line]) == 1
    assert CODES.sub("", lines[-1]).startswith("rank: arrows, number |")
    assert len(one.help) < 80


def test_sequences_of_keys() -> None:
    assert keys_in("\x1b[A\x1b[1;5Bx\x1b[3~\ny\x01é\x1b") == [
        "up",
        "x",
        "enter",
        "y",
        "é",
        "escape",
    ]
