"""What the tests of the backends share: programs of a rank, and the numpy oracle beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.backend_choice import Backends, build_backends, choose
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import FLOATS, numpy_dtype
from hvdlite.common.transport.base import Transport
from tests.ranks import run_threads
from tests.worlds import IN_PROCESS, make_world

DTYPES = (
    "uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "bool", "complex64", "complex128",
)  # fmt: skip
# What adds is the same on any number of ranks and hosts: some try all types, the others these.
FEW_DTYPES = DTYPES[::4]


def quiet(phase: str) -> AbstractContextManager[object]:
    """An activity that nobody records."""
    return nullcontext()


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which the oracle adds: float32 for 16-bit floats, as the docs promise."""
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def run_on_transports(
    topology: Topology,
    program: Callable[[Transport], Any],
    kind: str = IN_PROCESS,
    config: Config | None = None,
) -> list[Any]:
    """Run `program` on every rank of a world; results in rank order."""
    world = make_world(kind, topology, config)

    def body(rank: int) -> Any:
        transport = world.transport(rank)
        try:
            return program(transport)
        finally:
            transport.close()

    return run_threads(topology.size, body)


def all_members(transport: Transport) -> Members:
    """All ranks."""
    topology = transport.topology
    return Members(tuple(range(topology.size)), transport.rank, topology)


@lru_cache(maxsize=1024)  # Every rank asks for those of all others, for each reduction.
def _numbers(seed: int, size: int) -> Array:
    """Two rows of 0, 1 and 2."""
    return np.random.default_rng([seed, size]).integers(0, 3, (2, size), np.uint8)


def values(seed: int, size: int, dtype: str) -> Array:
    """Small values whose sums and products of 8 are exact in every dtype but for rounding."""
    numbers = _numbers(seed, size)
    if dtype == "bool":
        return numbers[0] > 0
    if dtype.startswith("complex"):
        return (numbers[0] + 1j * numbers[1]).astype(dtype)
    return numbers[0].astype(numpy_dtype(dtype))


def noise(rank: int, size: int, dtype: str = "float32") -> Array:
    """Values whose sum depends on the order of summation."""
    random = np.random.default_rng([rank, size])
    wide = random.standard_normal(size) * 10.0 ** random.integers(-3, 4, size)
    return wide.astype(numpy_dtype(dtype))


def oracle(parts: Sequence[Array], reduction: Reduction) -> Array:
    """The reduction of `parts` in plain numpy."""
    dtype, op = parts[0].dtype, reduction.reduce_op
    wide = [scaled(part.astype(wide_dtype(dtype)), reduction.prescale) for part in parts]
    stacked = np.stack(wide)
    if op in BITS:
        result = BITS[op].reduce(stacked, axis=0)
    elif dtype == np.bool_:
        any_, all_ = stacked.any(axis=0), stacked.all(axis=0)
        result = any_ if op in (ReduceOp.SUM, ReduceOp.MAX) else all_
    else:
        ufunc = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply,
                 ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}[op]  # fmt: skip
        result = ufunc.reduce(stacked, axis=0, dtype=stacked.dtype)
    return scaled(result, reduction.postscale).astype(dtype)


def part(dtype: str, size: int, salt: int, member: int) -> Array:
    """What a member gives of a tensor."""
    return values(100 * salt + member, size, dtype)


@lru_cache(maxsize=128)  # Every rank compares with the same numbers.
def _total(dtype: str, size: int, salt: int, members: int, reduction: Reduction) -> Array:
    total = oracle([part(dtype, size, salt, member) for member in range(members)], reduction)
    total.flags.writeable = False
    return total


def totals(dtype: str, sizes: Sequence[int], members: int, reduction: Reduction) -> list[Array]:
    """The reductions of what all members give."""
    return [_total(dtype, size, salt, members, reduction) for salt, size in enumerate(sizes)]


def scaled(array: Array, factor: float) -> Array:
    """`array` * `factor` by the rules of the project."""
    if factor == 1 or array.dtype == np.bool_:
        return array
    if array.dtype.kind in "iu":
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    real = np.asarray(factor, array.real.dtype)
    return (array.view(real.dtype) * real).view(array.dtype)


