"""Find a shared library of NVIDIA among those that frameworks and wheels bring.

In this order: the setting, one that this process has loaded, the wheels of NVIDIA, those in the
directories of torch and TensorFlow, and what the loader finds (LD_LIBRARY_PATH, ldconfig).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hvdlite.common.base.errors import ConfigError

# Packages that bring libraries, and where below them these are.
_PLACES = (
    ("nvidia", "*/lib"),  # nvidia-nccl-cu12, nvidia-cuda-runtime-cu12, and all of CUDA 13.
    ("torch", "lib"),
    ("tensorflow", "."),
)


class Wanted(NamedTuple):
    """A library that is looked for."""

    what: str  # For errors.
    names: tuple[str, ...]  # File names, the best first.
    variable: str  # The setting that names a file.


NCCL = Wanted("NCCL", ("libnccl.so.2",), "HVDLITE_NCCL_LIBRARY")
CUDART = Wanted(
    "the CUDA runtime",
    ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"),
    "HVDLITE_CUDART_LIBRARY",
)


class MissingLibraryError(OSError):
    """No such library is here."""


class Found(NamedTuple):
    """A library that was loaded, and where it is."""

    library: ctypes.CDLL
    path: str


def load(wanted: Wanted, chosen: str = "") -> Found:
    """Load a library: the file `chosen`, or the first that is found.

    Raises `ConfigError` if `chosen` cannot be loaded, `MissingLibraryError` if there is none.
    """
    if chosen:
        try:
            return Found(ctypes.CDLL(chosen), chosen)
        except OSError as error:
            raise ConfigError(f"{wanted.variable}={chosen}: {error}") from error
    failures = []
    for path, mode in _candidates(wanted.names):
        try:
            return Found(ctypes.CDLL(path, mode=mode), path)
        except OSError as error:
            if mode == ctypes.DEFAULT_MODE:
                failures.append(str(error))
    raise MissingLibraryError(
        f"{wanted.what} is not here ({'; '.join(failures)}). Install the wheel of NVIDIA that "
        f"brings {wanted.names[0]}, or name the file in {wanted.variable}"
    )


def _candidates(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield paths, and how each is loaded: one that is here already is not loaded twice."""
    for name in names:
        yield name, ctypes.DEFAULT_MODE | os.RTLD_NOLOAD
    for package, pattern in _PLACES:
        for root in _roots(package):
            for name in names:
                for file in sorted(root.glob(f"{pattern}/{name}")):
                    yield str(file), ctypes.DEFAULT_MODE
    for name in names:
        yield name, ctypes.DEFAULT_MODE


def _roots(package: str) -> list[Path]:
    """Return the directories of a package, which is not imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
