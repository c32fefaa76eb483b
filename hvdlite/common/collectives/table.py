"""The table of collectives: what ranks must agree on, what may be fused, and how it is run.

Negotiation, fusion, the cache, the choice of a backend and autotuning read the `CollectiveSpec`;
nothing above this package compares a collective's name with a string.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.lists import split_rows
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import (
    Activity,
    Backend,
    InPlace,
    Members,
    Operand,
    Reduction,
)
from hvdlite.common.requests.messages import Request, Response
from hvdlite.common.tensors.adapter import numpy_dtype

Array = NDArray[Any]


@dataclass(frozen=True)
class CollectiveRun:
    """Everything that one segment needs to run at one rank."""

    backend: Backend
    members: Members
    operands: Sequence[Operand]
    activity: Activity

    @property
    def reduction(self) -> Reduction:
        return reduction_of(self.operands[0].response.request, self.members.size)

    def result_shape(self, request: Request, rows: Sequence[int] = ()) -> tuple[int, ...]:
        return SPECS[request.collective].result_shape(request, self.members, rows)


def reduction_of(request: Request, members: int) -> Reduction:
    """Return how a tensor is reduced; Average is a sum that is scaled by 1 / `members`."""
    factors = request.prescale_factor, request.postscale_factor
    return _reduction(request.reduce_op, *factors, members)


@lru_cache(256)
def _reduction(reduce_op: int, prescale: float, postscale: float, members: int) -> Reduction:
    """Return the reduction of most tensors, which all have the same."""
    if reduce_op == ReduceOp.AVERAGE:
        return Reduction(ReduceOp.SUM, prescale, postscale / members)
    return Reduction(ReduceOp(reduce_op), prescale, postscale)


class Effect(Enum):
    """What an answer changes besides tensors."""

    NONE = auto()
    JOIN = auto()  # ranks that had joined take part again
    ADD_SET = auto()  # all the sets that ranks have named in `shape`: one, or each rank its own
    REMOVE_SET = auto()  # likewise, by `root_rank`
    FORM_SET = auto()  # a use of the set of the ranks that are `parties` begins
    RELEASE_SET = auto()  # a use of the set that is `root_rank` ends
    FIND_SENDER = auto()  # nothing: one of the messages that are awaited has been sent


@dataclass(frozen=True)
class CollectiveSpec:
    """A collective."""

    name: str
    agree: tuple[str, ...] = ()  # what all ranks must have alike, in the order of checking
    run: Callable[[CollectiveRun], None] | None = (
        None  # None: the negotiation itself is the collective
    )
    reduces: bool = False
    fusable: bool = False
    cacheable: bool = True
    varying_rows: bool = False  # the first dimension may differ between ranks
    scalars: bool = True  # a tensor without dimensions is possible
    splits: bool = False  # each rank says how many rows go to whom
    rooted: bool = False  # root_rank gives the data, or gets them
    scatters: bool = False  # each member gets its part of the rows
    effect: Effect = Effect.NONE
    served_as: str = ""  # the collective of which it takes the backend; "": its own
    # Ranks of one host that wait for it may exchange small data without the coordinator.
    short: bool = False
    carried: bool = False  # Small data may go inside requests: see carried.py.
    # It reduces the gradients of optimizers: they are split into segments, its speed is tuned, and
    # its backend has a setting of its own.
    carries_gradients: bool = False

    @property
    def backend_of(self) -> str:
        return self.served_as or self.name

    @property
    def changes_sets(self) -> bool:
        """Whether process sets come or go by it."""
        return self.effect not in (Effect.NONE, Effect.JOIN, Effect.FIND_SENDER)

    def result_elements(self, shape: tuple[int, ...], members: int, index: int) -> int | None:
        """Return how many elements the member at `index` gets; None where other ranks decide."""
        if self.varying_rows:
            return None
        if self.scatters:
            return split_rows(shape[0], members)[index] * math.prod(shape[1:])
        return math.prod(shape)

    def bytes(self, response: Response, itemsize: int) -> int:
        """Return the size of the tensor, summed over the members if their rows differ."""
        shape = response.request.shape
        if self.varying_rows:
            return sum(response.first_dims) * math.prod(shape[1:]) * itemsize
        return math.prod(shape) * itemsize

    def result_shape(
        self, request: Request, members: Members, rows: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the shape of the result; `rows` come from each member, if they may differ."""
        shape = request.shape
        if self.varying_rows:
            return sum(rows), *shape[1:]
        if self.scatters:
            return split_rows(shape[0], members.size)[members.index], *shape[1:]
        return shape


