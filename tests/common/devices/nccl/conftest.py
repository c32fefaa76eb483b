"""The C library with the symbols of NCCL and of the CUDA runtime, compiled once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common.devices.nccl.fake import Fake
from tests.distribution import once
from tests.limits import HANG_SECONDS

SOURCE = Path(__file__).parent / "fake_nccl.cc"


def compiled(directory: Path, name: str, *options: str) -> Path:
    """Compile the library under a name of its own: the loader knows libraries by their names."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    target = directory / name
    command = [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-pthread", *options]
    subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True, timeout=HANG_SECONDS)
    return target


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the library."""
    return once(tmp_path_factory, "nccl", lambda folder: compiled(folder, "libfake_nccl.so"))


@pytest.fixture
def fake(fake_path: Path) -> Iterator[Fake]:
    """The library, without delays and errors; nobody uses a stream that is gone."""
    library = Fake(fake_path)
    library.c.fake_reset()
    yield library
    misused = library.c.fake_misused()
    library.c.fake_reset()
    assert not misused, "streams were used after they were destroyed"
