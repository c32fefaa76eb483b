"""The library of the compiled collectives of one host: `shm.cc`, used where it can be built."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import Any

from hvdlite.common.collectives.native.build import Recipe, say_that_python_runs
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.collectives.native.segment import SegmentArguments

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing")


class Library:
    """The compiled code. `identity` differs between versions that must not work together."""

    def __init__(self, path: str) -> None:
        self.identity = int(Path(path).stem.rpartition("-")[2], 16)
        self.run: Any = ctypes.CDLL(path).hvdlite_run
        self.run.restype = ctypes.c_int64
        self.run.argtypes = (ctypes.POINTER(SegmentArguments),)


def recipe() -> Recipe:
    """Return how the library is compiled: for the processor of this machine."""
    folder = Path(__file__).parent
    return Recipe(
        source=folder / "shm.cc",
        folder="shm",
        name="shm",
        flags=_FLAGS,
        depends_on=(_processor(), *_headers(folder)),
        remark="once (some 5 seconds): collectives inside a host get faster by it",
    )


def _headers(folder: Path) -> list[str]:
    """Return the contents of the files that shm.cc includes."""
    return [path.read_text() for path in sorted(folder.glob("*.h"))]


def _processor() -> str:
    """Describe the processor, since the compiler uses all of its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


@functools.cache
def _load() -> Library | BuildError:
    try:
        loaded = recipe().load(Library)
    except BuildError as error:
        return error
    assert loaded is not None
    return loaded


def library(wanted: str, *, first_of_host: bool = True) -> Library | None:
    """Return the library: if `wanted` is "auto", where it can be had; never if it is "off".

    The `first_of_host` warns where it could be expected and cannot be had. Raises `BuildError`
    where it is "on" and cannot be had.
    """
    if wanted == "off":
        return None
    found = _load()
    if isinstance(found, Library):
        return found
    if wanted == "on":
        raise found
    _say_that_python_runs(first_of_host)
    return None


@functools.cache
def _say_that_python_runs(first_of_host: bool) -> None:
    """Say it once, however often `init` is called."""
    found = _load()
    assert isinstance(found, BuildError)
    say_that_python_runs("collectives inside a host run", found, first_of_host=first_of_host)