def _allreduce(run: CollectiveRun) -> None:
    dtype = numpy_dtype(run.operands[0].response.request.dtype)
    inputs: Sequence[Array] | None = InPlace.of(run.operands, dtype)
    outputs = inputs
    if inputs is None or outputs is None:
        inputs = [operand.input for operand in run.operands]
        outputs = [operand.output(operand.response.request.shape) for operand in run.operands]
    run.backend.allreduce(run.members, inputs, outputs, run.reduction, run.activity)


def _reducescatter(run: CollectiveRun) -> None:
    counts, outputs = [], []
    for operand in run.operands:
        request = operand.response.request
        rows, *rest = request.shape
        parts = split_rows(rows, run.members.size)
        counts.append([part * math.prod(rest) for part in parts])
        outputs.append(operand.output(run.result_shape(request)))
    inputs = [operand.input for operand in run.operands]
    run.backend.reducescatter(run.members, inputs, outputs, counts, run.reduction, run.activity)


def _reduce(run: CollectiveRun) -> None:
    """Reduce and scatter, with all parts for the root."""
    root = run.members.ranks.index(run.operands[0].response.request.root_rank)
    counts, outputs = [], []
    for operand in run.operands:
        shape = operand.response.request.shape
        elements = [0] * run.members.size
        elements[root] = math.prod(shape)
        counts.append(elements)
        is_root = root == run.members.index
        outputs.append(operand.output(shape) if is_root else operand.input[:0])
    inputs = [operand.input for operand in run.operands]
    run.backend.reducescatter(run.members, inputs, outputs, counts, run.reduction, run.activity)


def _point_to_point(run: CollectiveRun) -> None:
    """Broadcast among two: by memory inside a host, and by one message between hosts."""
    (operand,) = run.operands
    request = operand.response.request
    sender = run.members.ranks.index(request.root_rank)
    sends = sender == run.members.index
    array = operand.input if sends else operand.output(request.shape)
    run.backend.broadcast(run.members, [array], sender, run.activity)


def _allgather(run: CollectiveRun) -> None:
    counts, outputs = [], []
    for operand in run.operands:
        request, first_dims = operand.response.request, operand.response.first_dims
        counts.append([dim * math.prod(request.shape[1:]) for dim in first_dims])
        outputs.append(operand.output(run.result_shape(request, first_dims)))
    inputs = [operand.input for operand in run.operands]
    run.backend.allgather(run.members, inputs, outputs, counts, run.activity)


def _broadcast(run: CollectiveRun) -> None:
    root = run.members.ranks.index(run.operands[0].response.request.root_rank)
    outputs = [operand.output(operand.response.request.shape) for operand in run.operands]
    if root == run.members.index:
        for operand, output in zip(run.operands, outputs, strict=True):
            if output is not operand.input and not np.shares_memory(output, operand.input):
                np.copyto(output, operand.input)
    run.backend.broadcast(run.members, outputs, root, run.activity)


