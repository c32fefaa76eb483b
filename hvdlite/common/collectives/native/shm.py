"""The compiled allreduce of one host: a binding to `shm.cc`, used where it can be built.

It computes what `shm.py` computes in Python: sums in the order of the members, 16-bit floats in
float32, hence the same bits. Its memory lies behind the slots that Python uses. Members use it
when all of them have the same library.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.native.build import Recipe, say_that_python_runs
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.transport.base import Transport, connection_lost

SLOTS = 8
PIECE_BYTES = 256 << 10
SMALL_BYTES = 32 << 10  # to add so much takes less time than to wait once more
# How often a wait for another rank looks whether it is gone, or the world is over: this is the time
# that the survivors of an elastic job lose. Waits are rare, as all ranks are ready when they begin.
CHECK_SECONDS = 0.01
MOST_RANKS = 256  # kMaxMembers in shm.cc
BOARD_BYTES = 32 << 10  # room for the board of so many

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}  # as in `reduce_range`
MEMORY_BYTES = BOARD_BYTES + SLOTS * PIECE_BYTES  # of each rank

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing")
_Pointer = ctypes.c_void_p
_Integer = ctypes.c_int64


class SegmentArguments(ctypes.Structure):
    """The arguments of one call: `SegmentArguments` of shm.cc."""

    _fields_ = (
        *((name, _Integer) for name in (
            "members", "index", "local_size", "own", "tensors", "total", "piece", "slots",
            "slot_bytes", "slots_start", "whole", "dtype", "itemsize", "timeout_ns",
        )),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        *((name, _Pointer) for name in ("local", "memory", "base", "sizes", "inputs", "outputs")),
        *((name, _Integer) for name in ("packed", "reduced", "unpacked", "missed")),
    )  # fmt: skip


class Library:
    """The compiled code. `identity` differs between versions that must not work together."""

    def __init__(self, path: str) -> None:
        self.identity = int(Path(path).stem.rpartition("-")[2], 16)
        self.allreduce: Any = ctypes.CDLL(path).hvdlite_allreduce
        self.allreduce.restype = _Integer
        self.allreduce.argtypes = (ctypes.POINTER(SegmentArguments),)


def recipe() -> Recipe:
    """Return how the library is compiled: for the processor of this machine."""
    return Recipe(
        source=Path(__file__).with_name("shm.cc"),
        folder="shm",
        name="shm",
        flags=_FLAGS,
        depends_on=(_processor(),),
        remark="once (some 2 seconds): allreduce inside a host gets faster by it",
    )


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
    say_that_python_runs("allreduce inside a host runs", found, first_of_host=first_of_host)


class NativeShm:
    """The compiled allreduce at one rank. It owns a part of the memory that ranks share."""

    def __init__(self, transport: Transport, found: Library, start: int) -> None:
        self._transport = transport
        self._library = found
        self._start = start  # of this part in the memory of every rank, in bytes
        self._ranks = transport.topology.peers(transport.rank)
        self._number = {rank: number for number, rank in enumerate(self._ranks)}
        self._views: dict[int, Array] = {}  # keeps what `_memory` points to
        self._memory = np.zeros(len(self._ranks), np.uint64)
        self._base = np.zeros(len(self._ranks), np.uint64)
        self._locals: dict[tuple[int, ...], Array] = {}

    @property
    def identity(self) -> int:
        """A number that differs between libraries that cannot work together."""
        return self._library.identity

    def runs(self, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members) -> bool:
        """Return whether the compiled code can run this reduction."""
        supported = _code(dtype) is not None
        return supported and reduce_op is ReduceOp.SUM and len(self._ranks) <= MOST_RANKS

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
    ) -> None:
        """See `Backend.allreduce`. All members must have room for it in their memory already."""
        dtype = inputs[0].dtype
        sizes = [array.size for array in inputs]
        total = sum(sizes)
        if total == 0:
            return
        sources = [_address(array) for array in inputs]
        targets = [
            source if given is taken else _address(taken)
            for source, given, taken in zip(sources, inputs, outputs, strict=True)
        ]
        lists = np.array([sizes, sources, targets], np.uint64)
        whole = total * dtype.itemsize <= SMALL_BYTES
        local = self._local_numbers(members)
        arguments = SegmentArguments(
            members=members.size,
            index=members.index,
            local_size=len(self._ranks),
            own=self._number[self._transport.rank],
            tensors=len(inputs),
            total=total,
            piece=PIECE_BYTES // dtype.itemsize,
            slots=SLOTS,
            slot_bytes=PIECE_BYTES,
            slots_start=BOARD_BYTES,
            whole=whole,
            dtype=_code(dtype),
            itemsize=dtype.itemsize,
            timeout_ns=int(CHECK_SECONDS * 1e9),
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            local=_address(local),
            memory=_address(self._memory),
            base=_address(self._base),
            sizes=_address(lists[0]),
            inputs=_address(lists[1]),
            outputs=_address(lists[2]),
        )
        self._run(arguments)

    def _run(self, arguments: SegmentArguments) -> None:
        gone = -1
        while self._library.allreduce(ctypes.byref(arguments)):
            rank = self._ranks[arguments.missed]
            if gone == rank:
                raise connection_lost(rank)
            if self._transport.gone(rank):
                gone = rank  # it may have done its part before it went: look once more
            self._transport.while_waiting()

    def _local_numbers(self, members: Members) -> Array:
        numbers = self._locals.get(members.ranks)
        if numbers is None:
            numbers = np.array([self._number[rank] for rank in members.ranks], np.int64)
            self._locals[members.ranks] = numbers
            for rank in members.ranks:
                self._map(rank)
        return numbers

    def _map(self, rank: int) -> None:
        if rank not in self._views:
            view = self._transport.shared(rank, self._start + MEMORY_BYTES)[self._start :]
            self._views[rank] = view
            self._memory[self._number[rank]] = _address(view)


@functools.cache
def _code(dtype: np.dtype[Any]) -> int | None:
    return DTYPES.get(dtype.name)  # numpy takes microseconds to say a name


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
