"""A job runs from an installed wheel, on the compiled path, without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hvdlite.common.collectives.native.build import find_compiler
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, clean_environment, mpirun
from tests.wheel import ROOT, build, copy_of_the_checkout

pytest.importorskip("setuptools", "77", reason="the extra 'test' is not installed")
pytestmark = [
    pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git checkout"),
    pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler"),
]

PROGRAM = """
import json, sys
import numpy as np
import hvdlite
import hvdlite.numpy as hvd
from hvdlite.common.collectives.native.shm import NativeShm

calls = []
compiled = NativeShm.allreduce
NativeShm.allreduce = lambda *arguments: calls.append(1) or compiled(*arguments)
hvd.init()
total = hvd.allreduce(np.full(100_000, hvd.rank() + 1.0, np.float32), op=hvd.Sum)
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "/hvdlite/shm/" in line}
print(json.dumps([hvdlite.__file__, hvd.size(), float(total.min()), float(total.max()), len(calls),
                  sorted(libraries)]))
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The interpreter of an environment that has the wheel, and all else from this one."""
    wheel = build("wheel", copy_of_the_checkout(tmp_path / "source"), tmp_path / "dist")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=60)
    # A path in a .pth file adds a folder, but not the .pth files in it: no editable install.
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    folders = [folder for folder in sys.path if Path(folder).name.endswith("-packages")]
    (site / "dependencies.pth").write_text("\n".join(folders))
    return python


@pytest.mark.timeout(180)
def test_a_job_of_an_installed_wheel_uses_the_compiled_allreduce(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        mpirun(2, str(installed), "-c", PROGRAM),
        cwd=tmp_path / "work",
        env={**clean_environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(ranks) == 2, done.stdout + done.stderr
    for file, size, low, high, calls, libraries in ranks:
        assert Path(file).is_relative_to(tmp_path / "venv")
        assert (size, low, high, calls) == (2, 3.0, 3.0, 1)
        assert len(libraries) == 1 and os.path.dirname(libraries[0]).startswith(str(tmp_path))
