"""Gradients on their way between ranks, from the hook that backward calls to the optimizer's step.

backward -> hook -> Schedule.count -> gather     a bucket that is complete waits for a few others,
                    -> send                      since to send one costs as much as to send ten
step -> synchronize -> send what is missing      zeros stand in for a gradient that is not there
                    -> land                      results are written back to ``p.grad``
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from hvdlite.common.api.options import Options
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import ReductionConfig, Schedule
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.plain.compression import Compressor
from hvdlite.torch import mpi_ops
from hvdlite.torch.compression import BF16Compressor, CastCompressor, FP16Compressor
from hvdlite.torch.flat_gradients import FlatGradients
from hvdlite.torch.segment_schedule import Cuts, ParamGroups
from hvdlite.torch.sparsity import Layouts

T = TypeVar("T")
ENOUGH_BYTES = 4 << 20  # of gradients, to be sent in the middle of backward

# What only casts needs neither new memory nor `decompress`; a subclass may do anything.
CASTS: tuple[type[CastCompressor], ...] = (FP16Compressor, BF16Compressor)


class _Passenger:
    """One gradient that is complete: it waits for others, and then travels."""

    __slots__ = ("context", "gradient", "name", "packed", "parameter", "version")

    packed: torch.Tensor  # what travels; `gradient` itself where nothing makes it smaller
    context: Any  # what `decompress` needs

    def __init__(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.gradient = gradient
        self.version = gradient._version  # when it was complete

    def move_to(self, flat: FlatGradients) -> None:
        """Let the gradient live in a segment's buffer."""
        if self.gradient.is_sparse:  # and is to travel as a dense one
            self.parameter.grad = self.gradient.to_dense()
        self.gradient = flat.take(self.parameter)
        self.version = self.gradient._version

    def check(self) -> None:
        """Raise `RuntimeError` when something has changed the gradient since it was complete."""
        now = self.parameter.grad
        if now is None or (now is self.gradient and now._version == self.version):
            return
        raise RuntimeError(
            f"the gradient of {self.name} was changed after it was sent to the other ranks, by "
            "clipping or unscaling perhaps. Call optimizer.synchronize() first, then change "
            "gradients, and call step() inside 'with optimizer.skip_synchronize():'"
        )


def _size_bytes(passenger: _Passenger) -> int:
    gradient = passenger.gradient
    return gradient.numel() * gradient.element_size()  # of a sparse one: as if it were dense


def _arrive(passengers: Sequence[_Passenger], wait: Callable[[], T]) -> T:
    """What `wait` returns; it is called in any case, and then what is wrong with one is raised."""
    try:
        for each in passengers:
            each.check()
    finally:
        result = wait()
    return result


class _DenseFlight:
    """A bucket in flight."""

    def __init__(
        self,
        passengers: Sequence[_Passenger],
        compression: type[Compressor],
        options: Options,
    ) -> None:
        self._passengers = passengers
        self._compression = compression
        packed = [each.packed for each in passengers]
        self._operation = mpi_ops.runner.start(
            "allreduce", packed, passengers[0].name, options, in_place=True
        )

    def land(self) -> None:
        """Wait, and write the results to the gradients."""
        _arrive(self._passengers, self._operation.take)
        for each in self._passengers:
            self._unpack(each)

    def _unpack(self, passenger: _Passenger) -> None:
        result, gradient = passenger.packed, passenger.gradient
        if gradient.is_sparse or self._compression not in CASTS:
            result = self._compression.decompress(result, passenger.context)
        if gradient.is_sparse:
            gradient = result.to_sparse(gradient.sparse_dim())
        elif result is not gradient:
            gradient.copy_(result)
        passenger.parameter.grad = gradient


class _FlatFlight:
    """A segment in flight whose gradients live in one buffer."""

    def __init__(
        self,
        passengers: Sequence[_Passenger],
        flat: FlatGradients,
        packed: torch.Tensor,
        options: Options,
    ) -> None:
        self._passengers = passengers
        self._buffer = flat.buffer
        self._packed = packed
        self._operation = mpi_ops.runner.start(
            "allreduce", [packed], passengers[0].name, options, in_place=True
        )

    def land(self) -> None:
        """Wait; the results are where the gradients are, unless they were compressed."""
        _arrive(self._passengers, self._operation.take)
        if self._packed is not self._buffer:
            self._buffer.copy_(self._packed)
        for each in self._passengers:
            each.parameter.grad = each.gradient