REDUCTIONS = (
    Reduction(ReduceOp.SUM),
    Reduction(ReduceOp.SUM, 0.5, 0.5),
    Reduction(ReduceOp.PRODUCT),
    Reduction(ReduceOp.MIN),
    Reduction(ReduceOp.MAX),
)
BITS = {
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def reductions_of(dtype: str) -> tuple[Reduction, ...]:
    """The reductions that a dtype has; bits are combined of one type of each kind."""
    if dtype.startswith("complex"):
        return tuple(r for r in REDUCTIONS if r.reduce_op not in (ReduceOp.MIN, ReduceOp.MAX))
    if dtype in ("uint8", "int32", "bool"):
        return (*REDUCTIONS, *map(Reduction, BITS))
    return REDUCTIONS


class Program:
    """Every collective on one rank, each checked against the oracle."""

    def __init__(self, transport: Transport, members: Members, backends: Backends) -> None:
        self.members = members
        self.transport = transport
        self.backends = backends

    @classmethod
    def of(cls, transport: Transport, members: Members | None = None, **settings: Any) -> Program:
        """The program of all ranks, or of those of `group`."""
        backends = build_backends(transport, Config(**settings))
        return cls(transport, members or all_members(transport), backends)

    def backend(self, collective: str, dtype: str, op: ReduceOp = ReduceOp.SUM) -> Any:
        """What runs it."""
        return choose(self.backends, collective, numpy_dtype(dtype), op, self.members)

    def everything(self, dtype: str, sizes: Sequence[int]) -> None:
        """All collectives on a segment of tensors of `sizes`."""
        for reduction in reductions_of(dtype):
            self.allreduce(dtype, sizes, reduction)
            self.reducescatter(dtype, sizes, reduction)
        self.allgather(dtype, sizes)
        for size in sizes:
            self.broadcast(dtype, size)
            self.alltoall(dtype, size)
        if dtype in FLOATS:
            for op in (ReduceOp.MIN, ReduceOp.MAX):
                self.keeps(dtype, Reduction(op), np.nan, np.nan)
        elif dtype.startswith("complex"):
            total = complex(np.inf, self.members.size / 2)
            self.keeps(dtype, Reduction(ReduceOp.SUM, 0.5), complex(np.inf, 1), total)

    def keeps(self, dtype: str, reduction: Reduction, value: Any, result: Any) -> None:
        """What is no number at one member, whichever it is, and 1 (and 1j) at the others."""
        other = complex(1, 1) if dtype.startswith("complex") else 1
        for holder in range(self.members.size):
            array = np.full(3, value if holder == self.members.index else other).astype(
                numpy_dtype(dtype)
            )
            backend = self.backend("allreduce", dtype, reduction.reduce_op)
            backend.allreduce(self.members, [array], [array], reduction, quiet)
            wide = wide_dtype(array.dtype)
            np.testing.assert_array_equal(array.astype(wide), np.full(3, result).astype(wide))

    def inputs(self, dtype: str, sizes: Sequence[int]) -> list[Array]:
        """What this member gives."""
        return [part(dtype, size, salt, self.members.index) for salt, size in enumerate(sizes)]

    def allreduce(self, dtype: str, sizes: Sequence[int], reduction: Reduction) -> None:
        """In place for every other tensor."""
        inputs = self.inputs(dtype, sizes)
        outputs = [x if i % 2 else np.zeros_like(x) for i, x in enumerate(inputs)]
        wanted = totals(dtype, sizes, self.members.size, reduction)
        backend = self.backend("allreduce", dtype, reduction.reduce_op)
        backend.allreduce(self.members, inputs, outputs, reduction, quiet)
        compare(outputs, wanted)

    def reducescatter(self, dtype: str, sizes: Sequence[int], reduction: Reduction) -> None:
        """Uneven counts: member i gets the more, the greater i."""
        counts = [uneven(size, self.members.size) for size in sizes]
        me = self.members.index
        outputs = [np.zeros(c[me], numpy_dtype(dtype)) for c in counts]
        all_totals = totals(dtype, sizes, self.members.size, reduction)
        wanted = [
            total[sum(c[:me]) : sum(c[: me + 1])]
            for total, c in zip(all_totals, counts, strict=True)
        ]
        backend = self.backend("reducescatter", dtype, reduction.reduce_op)
        inputs = self.inputs(dtype, sizes)
        backend.reducescatter(self.members, inputs, outputs, counts, reduction, quiet)
        compare(outputs, wanted)

    def allgather(self, dtype: str, sizes: Sequence[int]) -> None:
        """Uneven counts."""
        counts = [uneven(size, self.members.size) for size in sizes]
        parts = [
            [values(10 * salt + i, count, dtype) for i, count in enumerate(c)]
            for salt, c in enumerate(counts)
        ]
        inputs = [each[self.members.index] for each in parts]
        outputs = [np.zeros(size, numpy_dtype(dtype)) for size in sizes]
        backend = self.backend("allgather", dtype)
        backend.allgather(self.members, inputs, outputs, counts, quiet)
        compare(outputs, [np.concatenate(each) for each in parts])

    def broadcast(self, dtype: str, size: int) -> None:
        """From the last member."""
        root = self.members.size - 1
        array = values(self.members.index, size, dtype)
        self.backend("broadcast", dtype).broadcast(self.members, [array], root, quiet)
        compare([array], [values(root, size, dtype)])

    def alltoall(self, dtype: str, size: int) -> None:
        """Every member sends different counts to every other."""
        me, group_size = self.members.index, self.members.size
        rows = [uneven(size, group_size)[i:] + uneven(size, group_size)[:i]
                for i in range(group_size)]  # fmt: skip
        sent = [values(i, size, dtype) for i in range(group_size)]
        wanted = [s[sum(row[:me]) : sum(row[: me + 1])] for s, row in zip(sent, rows, strict=True)]
        outputs: list[Array] = []

        def allocate(counts: list[int]) -> Array:
            assert counts == [row[me] for row in rows]
            outputs.append(np.zeros(sum(counts), numpy_dtype(dtype)))
            return outputs[-1]

        backend = self.backend("alltoall", dtype)
        backend.alltoall(self.members, sent[me], rows[me], allocate, quiet)
        compare(outputs, [np.concatenate(wanted)])


def uneven(size: int, parts: int) -> list[int]:
    """`size` in parts that grow; the first may be empty."""
    total = parts * (parts + 1) // 2
    counts = [size * (i + 1) // total for i in range(parts)]
    counts[-1] += size - sum(counts)
    return counts


def compare(outputs: Sequence[Array], wanted: Sequence[Array]) -> None:
    """Equal bit by bit, but for rounding of sums in another order."""
    for output, expected in zip(outputs, wanted, strict=True):
        assert output.dtype == expected.dtype
        if output.shape == expected.shape and output.tobytes() == expected.tobytes():
            continue
        if output.dtype.kind in "fcV" or output.dtype.name == "bfloat16":
            wide = np.complex128 if output.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(output.astype(wide), expected.astype(wide), rtol=1e-6)
        else:
            np.testing.assert_array_equal(output, expected)
