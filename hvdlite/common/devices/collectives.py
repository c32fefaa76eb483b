"""The collectives on device memory: pack, call the library, unpack; see collectives/table.py.

    sources --copy, scale--> fusion buffer --library--> fusion buffer --scale, copy--> outputs

A segment of one tensor needs no fusion buffer where the library can read and write the tensor
itself. Parts of unequal sizes are padded to the largest, as libraries know equal parts only.
Nothing here waits for the device: all work is queued on the communication stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.common.base.lists import split_rows
from hvdlite.common.collectives.base import Members, Reduction
from hvdlite.common.collectives.kernels import neutral_value
from hvdlite.common.collectives.table import SPECS, neutral_shape
from hvdlite.common.devices.interface import Buffer, Communicator, Context, DeviceOutput, Stream
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Response


class EntryOperand:
    """A tensor that this rank has."""

    def __init__(self, entry: Entry, outputs: list[DeviceOutput]) -> None:
        self._entry = entry
        self._outputs = outputs
        self.response = entry.response
        self.splits = entry.splits

    @property
    def received_splits(self) -> tuple[int, ...]:
        return self._entry.received_splits

    @received_splits.setter
    def received_splits(self, splits: tuple[int, ...]) -> None:
        self._entry.received_splits = splits

    @property
    def source(self) -> Buffer:
        """The input, flat."""
        assert self._entry.device_input is not None
        return self._entry.device_input.buffer

    def target(self, shape: tuple[int, ...]) -> Buffer:
        """Return the output of this shape, flat; may be the input's memory."""
        output: DeviceOutput = self._entry.device_output(shape)
        self._outputs.append(output)
        return output.buffer


class JoinedOperand:
    """A tensor that this rank does not have, as it has joined: neutral data."""

    received_splits: tuple[int, ...] = ()

    def __init__(self, response: Response, context: Context, stream: Stream, members: int) -> None:
        self.response = response
        self.splits = (0,) * members
        self._context = context
        self._stream = stream

    @property
    def source(self) -> Buffer:
        request = self.response.request
        value = neutral_value(request)
        buffer = self._context.empty(math.prod(neutral_shape(request)), request.dtype)
        self._context.run(self._stream, lambda: self._context.fill(buffer, value))
        return buffer

    def target(self, shape: tuple[int, ...]) -> Buffer:
        return self._context.empty(math.prod(shape), self.response.request.dtype)


DeviceOperand = EntryOperand | JoinedOperand  # One tensor of a segment at one rank.


