"""The library of the compiled collectives of one host, used where it is shipped or can be built."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
from array import array as numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.native import kernel
from hvdlite.common.collectives.native.build import Recipe, say_that_python_runs
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.collectives.native.segment import TYPES, SegmentArguments

# -- the kernel: shipped in the wheel, or compiled on this machine

log = logging.getLogger("hvdlite")

Loaded = TypeVar("Loaded")
# With the path of the library, where it is from, and a number that no other library has: ranks with
# different libraries must not work together, as these may keep another one of several NaNs.
OpenLibrary = Callable[[str, str, int], Loaded]


def find_kernel(open_library: OpenLibrary[Loaded]) -> Loaded:
    """Return what `open_library` returns for the kernel: the shipped one, or else one of our own.

    The compiler runs where nothing is shipped for this machine. Raises `BuildError`.
    """
    machine = platform.machine()
    files = {path.name: path for path in (kernel.FOLDER / kernel.SHIPPED).glob("*.so")}
    reason = "this installation ships none"
    if files:
        reason += f" for its sources on {machine}"
    # The fastest that this processor can run comes first.
    for variant in kernel.candidates(machine, kernel.processor_features()) if files else ():
        path = files.get(kernel.file_name(machine, variant))
        if path is None:
            continue
        try:
            origin = f"shipped, for {variant.title}"
            return open_library(str(path), origin, _identity(path.name))
        except Exception as error:
            reason = f"the shipped {path} cannot be loaded ({error})"
            log.warning("%s", reason)
    origin = f"compiled on this machine, as {reason}"
    own = recipe()
    try:
        identity = _identity(own.file_name())
        loaded = own.load(lambda path: open_library(path, origin, identity))
    except BuildError as error:
        raise BuildError(f"{reason}, and {error}") from None
    assert loaded is not None
    return loaded


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


# -- the library

ADD = 0  # The operation of `reduce_of` of reducer.h.


class Library:
    """The compiled code. `identity` differs between versions that must not work together."""

    def __init__(self, path: str, origin: str, identity: int) -> None:
        self.origin = origin  # for messages
        self.identity = identity
        self.code = ctypes.CDLL(path)
        self.run: Any = self.code.hvdlite_run
        self.run.restype = ctypes.c_int64
        self.run.argtypes = (ctypes.POINTER(SegmentArguments),)
        self._reduce: Any = self.code.hvdlite_reduce
        self._reduce.restype = None
        self._reduce.argtypes = (
            *(ctypes.c_int64,) * 3, ctypes.c_double, ctypes.c_void_p, ctypes.c_int64,
            ctypes.c_void_p,
        )  # fmt: skip

    def add(self, parts: Sequence[Array], results: Array, scale: float = 1.0) -> None:
        """Set results = scale * (parts[0] + parts[1] + ...), in this order, without the GIL.

        All are flat, contiguous, of one size and of one dtype of `TYPES`; integers are not scaled.
        16-bit floats are added in float32 and rounded once.
        """
        addresses = numbers("q", [part.__array_interface__["data"][0] for part in parts])
        self._reduce(
            TYPES[results.dtype.name], ADD, len(parts), scale, addresses.buffer_info()[0],
            results.size, results.__array_interface__["data"][0],
        )  # fmt: skip


@functools.cache
def _load() -> Library | BuildError:
    try:
        return find_kernel(Library)
    except BuildError as error:
        return error


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
