"""The library of the compiled collectives of one host, used where it is shipped or can be built."""

from __future__ import annotations

import ctypes
import functools
from array import array as numbers
from collections.abc import Sequence
from typing import Any

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.native.build import say_that_python_runs
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.collectives.native.finding import find_kernel
from hvdlite.common.collectives.native.segment import TYPES, SegmentArguments

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