class _SparseFlight:
    """One sparse gradient in flight."""

    def __init__(self, passenger: _Passenger, reduction: ReductionConfig) -> None:
        self._passenger = passenger
        self._wait = mpi_ops.sparse_allreduce_async(
            passenger.gradient, passenger.name, reduction.scaling.op, reduction.process_set
        )

    def land(self) -> None:
        """Wait, and replace the gradient."""
        self._passenger.parameter.grad = _arrive([self._passenger], self._wait)


class GradientExchange:
    """The gradients of one optimizer."""

    def __init__(
        self,
        param_groups: ParamGroups,
        names: dict[torch.Tensor, str],
        schedule: Schedule[str],
        reduction: ReductionConfig,
        segments: SegmentPlan,
    ) -> None:
        self.names = names
        self.reduction = reduction
        self._segments = segments
        self.synchronized = False  # no gradient has come since the last synchronize()
        self.param_groups = param_groups
        self._schedule = schedule
        label = next(iter(names.values()), "")  # the same on all ranks
        self._layouts = Layouts(reduction.process_set, label)
        self.cuts = Cuts(names, schedule, self._layouts, reduction, segments)
        self._flights: list[_DenseFlight | _FlatFlight | _SparseFlight] = []
        self._gathered: list[list[_Passenger]] = []  # buckets that wait to be sent
        self._gathered_bytes = 0
        self._packed: dict[str, torch.Tensor] = {}  # memory of casts, for the next step
        self._watched: set[torch.Tensor] = set()
        if reduction.active:
            self.watch()

    @property
    def pending(self) -> bool:
        """Whether gradients travel."""
        return bool(self._flights or self._gathered)

    @property
    def passes(self) -> int:
        """How many backward passes accumulate before a gradient travels."""
        return self._schedule.passes

    @property
    def has_gradients(self) -> bool:
        """Whether a step would apply anything."""
        return any(parameter.grad is not None for parameter, _ in self._parameters())

    def watch(self) -> None:
        """Be told of every gradient, also of parameters that have come since the last call."""
        for parameter, default_name in self._parameters():
            if parameter not in self.names:
                self.names[parameter] = default_name
                self.cuts.parameter_of[default_name] = parameter
                self._schedule.add(default_name)
            if parameter.requires_grad and parameter not in self._watched:
                self._watched.add(parameter)
                register: Any = parameter.register_post_accumulate_grad_hook
                weakref.finalize(self, register(_weak(self._on_gradient)).remove)

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        return named_by_position(self.param_groups)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Backward has added to the gradient of `parameter`. The thread that runs backward."""
        self.synchronized = False
        name = self.names[parameter]
        cut = self._segments.strategy is not None
        if cut:
            self.cuts.note(name)
        bucket = self._schedule.count(name)
        if bucket:
            self._gather(bucket)
            if cut or self._gathered_bytes >= ENOUGH_BYTES:
                self._send()

    def _gather(self, bucket: Sequence[str]) -> None:
        passengers = [self._passenger(name) for name in bucket]
        self._gathered.append(passengers)
        self._gathered_bytes += sum(map(_size_bytes, passengers))

    def _send(self) -> None:
        """Let all that has gathered travel."""
        self._gathered_bytes = 0
        while self._gathered:  # where one is refused, the others are still there
            self._take_off(self._gathered.pop(0))

    def _take_off(self, bucket: Sequence[_Passenger]) -> None:
        flat = (self.cuts.flat or {}).get(bucket[0].name)
        if flat is not None and len(bucket) == len(flat.parameters):
            self._take_off_flat(bucket, flat)
            return
        for each in bucket:
            self._pack(each)
        dense = [each for each in bucket if not each.packed.is_sparse]
        if dense:
            options = self._segments.options([each.name for each in dense])
            self._flights.append(_DenseFlight(dense, self.reduction.compression, options))
        for each in bucket:
            if each.packed.is_sparse:
                self._flights.append(_SparseFlight(each, self.reduction))

    def _take_off_flat(self, bucket: Sequence[_Passenger], flat: FlatGradients) -> None:
        for each in bucket:
            each.move_to(flat)
        first = bucket[0].name
        packed = flat.buffer
        compression = self.reduction.compression
        if compression in CASTS:
            packed = compression.compress_into(self._packed.get(first), packed)
            if packed is not flat.buffer:
                self._packed[first] = packed
        options = self._segments.options([first])
        self._flights.append(_FlatFlight(bucket, flat, packed, options))

    def _pack(self, passenger: _Passenger) -> None:
        packed = passenger.gradient
        passenger.context = None
        if packed.is_sparse and self.reduction.sparse_as_dense:
            packed = packed.to_dense()
        compression = self.reduction.compression
        if compression in CASTS and not passenger.gradient.is_sparse:
            packed = compression.compress_into(self._packed.get(passenger.name), packed)
            if packed is not passenger.gradient:
                self._packed[passenger.name] = packed
        elif not packed.is_sparse:
            packed, passenger.context = compression.compress(packed)
        passenger.packed = packed

    def _passenger(self, name: str) -> _Passenger:
        parameter = self.cuts.parameter_of[name]
        if parameter.grad is None:
            parameter.grad = self._layouts.zeros(name, parameter)
        gradient = parameter.grad
        if gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {name} has a graph of its own (create_graph=True); "
                "such gradients cannot be reduced in place"
            )
        return _Passenger(name, parameter, gradient)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Send what backward has not sent, wait for everything, and write it to ``p.grad``.

        Raises `HorovodInternalError` when a reduction failed, and `RuntimeError` for a gradient
        that was changed while it travelled; all have ended then.
        """
        self._segments.settle()
        if self.reduction.active:
            self.watch()
            gradients = {
                self.names[each]: each.grad
                for each, _ in self._parameters()
                if each.requires_grad or each.grad is not None
            }
            known = self.cuts.agree(gradients)
            for bucket in self._schedule.rest(known):
                self._gather(bucket)
            refused: list[Exception] = []
            while self._gathered:  # other ranks wait for what can be sent
                try:
                    self._send()
                except Exception as failure:
                    refused.append(failure)
            failures = self._land()
            of_all = [each for each in failures if isinstance(each, HorovodInternalError)]
            # Of what is wrong with the results of this rank alone others do not know: they go on.
            if not refused and not of_all:
                self.cuts.adapt(known, self.param_groups)
            failures = [*of_all, *refused, *failures]
            if failures:
                raise failures[0]
        elif self._segments.as_views:
            self.cuts.live_alone(self.param_groups)
        self.synchronized = True

    def _land(self) -> list[Exception]:
        """Wait for all that flies; what went wrong."""
        flights = self._flights
        failures: list[Exception] = []
        self.reset()
        for flight in flights:
            try:
                flight.land()
            except Exception as failure:
                failures.append(failure)
        return failures

    def reset(self, backward_passes_per_step: int | None = None) -> None:
        """Forget what travels, and count backward passes from the beginning."""
        self._flights, self._gathered, self._gathered_bytes = [], [], 0
        self.synchronized = False
        self._schedule.reset(backward_passes_per_step)

    def restart_count(self) -> None:
        """The gradients were thrown away before they were complete."""
        if not self.pending:
            self._schedule.reset()

    def share_loss(self, loss: Any) -> Any:
        """The loss of all ranks together, for an optimizer that decides by it."""
        if not self.reduction.active or self.reduction.scaling.op not in (
            ReduceOp.AVERAGE,
            ReduceOp.SUM,
        ):
            return loss
        local = torch.as_tensor(loss, dtype=torch.float64).detach().cpu()
        return mpi_ops.allreduce(
            local,
            name="closure.loss",
            op=self.reduction.scaling.op,
            process_set=self.reduction.process_set,
        )


def named_by_position(param_groups: ParamGroups) -> Iterator[tuple[torch.Tensor, str]]:
    """All parameters, each with the name it has when it is given none."""
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            yield parameter, f"allreduce.noname.{number}.{index}"


def _weak(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the owner of `method` alive."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    return hook
