"""Which variables are taken for typing errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import hvdlite
from hvdlite.common.settings.config import misspelt, settings
from tests.parallel.jobs import run_command

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


@pytest.mark.thorough
def test_rank_0_warns_once() -> None:
    script = "import hvdlite.numpy as hvd\nfor _ in range(2):\n    hvd.init()\n    hvd.shutdown()"
    words = ("-np", "2", sys.executable, "-c", script)
    done = run_command(
        [sys.executable, "-m", "hvdlite.launcher", *words], timeout=60, HVDLITE_CYCLETIME="1"
    )
    assert done.returncode == 0, done.stdout
    sentence = "HVDLITE_CYCLETIME is unknown, and ignored: did you mean HVDLITE_CYCLE_TIME?"
    assert done.stdout.count(sentence) == 1, done.stdout