def _alltoall(run: CollectiveRun) -> None:
    (operand,) = run.operands
    request = operand.response.request
    row = math.prod(request.shape[1:])

    def allocate(counts: list[int]) -> Array:
        operand.received_splits = tuple(counts)
        return operand.output(run.result_shape(request, counts))

    if row == 0:  # Rows without elements: only their number is sent.
        received = np.empty(run.members.size, np.int64)
        run.backend.alltoall(
            run.members,
            np.array(operand.splits, np.int64),
            [1] * run.members.size,
            lambda counts: received,
            run.activity,
        )
        allocate(received.tolist())
        return
    run.backend.alltoall(
        run.members,
        operand.input,
        [split * row for split in operand.splits],
        lambda counts: allocate([count // row for count in counts]),
        run.activity,
    )


_SAME_TENSOR = ("dtype", "shape", "device")
_SAME_SEGMENT = ("settings", "group", "group_size", "fusion_bytes")
_SAME_SCALES = ("prescale_factor", "postscale_factor")

SPECS = {
    spec.name: spec
    for spec in (
        CollectiveSpec(
            "allreduce",
            agree=(*_SAME_TENSOR, "reduce_op", *_SAME_SCALES, *_SAME_SEGMENT),
            run=_allreduce,
            reduces=True,
            fusable=True,
            short=True,
            carried=True,
            carries_gradients=True,
        ),
        CollectiveSpec(
            "reducescatter",
            agree=(*_SAME_TENSOR, "reduce_op", *_SAME_SCALES, *_SAME_SEGMENT),
            run=_reducescatter,
            reduces=True,
            fusable=True,
            scatters=True,
            scalars=False,
            short=True,
        ),
        CollectiveSpec(
            "allgather",
            agree=("dtype", "trailing_shape", "device", *_SAME_SEGMENT),
            run=_allgather,
            fusable=True,
            varying_rows=True,
            scalars=False,
            short=True,
        ),
        CollectiveSpec(
            "broadcast",
            agree=(*_SAME_TENSOR, "root_rank", *_SAME_SEGMENT),
            run=_broadcast,
            fusable=True,
            rooted=True,
            short=True,
        ),
        CollectiveSpec(
            "alltoall",
            agree=("dtype", "trailing_shape", "device"),
            run=_alltoall,
            varying_rows=True,
            splits=True,
            scalars=False,
            short=True,
        ),
        CollectiveSpec(
            "reduce",
            agree=(*_SAME_TENSOR, "root_rank", "reduce_op", *_SAME_SCALES, *_SAME_SEGMENT),
            run=_reduce,
            reduces=True,
            fusable=True,
            rooted=True,
            served_as="reducescatter",
        ),
        CollectiveSpec(
            "point_to_point",
            agree=("sender", "dtype", "elements"),
            run=_point_to_point,
            cacheable=False,
            short=True,
            served_as="broadcast",
        ),
        CollectiveSpec("find_sender", cacheable=False, effect=Effect.FIND_SENDER),
        CollectiveSpec("barrier", cacheable=False, short=True),
        CollectiveSpec("join", cacheable=False, effect=Effect.JOIN),
        CollectiveSpec("init", agree=("settings",), cacheable=False),
        CollectiveSpec("split_process_set", cacheable=False, effect=Effect.ADD_SET),
        CollectiveSpec("unsplit_process_set", cacheable=False, effect=Effect.REMOVE_SET),
        CollectiveSpec("add_process_set", agree=("ranks",), cacheable=False, effect=Effect.ADD_SET),
        CollectiveSpec(
            "remove_process_set",
            agree=("process_set",),
            cacheable=False,
            effect=Effect.REMOVE_SET,
        ),
        CollectiveSpec("form_process_set", cacheable=False, effect=Effect.FORM_SET),
        CollectiveSpec("release_process_set", cacheable=False, effect=Effect.RELEASE_SET),
    )
}

_MEANING: dict[
    str, Callable[[Request], Any]
] = {  # what `agree` names that is not a field of Request by itself
    "trailing_shape": lambda request: request.shape[1:],
    "ranks": lambda request: list(request.shape),
    "sender": lambda request: request.root_rank,
    "elements": lambda request: math.prod(request.shape),
    "process_set": lambda request: request.root_rank,
    "reduce_op": lambda request: ReduceOp(request.reduce_op).name.capitalize(),
    "group": lambda request: request.group or "none",
    "settings": lambda request: request.settings or "none (gradients in no segments)",
    "fusion_bytes": lambda request: (
        f"{request.fusion_bytes} bytes" if request.fusion_bytes >= 0 else "none of its own"
    ),
}

_LABEL = {
    "dtype": "data type",
    "trailing_shape": "shape after the first dimension",
    "reduce_op": "reduction operation",
    "root_rank": "root rank",
    "elements": "number of elements",
    "prescale_factor": "prescale factor",
    "postscale_factor": "postscale factor",
    "group_size": "number of tensors in the group",
    "fusion_bytes": "the limit by set_comm_fusion",
}


# How the settings of an `init` begin that has failed on its rank, before the reason.
INIT_FAILED = "failed: "


def neutral_shape(request: Request) -> tuple[int, ...]:
    """Return the shape of what a rank gives that has joined: that of the tensor, or no rows."""
    if SPECS[request.collective].varying_rows:
        return (0, *request.shape[1:])
    return request.shape


def disagreement(first: tuple[int, Request], other: tuple[int, Request]) -> str:
    """Return why the requests of two ranks for one name disagree; '' if they agree.

    The text names the tensor, both ranks and both values.
    """
    (rank, request), (other_rank, other_request) = first, other
    if request.collective != other_request.collective:
        return (
            f"'{request.name}': ranks disagree on the operation: rank {rank} has "
            f"{_operation(request)}, rank {other_rank} has {_operation(other_request)}"
        )
    for number, each in (first, other):
        if each.collective == "init" and each.settings.startswith(INIT_FAILED):
            return f"init has failed on rank {number} by {each.settings.removeprefix(INIT_FAILED)}"
    for field in SPECS[request.collective].agree:
        value, other_value = _value(request, field), _value(other_request, field)
        if value != other_value:
            return (
                f"{request.collective} '{request.name}': ranks disagree on "
                f"{_LABEL.get(field, field)}: rank {rank} has {value}, "
                f"rank {other_rank} has {other_value}"
            )
    return ""


def _operation(request: Request) -> str:
    return request.collective + (f" ({request.settings})" if request.settings else "")


def _value(request: Request, field: str) -> Any:
    meaning = _MEANING.get(field)
    return meaning(request) if meaning else getattr(request, field)