@dataclass(frozen=True)
class DeviceRun:
    """Everything that one segment needs to run on the device of one rank."""

    context: Context
    communicator: Communicator
    stream: Stream
    members: Members
    operands: Sequence[DeviceOperand]
    reduction: Reduction
    # Returns so many elements of the fusion buffer with this name, of the dtype of the segment.
    buffer: Callable[[str, int], Buffer]
    # Sends a count to each member and returns theirs, by way of the host.
    exchange_counts: Callable[[Sequence[int]], list[int]]

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply all elements, unless by 1."""
        if factor != 1:
            self.context.scale(buffer, factor)

    def copy(self, targets: Sequence[Buffer], sources: Sequence[Buffer]) -> None:
        pairs = [
            (target, source)
            for target, source in zip(targets, sources, strict=True)
            if target.numel() and target.data_ptr() != source.data_ptr()
        ]
        if pairs:
            self.context.copy([target for target, _ in pairs], [source for _, source in pairs])


Work = Callable[[], None]


def _allreduce(run: DeviceRun) -> Work:
    """Reduce in the output itself, or in one fusion buffer for several tensors."""
    sources = [operand.source for operand in run.operands]
    targets = [operand.target(operand.response.request.shape) for operand in run.operands]
    whole, parts = fused(run, targets)

    def work() -> None:
        run.copy(parts, sources)
        run.scale(whole, run.reduction.prescale)
        run.communicator.allreduce(whole, whole, run.reduction.reduce_op, run.stream)
        run.scale(whole, run.reduction.postscale)
        run.copy(targets, parts)

    return work


def _reduce(run: DeviceRun) -> Work:
    root = _root(run)
    sources = [operand.source for operand in run.operands]
    targets: list[Buffer] = []
    if root == run.members.index:
        targets = [operand.target(operand.response.request.shape) for operand in run.operands]
    whole, parts = _packed(run, "in", [source.numel() for source in sources])

    def work() -> None:
        run.copy(parts, sources)
        run.scale(whole, run.reduction.prescale)
        run.communicator.reduce(whole, whole, run.reduction.reduce_op, root, run.stream)
        if targets:
            run.scale(whole, run.reduction.postscale)
            run.copy(targets, parts)

    return work


def _broadcast(run: DeviceRun) -> Work:
    root = _root(run)
    gives = root == run.members.index
    sources = [operand.source for operand in run.operands] if gives else []
    targets = [operand.target(operand.response.request.shape) for operand in run.operands]
    whole, parts = fused(run, targets)

    def work() -> None:
        if gives:
            run.copy(parts, sources)
        run.communicator.broadcast(whole, root, run.stream)
        run.copy(targets, parts)

    return work


def _point_to_point(run: DeviceRun) -> Work:
    """Broadcast among two: the sender needs no output."""
    (operand,) = run.operands
    root = _root(run)
    gives = root == run.members.index
    buffer = operand.source if gives else operand.target(operand.response.request.shape)
    return lambda: run.communicator.broadcast(buffer, root, run.stream)


def _allgather(run: DeviceRun) -> Work:
    """Gather what each member has of all tensors, in parts as large as the largest."""
    counts, shapes = [], []
    for operand in run.operands:
        request, first_dims = operand.response.request, operand.response.first_dims
        counts.append([rows * math.prod(request.shape[1:]) for rows in first_dims])
        shapes.append(SPECS[request.collective].result_shape(request, run.members, first_dims))
    totals = [sum(of_tensor) for of_tensor in zip(*counts, strict=True)]
    most = max(totals)
    sources = [operand.source for operand in run.operands]
    targets = [operand.target(shape) for operand, shape in zip(run.operands, shapes, strict=True)]
    if len(targets) == 1 and min(totals) == most:
        source, target = sources[0], targets[0]
        return lambda: run.communicator.allgather(source, target, run.stream)
    mine, places = _packed(run, "in", [source.numel() for source in sources], most)
    theirs = run.buffer("out", most * run.members.size)
    received, wanted = _columns(theirs, most, counts), _pieces(targets, counts)

    def work() -> None:
        run.copy(places, sources)
        run.communicator.allgather(mine, theirs, run.stream)
        run.copy(wanted, received)

    return work


def _reducescatter(run: DeviceRun) -> Work:
    """Give each member its rows of all tensors, in parts as large as the largest."""
    counts, targets = [], []
    for operand in run.operands:
        request = operand.response.request
        rows, *rest = request.shape
        counts.append([part * math.prod(rest) for part in split_rows(rows, run.members.size)])
        shape = SPECS[request.collective].result_shape(request, run.members, ())
        targets.append(operand.target(shape))
    totals = [sum(of_tensor) for of_tensor in zip(*counts, strict=True)]
    most = max(totals)
    sources = [operand.source for operand in run.operands]
    whole = run.buffer("in", most * run.members.size)
    mine, places = _packed(run, "out", [target.numel() for target in targets], most)
    given, sent = _columns(whole, most, counts), _pieces(sources, counts)

    def work() -> None:
        run.copy(given, sent)
        run.scale(whole, run.reduction.prescale)
        op = run.reduction.reduce_op
        run.communicator.reducescatter(whole, mine, op, run.stream)
        run.scale(mine, run.reduction.postscale)
        run.copy(targets, places)

    return work


def _alltoall(run: DeviceRun) -> Work:
    """Tell the counts by way of the host, then send the rows."""
    (operand,) = run.operands
    request = operand.response.request
    row = math.prod(request.shape[1:])
    rows = run.exchange_counts(operand.splits)
    operand.received_splits = tuple(rows)
    source = operand.source
    target = operand.target(SPECS[request.collective].result_shape(request, run.members, rows))
    sent, received = [count * row for count in operand.splits], [count * row for count in rows]
    if not row:
        return lambda: None
    return lambda: run.communicator.alltoall(source, sent, target, received, run.stream)


def _root(run: DeviceRun) -> int:
    """Return the position of the root among the members."""
    return run.members.ranks.index(run.operands[0].response.request.root_rank)


def fused(
    run: DeviceRun, targets: Sequence[Buffer], room: int = 0
) -> tuple[Buffer, Sequence[Buffer]]:
    """Return memory of `room` elements or more that is exchanged, and its part for each tensor."""
    if len(targets) == 1 and targets[0].numel() >= room:
        return targets[0], targets
    return _packed(run, "in", [target.numel() for target in targets], room)


def _packed(
    run: DeviceRun, name: str, sizes: Sequence[int], room: int = 0
) -> tuple[Buffer, list[Buffer]]:
    """Return a fusion buffer of `room` elements or more, and its parts of these sizes."""
    whole = run.buffer(name, max(room, sum(sizes)))
    return whole, _cut(whole, sizes)


def _cut(whole: Buffer, sizes: Sequence[int], start: int = 0) -> list[Buffer]:
    parts = []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += size
    return parts


def _columns(whole: Buffer, most: int, counts: Sequence[Sequence[int]]) -> list[Buffer]:
    """Return the parts of a buffer by member and tensor; each member has `most` elements."""
    by_member = zip(*counts, strict=True)
    return [
        part for index, sizes in enumerate(by_member) for part in _cut(whole, sizes, index * most)
    ]


def _pieces(tensors: Sequence[Buffer], counts: Sequence[Sequence[int]]) -> list[Buffer]:
    """Return the parts of tensors that belong to members, in the order of `_columns`."""
    by_tensor = [_cut(tensor, sizes) for tensor, sizes in zip(tensors, counts, strict=True)]
    return [part for of_member in zip(*by_tensor, strict=True) for part in of_member]


@dataclass(frozen=True)
class DeviceCollective:
    """How a collective of the table runs on a device."""

    prepare: Callable[[DeviceRun], Work]  # Allocates; returns what is queued on the stream.
    method: str  # Of `Communicator`; libraries are asked whether they support it.
    in_layers: bool = False  # Of several hosts: it may run inside hosts, and then between them.


COLLECTIVES: dict[str, DeviceCollective] = {
    "allreduce": DeviceCollective(_allreduce, "allreduce", in_layers=True),
    "reduce": DeviceCollective(_reduce, "reduce"),
    "broadcast": DeviceCollective(_broadcast, "broadcast"),
    "point_to_point": DeviceCollective(_point_to_point, "broadcast"),
    "allgather": DeviceCollective(_allgather, "allgather"),
    "reducescatter": DeviceCollective(_reducescatter, "reducescatter"),
    "alltoall": DeviceCollective(_alltoall, "alltoall"),
}


def scales(dtype: str, factors: Sequence[float]) -> bool:
    """Return whether a device multiplies a dtype as the host does: no integers, which truncate."""
    return all(factor == 1 for factor in factors) or dtype.startswith(("float", "bfloat"))


def nothing_to_move(run: DeviceRun) -> bool:
    """Return whether no tensor of a segment has elements, at any member."""
    for operand in run.operands:
        shape, first_dims = operand.response.request.shape, operand.response.first_dims
        rows: Any = (sum(first_dims),) if first_dims else shape[:1]
        if math.prod((*rows, *shape[1:])):
            return False
    return True
