"""Which variables are taken for typing errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hvdlite
import hvdlite.numpy as hvd
from hvdlite.common.meeting.launch import SINGLE, Launch
from hvdlite.common.runtime import lifecycle
from hvdlite.common.runtime.current import this_process
from hvdlite.common.settings.config import misspelt, settings
from tests.common.watching import watching

PACKAGE = Path(hvdlite.__file__).parent
ROOT = PACKAGE.parent
NAME = re.compile(r"(?<![A-Z_])HVDLITE_[A-Z_]*[A-Z]\b")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HVDLITE_CYCLETIME", ": did you mean HVDLITE_CYCLE_TIME?"),
        ("HVDLITE_RENDEVOUS", ": did you mean HVDLITE_RENDEZVOUS?"),
        ("HVDLITE_LOGLEVEL", ": did you mean HVDLITE_LOG_LEVEL?"),
        ("HVDLITE_XYZZY", "; docs/settings.md lists those that there are"),
    ],
)
def test_a_misspelt_variable_gets_the_one_that_is_meant(name: str, hint: str) -> None:
    assert misspelt([name, "PATH", "HOROVOD_CYCLETIME", "HVDLITE_RANK"]) == [
        f"the environment variable {name} is unknown, and ignored{hint}"
    ]


def test_all_variables_of_code_manifests_and_docs_are_known() -> None:
    files = [
        path
        for folder in (
            PACKAGE,
            ROOT / "launcher",
            ROOT / "deploy",
            ROOT / "docs",
            ROOT / "examples",
        )
        for path in folder.rglob("*")
        if path.suffix in {".py", ".cc", ".yaml", ".md", ".sh"}
    ]
    found = {name for path in files for name in NAME.findall(path.read_text())}
    assert {"HVDLITE_SPARK_DEVICES", "HVDLITE_LAUNCHER_EVENTS", "HVDLITE_INCARNATION"} <= found
    assert misspelt(found) == []
    assert misspelt(entry.variable for entry in settings()) == []


@pytest.mark.parametrize(("rank", "warnings"), [(0, 1), (1, 0)])
def test_rank_0_warns_once(rank: int, warnings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_CYCLETIME", "1")
    monkeypatch.setattr(this_process, "warned", False)
    monkeypatch.setattr(lifecycle, "find_launch", lambda: Launch(SINGLE, rank, rank + 1))
    sentence = "HVDLITE_CYCLETIME is unknown, and ignored: did you mean HVDLITE_CYCLE_TIME?"
    with watching(sentence) as watch:
        for _ in range(2):
            hvd.init()
            hvd.shutdown()
    assert watch.text.count(sentence) == warnings
