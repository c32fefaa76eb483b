"""Finds the kernel: shipped in the wheel, or compiled on this machine."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hvdlite.common.collectives.native import kernel
from hvdlite.common.collectives.native.build import Recipe
from hvdlite.common.collectives.native.cache import BuildError

log = logging.getLogger("hvdlite")

Loaded = TypeVar("Loaded")
# With the path of the library, where it is from, and a number that no other library has: ranks with
# different libraries must not work together, as these may keep another one of several NaNs.
OpenLibrary = Callable[[str, str, int], Loaded]


class _NotShippedError(Exception):
    """No shipped library can be used; the text says why."""


def find_kernel(open_library: OpenLibrary[Loaded]) -> Loaded:
    """Return what `open_library` returns for the kernel: the shipped one, or else one of our own.

    The compiler runs where nothing is shipped for this machine. Raises `BuildError`.
    """
    try:
        return _shipped(open_library)
    except _NotShippedError as error:
        reason = str(error)
    origin = f"compiled on this machine, as {reason}"
    own = recipe()
    try:
        identity = _identity(own.file_name())
        loaded = own.load(lambda path: open_library(path, origin, identity))
    except BuildError as error:
        raise BuildError(f"{reason}, and {error}") from None
    assert loaded is not None
    return loaded


def _shipped(open_library: OpenLibrary[Loaded]) -> Loaded:
    """Open the fastest shipped library that this processor can run."""
    machine = platform.machine()
    files = {path.name: path for path in kernel.shipped_files()}
    if not files:
        raise _NotShippedError("this installation ships none")
    reason = f"this installation ships none for its sources on {machine}"
    for variant in kernel.candidates(machine, kernel.processor_features()):
        path = files.get(kernel.file_name(machine, variant))
        if path is None:
            continue
        try:
            origin = f"shipped, for {variant.title}"
            return open_library(str(path), origin, _identity(path.name))
        except Exception as error:
            reason = f"the shipped {path} cannot be loaded ({error})"
            log.warning("%s", reason)
    raise _NotShippedError(reason)


def _identity(file_name: str) -> int:
    """Return 64 bits of the name, which says what the file was made of, and how."""
    return int.from_bytes(hashlib.sha256(file_name.encode()).digest()[:8], "little")


def recipe() -> Recipe:
    """Return how the kernel is compiled here: for the processor of this machine."""
    main = kernel.FOLDER / "shm.cc"
    return Recipe(
        source=main,
        parts=tuple(path for path in (*kernel.sources(), *kernel.headers()) if path != main),
        folder="shm",
        name="shm",
        flags=(*kernel.FLAGS, "-march=native"),
        depends_on=(_processor(),),
        remark="once (some 5 seconds): collectives inside a host get faster by it",
    )


def _processor() -> str:
    """Describe the processor, since the compiler uses all of its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
