"""Which collectives run on devices: what all ranks can, as rank 0 orders it.

Each rank that has libraries tells rank 0 once what they run. When all have, rank 0 orders what all
can; until then everything is staged through the host, and so is what some rank lacks. All ranks
follow the order between the same two segments. This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.table import SPECS, reduction_of
from hvdlite.common.devices.collectives import COLLECTIVES, scales
from hvdlite.common.devices.interface import DeviceLibrary
from hvdlite.common.requests.messages import Request

# In the place of a method: an allreduce by reducescatter, the host's backends, and allgather.
IN_LAYERS = "allreduce_in_layers"
REDUCE_OPS = tuple(op for op in ReduceOp if op not in (ReduceOp.AVERAGE, ReduceOp.ADASUM))


def capabilities(
    libraries: Iterable[DeviceLibrary], dtypes: Iterable[str], *, in_layers: bool = False
) -> tuple[str, ...]:
    """Return what the libraries run, in words: "cuda NCCL allreduce float32 SUM".

    With `in_layers`, this rank wants allreduces of several hosts by layers.
    """
    found = []
    names = sorted(dtypes)
    methods = sorted({each.method for each in COLLECTIVES.values()})
    reduces = {each.method for name, each in COLLECTIVES.items() if SPECS[name].reduces}
    for library in libraries:
        for method in methods:
            ops: Sequence[ReduceOp | None] = REDUCE_OPS if method in reduces else (None,)
            found += [
                _words(library.device_kind, library.name, method, dtype, op)
                for dtype in names
                for op in ops
                if library.supports(method, dtype, op)
            ]
        found += [
            _words(library.device_kind, library.name, IN_LAYERS, dtype, op)
            for dtype in names
            for op in REDUCE_OPS
            if in_layers
            and library.supports("reducescatter", dtype, op)
            and library.supports("allgather", dtype, None)
        ]
    return tuple(found)


def _words(kind: str, library: str, method: str, dtype: str, op: ReduceOp | None) -> str:
    return " ".join((kind, library, method, dtype, "-" if op is None else op.name))


class Ballot:
    """The capabilities of all ranks, at rank 0."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._told: dict[int, tuple[str, ...]] = {}

    def receive(self, rank: int, runs: tuple[str, ...]) -> tuple[str, ...] | None:
        """Count what a rank has told; return what all ranks run, once all have told."""
        self._told[rank] = runs
        if len(self._told) < self._size:
            return None
        common = set.intersection(*map(set, self._told.values()))
        return tuple(each for each in self._told[0] if each in common)


class Agreement:
    """What rank 0 has ordered, as the engine and the threads that enqueue read it."""

    def __init__(self) -> None:
        # The kinds of devices whose tensors need not be copied to the host when they are enqueued.
        self.kinds: frozenset[str] = frozenset()
        # By kind, method, dtype and op: the name of the library.
        self._libraries: dict[tuple[str, str, str, str], str] = {}

    def follow(self, runs: Iterable[str]) -> None:
        """Obey the order of rank 0. The first library that runs something is the one for it."""
        libraries: dict[tuple[str, str, str, str], str] = {}
        for words in runs:
            kind, library, method, dtype, op = words.split(" ")
            libraries.setdefault((kind, method, dtype, op), library)
        self._libraries = libraries
        self.kinds = frozenset(key[0] for key in libraries)

    def library_for(self, request: Request) -> str | None:
        """Return the name of the library that runs a request; None if it is staged."""
        device_collective = COLLECTIVES.get(request.collective)
        if request.device not in self.kinds or device_collective is None:
            return None
        if SPECS[request.collective].reduces:
            factors = [request.prescale_factor, request.postscale_factor]
            if request.reduce_op == ReduceOp.AVERAGE:
                factors.append(0.5)  # It divides by the number of members.
            if not scales(request.dtype, factors):
                return None
        return self._library(request, device_collective.method)

    def in_layers(self, request: Request) -> bool:
        """Return whether the library of a request runs it in layers, if members can have these."""
        library = self.library_for(request)
        return (
            library is not None
            and COLLECTIVES[request.collective].in_layers
            and self._library(request, IN_LAYERS) == library
        )

    def _library(self, request: Request, method: str) -> str | None:
        op = "-"
        if SPECS[request.collective].reduces:
            op = reduction_of(request, 1).reduce_op.name
        return self._libraries.get((request.device, method, request.dtype, op))
