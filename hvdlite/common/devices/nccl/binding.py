"""The functions of NCCL: their types, their errors, and which of them a release has."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.reduce_op import ReduceOp

# Find a shared library of NVIDIA among those that frameworks and wheels bring.
#
# In this order: the setting, one that this process has loaded, the wheels of NVIDIA, those in the
# directories of torch and TensorFlow, and what the loader finds (LD_LIBRARY_PATH, ldconfig).


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


UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
OLDEST = 21100  # 2.11: bfloat16, and sums that are multiplied first.
MULTIPLIED_BY_HOST_VALUE = 1

DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
BYTES = DTYPES["uint8"]
OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}


class NcclError(RuntimeError):
    """A function of NCCL has failed."""


class UniqueId(ctypes.Structure):
    """What members need to find each other."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """The configuration of a communicator in its first form, which all later releases read."""

    _fields_ = (("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int))


def not_blocking() -> Config:
    """Return a configuration by which no function waits for other members."""
    return Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)


_COMM, _STREAM, _MEMORY = c_void_p, c_void_p, c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommGetAsyncError": (_COMM, POINTER(c_int)),
    "ncclCommAbort": (_COMM,),
    "ncclCommDestroy": (_COMM,),
    "ncclAllReduce": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, _COMM, _STREAM),
    "ncclReduce": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, c_int, _COMM, _STREAM),
    "ncclBroadcast": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, _COMM, _STREAM),
    "ncclAllGather": (_MEMORY, _MEMORY, c_size_t, c_int, _COMM, _STREAM),
    "ncclReduceScatter": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, _COMM, _STREAM),
    "ncclSend": (_MEMORY, c_size_t, c_int, c_int, _COMM, _STREAM),
    "ncclRecv": (_MEMORY, c_size_t, c_int, c_int, _COMM, _STREAM),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), _MEMORY, c_int, c_int, _COMM),
    "ncclRedOpDestroy": (c_int, _COMM),
}
# Those of releases from 2.13 and 2.14 on, without which communicators block.
_LATER: dict[str, tuple[Any, ...]] = {
    "ncclGetLastError": (_COMM,),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommFinalize": (_COMM,),
}


class Nccl:
    """The library. The functions are attributes, which return its result codes."""

    def __init__(self, chosen: str = "") -> None:
        """Load the file `chosen`, or the one that is found.

        Raises `NcclError` for a release that is too old; see `load` for others.
        """
        found = load(NCCL, chosen)
        self.path = found.path
        self._functions: dict[str, Any] = {}
        for name, arguments in {**_SIGNATURES, **_LATER}.items():
            function = getattr(found.library, name, None)
            if function is None and name in _SIGNATURES:
                raise NcclError(f"{self.path} has no function {name}: it is no NCCL, or an old one")
            if function is not None:
                function.argtypes, function.restype = arguments, c_int
                self._functions[name] = function
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            if (function := getattr(found.library, name, None)) is not None:
                function.restype = c_char_p
                self._functions[name] = function
        self._functions["ncclGetErrorString"].argtypes = (c_int,)
        self.does_not_block = all(name in self._functions for name in _LATER)
        number = c_int()
        self.check(self.call("ncclGetVersion", ctypes.byref(number)), "ncclGetVersion")
        self.version = number.value
        if self.version < OLDEST:
            raise NcclError(
                f"{self.path} is NCCL {self.version_text}, and hvdlite needs "
                f"{_text_of(OLDEST)} or later: install a newer one, or name its file in "
                f"{NCCL.variable}"
            )

    @property
    def version_text(self) -> str:
        """The version in the form "2.27.3"."""
        return _text_of(self.version)

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; return its result code."""
        return int(self._functions[name](*arguments))

    def check(self, code: int, what: str) -> None:
        """Raise `NcclError` unless a call has succeeded, or goes on."""
        if code not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"{what}: {self.error_text(code)}")

    def error_text(self, code: int) -> str:
        """Return what NCCL says about a result code, and about what has failed last."""
        text = self._functions["ncclGetErrorString"](code).decode(errors="replace")
        last = self._functions.get("ncclGetLastError")
        more = last(None) if last is not None else None
        detail = f": {more.decode(errors='replace').strip()}" if more else ""
        return f"NCCL {self.version_text} reports {text!r} (code {code}){detail}"

    def unique_id(self) -> bytes:
        made = UniqueId()
        self.check(self.call("ncclGetUniqueId", ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)


def _text_of(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
