"""The arguments of the compiled collectives: a segment of tensors, as `segment.h` describes it."""

from __future__ import annotations

import ctypes
import functools
from array import array as numbers
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.kernels import Arithmetic

# As in `reduce_of` of reducer.h.
TYPES = {
    name: number
    for number, name in enumerate(
        (
            "float32", "float64", "float16", "bfloat16",
            "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        )
    )
}  # fmt: skip
_UNROUNDED = {"float16": 12, "bfloat16": 13}
_BITWISE = {ReduceOp.BAND: 4, ReduceOp.BOR: 5, ReduceOp.BXOR: 6}
_OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MIN: 2, ReduceOp.MAX: 3, **_BITWISE}
# A bool is 0 or 1: "and" is the least of them, "or" is the greatest.
_OPERATIONS_OF_BOOL = {**_OPERATIONS, ReduceOp.SUM: 3, ReduceOp.PRODUCT: 2}

_Pointer = ctypes.c_void_p
_Integer = ctypes.c_int64


class SegmentArguments(ctypes.Structure):
    """The arguments of one call: `Segment` of segment.h."""

    _fields_ = (
        *((name, _Integer) for name in (
            "members", "index", "local_size", "own", "slots", "slot_bytes", "slots_start",
            "row_start", "timeout_ns",
        )),
        *((name, _Pointer) for name in ("local", "memory", "base")),
        *((name, _Integer) for name in (
            "missed", "collective", "root", "type", "operation", "itemsize", "result_itemsize",
            "whole", "streamed",
        )),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("source_tensors", _Integer),
        ("source_sizes", _Pointer),
        ("sources", _Pointer),
        ("target_tensors", _Integer),
        ("target_sizes", _Pointer),
        ("targets", _Pointer),
        ("stores", _Pointer),
        ("counts", _Pointer),
        *((name, _Integer) for name in ("pieces", "packed", "reduced", "unpacked")),
    )  # fmt: skip


def set_reduction(arguments: Any, arithmetic: Arithmetic) -> None:
    """Set what the compiled code must know of a reduction that it can run.

    The arguments are those of a segment or a short call.
    """
    found = codes(arithmetic)
    assert found is not None
    arguments.type, arguments.operation = found
    arguments.itemsize = arithmetic.input_dtype.itemsize
    arguments.prescale = arithmetic.reduction.prescale
    arguments.postscale = arithmetic.reduction.postscale


class Chains:
    """Sizes and addresses of the parts of tensors, chain by chain; the compiled code reads them.

    Numbers of `array` are made and found in a tenth of the time that numpy takes for so few.
    """

    def __init__(self, sizes: Sequence[int], addresses: Sequence[int], chains: int = 1) -> None:
        self.sizes = numbers("q", sizes)
        self.addresses = numbers("q", addresses)
        self.tensors = len(sizes) // chains

    @property
    def pointers(self) -> tuple[int, int]:
        """Where the sizes and the addresses begin."""
        return self.sizes.buffer_info()[0], self.addresses.buffer_info()[0]

    @classmethod
    def one(cls, arrays: Sequence[Array]) -> Chains:
        return cls([each.size for each in arrays], [address(each) for each in arrays])

    @classmethod
    def of_members(cls, arrays: Sequence[Array], counts: Sequence[Sequence[int]]) -> Chains:
        """Return a chain for each member, which has ``counts[t][member]`` elements of array t."""
        itemsize = arrays[0].itemsize
        ends = [accumulate(sizes, initial=0) for sizes in counts]
        starts = [
            [begin + end * itemsize for end in each]
            for begin, each in zip(map(address, arrays), ends, strict=True)
        ]
        members = range(len(counts[0]))
        return cls(
            [sizes[member] for member in members for sizes in counts],
            [each[member] for member in members for each in starts],
            len(members),
        )


def point(arguments: SegmentArguments, source: Chains, target: Chains) -> None:
    """Set the sizes and addresses of sources and targets, which the caller keeps."""
    arguments.source_tensors, arguments.target_tensors = source.tensors, target.tensors
    arguments.source_sizes, arguments.sources = source.pointers
    arguments.target_sizes, arguments.targets = target.pointers


def codes(arithmetic: Arithmetic) -> tuple[int, int] | None:
    """Return the codes of type and operation; None for what is not compiled."""
    reduction = arithmetic.reduction
    found = _codes_of(arithmetic.input_dtype, arithmetic.output_dtype, reduction.reduce_op)
    scaled = reduction.prescale != 1 or reduction.postscale != 1
    # Integers are scaled in float64, by numpy.
    return None if scaled and arithmetic.input_dtype.kind in "iub" else found


@functools.cache
def _codes_of(
    given: np.dtype[Any], result: np.dtype[Any], reduce_op: ReduceOp
) -> tuple[int, int] | None:
    name = given.name  # numpy takes microseconds to say a name
    if name == "bool":
        return TYPES["uint8"], _OPERATIONS_OF_BOOL[reduce_op]
    code = TYPES.get(name)
    if given != result:
        code = _UNROUNDED.get(name) if result == np.float32 else None
    return None if code is None else (code, _OPERATIONS[reduce_op])


def address(array: Array) -> int:
    """Return where the memory of an array begins."""
    start: int = array.__array_interface__["data"][0]
    return start
