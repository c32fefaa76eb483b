"""Which backend runs a collective: the first of a list that says yes, unless the user chose one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.adasum import AdasumBackend
from hvdlite.common.collectives.base import (
    Activity,
    Array,
    Backend,
    BackendFactory,
    Members,
    Reduction,
)
from hvdlite.common.collectives.between_hosts.algorithms import ALGORITHMS, Choice
from hvdlite.common.collectives.between_hosts.ring import RingBackend
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.mpi import MpiBackend
from hvdlite.common.collectives.multi_host.backends import FlatBackend
from hvdlite.common.collectives.multi_host.hierarchical import HierarchicalBackend
from hvdlite.common.collectives.native.library import library
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.mpi import MpiTransport

# The backend of a single member: copy and scale.


class SingleBackend:
    """Every collective of a single member; nothing is sent."""

    name = "SINGLE"

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        return members.size == 1

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """Copy the only contribution, scaled."""
        if reduction.reduce_op == ReduceOp.ADASUM:  # of one vector: the vector
            reduction = Reduction(ReduceOp.SUM, reduction.prescale, reduction.postscale)
        with activity("SINGLE_REDUCE"):
            for source, output in zip(inputs, outputs, strict=True):
                Arithmetic(source.dtype, reduction).reduce([source], output)

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """Copy the whole tensors, scaled."""
        self.allreduce(members, inputs, outputs, reduction, activity)

    def allgather(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        activity: Activity,
    ) -> None:
        with activity("SINGLE_COPY"):
            for source, output in zip(inputs, outputs, strict=True):
                np.copyto(output, source)

    def broadcast(
        self, members: Members, arrays: Sequence[Array], root: int, activity: Activity
    ) -> None:
        """Nothing to do."""

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        with activity("SINGLE_COPY"):
            np.copyto(allocate(list(send_counts)), array[: send_counts[0]])


ALLREDUCE = "HVDLITE_ALLREDUCE"
ENTRY_POINTS = "hvdlite.backends"  # each is called with the transport and gives a Backend


@dataclass(frozen=True)
class _Wish:
    """The backend that a setting puts first.

    If it is `strict`, no other backend may take its place when members are on several hosts.
    """

    variable: str
    value: str
    backend: Backend
    strict: bool


class Backends(list[Backend]):
    """All backends in the order in which they are asked.

    Those in `first` are asked even before the backend that a setting wishes for: a single member
    and Adasum have one possible backend each, and backends of third parties come before ours.
    """

    def __init__(self, first: Iterable[Backend], rest: Iterable[Backend], choice: Choice) -> None:
        self.first = list(first)
        self.choice = choice  # Of the algorithm between hosts.
        super().__init__([*self.first, *rest])
        self.wishes: dict[bool, _Wish] = {}  # key: for what carries gradients

    def retune(self, allreduce: str, piece_bytes: int) -> None:
        """Change the backend of allreduce ("auto", "ring"; "" keeps it) and the size of pieces.

        All ranks call this between the same two collectives.
        """
        rings = [backend for backend in self if isinstance(backend, RingBackend)]
        for ring in rings:
            ring.piece_bytes = piece_bytes
        if allreduce:
            self.wishes.pop(True, None)
        if allreduce == "ring":
            self.wishes[True] = _Wish(ALLREDUCE, allreduce, rings[-1], False)


def build_backends(transport: Transport, config: Config) -> Backends:
    """All backends that can exist on `transport`, those of third parties first.

    Raises `ConfigError` when a setting wishes for one that cannot exist, and `HorovodInternalError`
    that names the entry point of one that cannot be loaded.
    """
    foreign: list[Backend] = []
    for point in installed_entry_points():
        try:
            factory: BackendFactory = point.load()
        except Exception as error:
            raise HorovodInternalError(
                f"the backend {point.name!r} ({point.value}) cannot be loaded: {error}"
            ) from error
        foreign.append(factory(transport))
    local_ranks = transport.topology.peers(transport.rank)
    native = library(
        "off" if len(local_ranks) == 1 else config.native,
        first_of_host=transport.rank == local_ranks[0],
    )
    shm = ShmBackend(transport, native)
    ring = RingBackend(transport)
    choice = Choice("ring" if config.allreduce == "hierarchical" else config.allreduce)
    mpi = MpiBackend(transport) if isinstance(transport, MpiTransport) else None
    hierarchical = HierarchicalBackend(transport, shm, choice=choice)
    ours: list[Backend] = [shm, hierarchical, FlatBackend(transport, choice), ring]
    backends = Backends([*foreign, SingleBackend(), AdasumBackend(transport, shm)], ours, choice)
    named: dict[str, Backend | None] = {backend.name.lower(): backend for backend in ours}
    named["mpi"] = mpi
    for is_allreduce, value in ((True, config.allreduce), (False, config.data_plane)):
        if value == "auto" or (value in ALGORITHMS and value not in named):
            continue  # The choice has the name of the algorithm.
        variable = ALLREDUCE if is_allreduce else "HVDLITE_DATA_PLANE"
        chosen = named[value]
        if chosen is not None:
            backends.wishes[is_allreduce] = _Wish(variable, value, chosen, value == "shm")
        elif transport.topology.size > 1:
            raise ConfigError(f"{variable}={value}: this job does not run over MPI")
    return backends


@cache
def installed_entry_points() -> tuple[EntryPoint, ...]:
    """Return the entry points of third parties' backends.

    They are read once: all packages are searched, which would be a third of the CPU time of a reset
    of an elastic job.
    """
    return tuple(entry_points(group=ENTRY_POINTS))


def choose(
    backends: Backends,
    collective: str,
    dtype: np.dtype[Any],
    reduce_op: ReduceOp,
    members: Members,
) -> Backend:
    """Return the backend that runs `collective` ("allreduce", ...) of `dtype` among `members`.

    Every member gets the same answer. A wish that means nothing here (hierarchical on one host, a
    dtype that MPI lacks) is passed over. Raises `HorovodInternalError` naming the variable when the
    wish was shared memory and the members are on several hosts.
    """
    wish = backends.wishes.get(SPECS[collective].carries_gradients)
    asked = list(backends)
    if wish is not None:
        asked.insert(len(backends.first), wish.backend)
        if wish.strict and len(members.topology.hosts) > 1 and reduce_op != ReduceOp.ADASUM:
            raise HorovodInternalError(
                f"{wish.variable}={wish.value} cannot run {collective}: its {members.size} members "
                f"are on {len(members.topology.hosts)} hosts; unset {wish.variable}, or set it to "
                f"auto or ring"
            )
    for backend in asked:
        if backend.supports(collective, dtype, reduce_op, members):
            return backend
    raise HorovodInternalError(
        f"no backend runs {collective} of {dtype} with {reduce_op.name} "
        f"among {members.size} members; asked: {', '.join(backend.name for backend in asked)}"
    )
