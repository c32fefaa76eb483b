"""The arguments of the compiled collectives: a segment of tensors, as `segment.h` describes it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
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
_OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MIN: 2, ReduceOp.MAX: 3}
# A bool is 0 or 1: "and" is the least of them, "or" is the greatest.
_OPERATIONS_OF_BOOL = {ReduceOp.SUM: 3, ReduceOp.PRODUCT: 2, ReduceOp.MIN: 2, ReduceOp.MAX: 3}

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
        ("counts", _Pointer),
        *((name, _Integer) for name in ("pieces", "packed", "reduced", "unpacked")),
    )  # fmt: skip


def set_reduction(arguments: SegmentArguments, arithmetic: Arithmetic) -> None:
    """Set what the compiled code must know of a reduction that it can run."""
    found = codes(arithmetic)
    assert found is not None
    arguments.type, arguments.operation = found
    arguments.result_itemsize = arithmetic.output_dtype.itemsize
    arguments.prescale = arithmetic.reduction.prescale
    arguments.postscale = arithmetic.reduction.postscale


Chains = tuple[Array, Array]  # Sizes and addresses: a row for each chain, of its parts of tensors.


def point(arguments: SegmentArguments, source: Chains, target: Chains) -> None:
    """Set the sizes and addresses of sources and targets, which the caller keeps."""
    arguments.source_tensors = source[0].shape[-1]
    arguments.source_sizes, arguments.sources = address(source[0]), address(source[1])
    arguments.target_tensors = target[0].shape[-1]
    arguments.target_sizes, arguments.targets = address(target[0]), address(target[1])


def wholes(arrays: Sequence[Array]) -> Chains:
    """Return sizes and addresses of arrays as one chain."""
    sizes = np.array([array.size for array in arrays], np.int64)
    return sizes, np.array([address(array) for array in arrays], np.int64)


def parts(arrays: Sequence[Array], counts: Sequence[Sequence[int]]) -> Chains:
    """Return sizes and addresses of the chains of the members, a row for each of them."""
    sizes = np.array(counts, np.int64)
    starts = (np.cumsum(sizes, axis=1) - sizes) * arrays[0].itemsize
    starts += np.array([[address(array)] for array in arrays], np.int64)
    return np.ascontiguousarray(sizes.T), np.ascontiguousarray(starts.T)


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
