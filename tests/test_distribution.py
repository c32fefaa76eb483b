"""What spreads the tests over workers goes on where one of them dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_SECONDS
from tests.wheel import ROOT

pytest.importorskip("xdist", reason="the extra 'test' is not installed")

DIES = "import os\ndef test_{name}(): os.kill(os.getpid(), 9)\n"
PASSES = "def test_{name}(): pass\n"


@pytest.mark.timeout(120)
def test_each_test_ends_once_where_workers_die(tmp_path: Path) -> None:
    """Also those of the dead worker's file, and of files that others had been handed before."""
    files = {"dies": (PASSES, DIES, PASSES), "dies_alone": (DIES,), "dies_last": (PASSES, DIES)}
    files["passes"] = (PASSES,)
    for name, tests in files.items():
        lines = [test.format(name=f"{name}_{number}") for number, test in enumerate(tests)]
        (tmp_path / f"test_{name}.py").write_text("".join(lines))
    variables = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # To import the others takes longer.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.distribution", "-n", "2"),
            *("--dist", "loadscope", "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path)),
        ],
        check=False, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert "3 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    for name in ("dies_1", "dies_alone_0", "dies_last_1"):
        assert f"::test_{name}'" in done.stdout
