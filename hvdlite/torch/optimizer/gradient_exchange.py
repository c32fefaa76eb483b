"""The exchange of one optimizer's gradients, from the hooks of backward to the optimizer's step.

backward -> hook -> BucketSchedule.count -> gather   a complete bucket becomes pending
                    -> send                          when 4 MiB are pending, or a segment is due
step -> synchronize -> send                          the rest; zeros where a gradient is missing
                    -> wait                          results are written to ``p.grad``
"""

from __future__ import annotations

import itertools
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdlite.common.api.prepared_bucket import send_announced
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.freed_memory import keep_freed_memory
from hvdlite.common.base.topology import Topology
from hvdlite.common.gradients.buckets import (
    ENOUGH_BYTES,
    BucketSchedule,
    ReductionConfig,
    enough_bytes,
)
from hvdlite.common.gradients.segment_plan import SegmentPlan
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.tensors.compression import FeedbackCompressor
from hvdlite.torch.compression import Compression
from hvdlite.torch.optimizer.feedback import Feedback, FeedbackInFlight, packed_for
from hvdlite.torch.optimizer.in_flight import (
    CASTS,
    BucketInFlight,
    InFlight,
    PendingGradient,
    SegmentInFlight,
    SparseGradientInFlight,
)
from hvdlite.torch.optimizer.segment_schedule import ParamGroups, SegmentSchedule
from hvdlite.torch.optimizer.sparsity import Layouts

# [Note: why gradients gather twice]
#
# Tensors gather in two places before anything is negotiated.
#
# 1. Here, in the training thread: complete buckets are kept until they have `ENOUGH_BYTES`, or
#    until `synchronize`. A hook runs in the middle of backward, when nothing of the engine is in
#    the processor's caches: to enqueue a gradient there takes 100 us, at the end of backward 10 us.
#    The last ones wait for the step, also when all are complete: a backward that no step follows,
#    on a rank that is interrupted, should leave nothing behind that other ranks have counted.
# 2. In `engine/inbox.py`: the engine starts a round a cycle time after the first tensor, or at
#    once when somebody waits, or enough bytes are queued and the engine has a core of its own.
#    Where it has none, it also waits while further tensors follow, for five cycle times at most.
#    A round costs about as much for a hundred tensors as for one, and not every tensor is a
#    gradient of an optimizer.
#
# `ENOUGH_BYTES` (common/gradients/buckets.py) is reduced in about a millisecond, so little is left
# to wait for at the end. Where the ranks of the only host take all of its cores to compute, the
# engine has none of its own: its work is hidden behind nothing, and each round interrupts backward,
# so that rounds are fewer. Gradients on an accelerator gather 25 MiB: each of its collectives costs
# a launch on all ranks. The measurements are in docs/decisions/0006. Buckets of a segmentation
# do not gather here: they are what the user, or the tuner, wants to be sent at once.


class Exchange:
    """What an optimizer's exchange knows of its gradients, whether or not its state is whole."""

    param_groups: ParamGroups
    _synchronized = False

    @property
    def has_gradients(self) -> bool:
        """Whether a step would apply anything."""
        return any(
            parameter.grad is not None
            for group in self.param_groups
            for parameter in group["params"]
        )

    @property
    def synchronized(self) -> bool:
        """Whether the gradients are reduced ones.

        It is set by a synchronize() that succeeds, until the next gradient, zero or the step. Where
        no gradient is left, that step was skipped, and other ranks may have new ones by now.
        """
        return self._synchronized and self.has_gradients

    @synchronized.setter
    def synchronized(self, synchronized: bool) -> None:
        self._synchronized = synchronized

    def on_gradient(self, name: str) -> None:
        """Take note that backward has added to this gradient."""
        self._synchronized = False

    def hook(self, parameter: torch.Tensor, name: str) -> weakref.finalize[Any, Any]:
        """Call `on_gradient` for a parameter; return what ends it, as the end of the exchange does.

        The parameter does not keep the exchange alive.
        """
        reference = weakref.ref(self)

        def note(parameter: torch.Tensor) -> None:
            exchange = reference()
            if exchange is not None:
                exchange.on_gradient(name)

        register: Any = parameter.register_post_accumulate_grad_hook
        return weakref.finalize(self, register(note).remove)


class GradientExchange(Exchange):
    """The exchange of one optimizer. Its methods run in the threads of training and backward."""

    def __init__(
        self,
        param_groups: ParamGroups,
        names: dict[torch.Tensor, str],
        schedule: BucketSchedule[str],
        reduction: ReductionConfig,
        segments: SegmentPlan,
    ) -> None:
        """Register the hooks, unless this rank is alone.

        `names` grows when parameters are added to the optimizer.
        """
        self.names, self.reduction, self._segments = names, reduction, segments
        self.param_groups = param_groups
        self._schedule = schedule
        label = next(iter(names.values()), "")  # This is the same on all ranks.
        self._layouts = Layouts(reduction, label)
        self._label = label
        compressor = reduction.compression
        self.feedback = (
            Feedback(compressor, reduction) if isinstance(compressor, FeedbackCompressor) else None
        )
        self.segment_schedule = SegmentSchedule(names, schedule, self._layouts, reduction, segments)
        self._in_flight: list[InFlight | FeedbackInFlight] = []
        self._pending: list[list[PendingGradient]] = []  # buckets, in the order of completion
        self._pending_bytes = 0
        # How many bytes are enough, and the job for which that was found.
        self._enough_bytes = ENOUGH_BYTES
        self._topology: Topology | None = None
        # True while the last gradients are sent: the training thread waits for them next.
        self._waits_next = False
        # Results of casts by name: their memory is used again in the next step.
        self._packed: dict[str, torch.Tensor] = {}
        # The hook of each parameter that is trained, until it leaves the groups.
        self._hooked: dict[torch.Tensor, weakref.finalize[Any, Any]] = {}
        # Called when a gradient is there. Hooks of their own would cost more than what they do.
        self.listeners: tuple[Callable[[], None], ...] = ()
        # Called when a step asks for the gradients of all ranks.
        self.before_waiting: tuple[Callable[[], None], ...] = ()
        # The gradients by name; each object serves all steps.
        self._gradients: dict[str, PendingGradient] = {}
        # The parameters, whether each is trained, and their names, as `watch` has seen them last.
        self._seen: list[torch.Tensor] = []
        self._trained: list[bool] = []
        self._seen_names: list[str] = []
        if reduction.active:
            self.watch()

    @property
    def busy(self) -> bool:
        """Whether gradients are pending or in flight."""
        return bool(self._in_flight or self._pending)

    @property
    def hooks_all(self) -> bool:
        """Whether each parameter that is trained has a hook: not where this rank is alone."""
        return bool(self._hooked)

    @property
    def passes(self) -> int:
        """The number of backward passes that accumulate before a gradient is sent."""
        return self._schedule.passes

    def watch(self) -> None:
        """Register the hooks of new parameters, and remove those of others than the optimizer has.

        Parameters that have left the groups keep their names, as they may come back.
        """
        parameters = [each for group in self.param_groups for each in group["params"]]
        trained = [parameter.requires_grad for parameter in parameters]
        if trained == self._trained and all(map(operator.is_, parameters, self._seen)):
            return
        for parameter in name_new(self.param_groups, self.names):
            name = self.names[parameter]
            self.segment_schedule.parameter_of[name] = parameter
            self._schedule.add(name)
        for parameter in self._hooked.keys() - set(parameters):
            self._hooked.pop(parameter)()
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = self.hook(parameter, self.names[parameter])
        self._seen, self._trained = parameters, trained
        self._seen_names = [self.names[parameter] for parameter in parameters]

    def on_gradient(self, name: str) -> None:
        """Count a pass that has added to this gradient. Runs in the thread of backward."""
        self._synchronized = False
        for listen in self.listeners:
            listen()
        segmented = self._segments.strategy is not None
        if segmented:
            self.segment_schedule.note(name)
        bucket = self._schedule.count(name)
        if bucket:
            self._gather(bucket)
            # What ranks do not agree on yet, in the first step of an era, waits for its end.
            begun = self.feedback is None or self.feedback.state.begun
            if begun and segmented:
                # The last one is not sent where it is small: the step exchanges it.
                self._waits_next = self._schedule.is_last(len(self._hooked))
                try:
                    self._send()
                except BaseException:  # A KeyboardInterrupt: the other ranks need what was started.
                    send_announced(for_collective())
                    raise
                finally:
                    self._waits_next = False
            elif begun and self._pending_bytes >= self._enough_bytes:
                self._send()

    def _gather(self, bucket: Sequence[str]) -> None:
        gathered, size_bytes = [], 0
        for name in bucket:
            parameter = self.segment_schedule.parameter_of[name]
            if parameter.grad is None:
                parameter.grad = self._layouts.zeros(name, parameter)
            gradient = parameter.grad
            if gradient.requires_grad:
                raise AssertionError(
                    f"the gradient of {name} has a graph of its own (create_graph=True); "
                    "such gradients cannot be reduced in place"
                )
            pending = self._gradients.get(name)
            if pending is None:
                pending = self._gradients[name] = PendingGradient(name, parameter)
            pending.complete(gradient)
            gathered.append(pending)
            # A sparse one counts as if it were dense.
            size_bytes += gradient.numel() * gradient.element_size()
        self._pending.append(gathered)
        self._pending_bytes += size_bytes

    def _send(self) -> None:
        """Start the reduction of all pending buckets."""
        self._pending_bytes = 0
        # Buckets are removed first: where one is refused, the next call sends the others.
        if self.feedback is not None:
            for compressed in _compressed(self._in_flight):
                compressed.advance()
        elif self._segments.strategy is None:
            alone = [bucket[0] for bucket in self._pending if len(bucket) == 1]
            self._pending = [bucket for bucket in self._pending if len(bucket) > 1]
            self._start_alone(alone)
        while self._pending:
            self._start(self._pending.pop(0))

    def _start_alone(self, gradients: Sequence[PendingGradient]) -> None:
        """Start gradients that are buckets of their own, in one call.

        Where one is refused the others are sent, as other ranks wait for them, and its error is
        raised.
        """
        errors: list[Exception] = []
        dense = []
        for gradient in gradients:
            try:
                self._pack(gradient)
                if gradient.packed.is_sparse:
                    self._in_flight.append(SparseGradientInFlight(gradient, self.reduction))
                else:
                    dense.append(gradient)
            except Exception as error:
                errors.append(error)
        errors += self._start_dense(dense)
        if errors:
            raise errors[0]

    def _start_dense(self, dense: Sequence[PendingGradient]) -> list[Exception]:
        """Start packed gradients that are buckets of their own; return the errors."""
        if not dense:
            return []
        options = self._segments.options([dense[0].name])
        try:
            self._in_flight.append(
                BucketInFlight(dense, self.reduction.compression, options, alone=self._alone)
            )
        except Exception as error:
            if len(dense) == 1:
                return [error]
            return [error for each in dense for error in self._start_dense([each])]
        return []

    def _start(self, bucket: Sequence[PendingGradient]) -> None:
        flat = (self.segment_schedule.flat or {}).get(bucket[0].name)
        compression = self.reduction.compression
        if flat is not None and len(bucket) == len(flat.parameters):
            for gradient in bucket:
                gradient.move_to(flat)
            first, packed = bucket[0].name, flat.buffer
            if compression in CASTS:
                packed = compression.compress_into(self._packed.get(first), packed)
                if packed is not flat.buffer:
                    self._packed[first] = packed
            options = self._segments.options([first])
            self._in_flight.append(
                SegmentInFlight(bucket, flat, packed, options, alone=self._alone)
            )
            return
        for gradient in bucket:
            self._pack(gradient)
        dense = [gradient for gradient in bucket if not gradient.packed.is_sparse]
        if dense:
            options = self._segments.options([gradient.name for gradient in dense])
            self._in_flight.append(
                BucketInFlight(dense, compression, options)
                if self.feedback is None
                else FeedbackInFlight(dense, self.feedback.state, self.reduction, options)
            )
        for gradient in bucket:
            if gradient.packed.is_sparse:
                self._in_flight.append(SparseGradientInFlight(gradient, self.reduction))

    @property
    def _alone(self) -> bool:
        """Whether what is started now is all that the training thread waits for, and does next."""
        return self._waits_next and not (self._in_flight or self._pending)

    def _pack(self, pending: PendingGradient) -> None:
        packed = pending.gradient
        pending.context = None
        compression = self.reduction.compression
        if compression is Compression.none and not packed.is_sparse:
            pending.packed = packed
            return
        if packed.is_sparse and self.reduction.sparse_as_dense:
            packed = packed.to_dense()
        if self.feedback is not None and not packed.is_sparse:
            packed = packed_for(packed)
        elif compression in CASTS and not pending.gradient.is_sparse:
            packed = compression.compress_into(self._packed.get(pending.name), packed)
            if packed is not pending.gradient:
                self._packed[pending.name] = packed
        elif not packed.is_sparse:
            packed, pending.context = compression.compress(packed)
        pending.packed = packed

    def synchronize(self) -> None:
        """Send the gradients that backward has not sent, wait for all, and write ``p.grad``.

        Raises `HorovodInternalError` when a reduction failed, and `RuntimeError` for a gradient
        that was changed while it was being reduced; no reduction is in flight afterwards.
        """
        for function in self.before_waiting:
            function()
        # Not by `no_grad` as a decorator, which takes 30 us more here, right after backward.
        recorded = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            self._segments.settle()
            if self.reduction.active:
                self._reduce_all()
            elif self._segments.as_views:
                self.segment_schedule.adopt_local_gradients(self.param_groups)
        finally:
            torch.set_grad_enabled(recorded)
        self.synchronized = True

    def _reduce_all(self) -> None:
        self.watch()
        gradients: Mapping[str, torch.Tensor | None] = {
            name: parameter.grad
            for name, parameter, trained in zip(
                self._seen_names, self._seen, self._trained, strict=True
            )
            if trained or parameter.grad is not None
        }
        names = self.segment_schedule.agree(gradients)
        if self.feedback is not None:
            self.feedback.state.begin(self._label)
        for bucket in self._schedule.rest(names):
            self._gather(bucket)
        try:
            refused = self._send_all()
            failures = self._wait()
        except BaseException:  # A KeyboardInterrupt: the other ranks need what was started.
            send_announced(for_collective())
            raise
        # A `HorovodInternalError` comes on all ranks alike. Other failures concern the results of
        # this rank alone: the other ranks do not know of them and adapt their segments, and so
        # must this one.
        shared = [failure for failure in failures if isinstance(failure, HorovodInternalError)]
        self._find_enough_bytes()
        if not refused and not shared:
            self.segment_schedule.adapt(names, self.param_groups)
        failures = [*shared, *refused, *failures]
        if failures:
            raise failures[0]

    def _find_enough_bytes(self) -> None:
        topology = for_collective().topology
        if topology is not self._topology:
            self._topology = topology
            cores = len(os.sched_getaffinity(0))
            on_device = any(parameter.device.type != "cpu" for parameter in self._seen)
            if not on_device:
                # Views stay: what is freed as gradients move there is not taken again.
                gradients = () if self._segments.as_views else (each.grad for each in self._seen)
                dense = (each for each in gradients if each is not None and not each.is_sparse)
                keep_freed_memory(2 * sum(each.nbytes for each in dense))
            self._enough_bytes = enough_bytes(
                topology, torch.get_num_threads(), cores, on_device=on_device
            )

    def _send_all(self) -> list[Exception]:
        """Send every bucket that can be sent, as other ranks wait for it; return the errors."""
        refused: list[Exception] = []
        self._waits_next = True
        try:
            while self._pending:
                try:
                    self._send()
                except Exception as failure:
                    refused.append(failure)
        finally:  # Also for a KeyboardInterrupt: hooks send next, and do not wait.
            self._waits_next = False
        return refused

    def _wait(self) -> list[Exception]:
        """Wait for all reductions in flight; return the errors."""
        in_flight, self._in_flight = self._in_flight, []
        failures: list[Exception] = []
        self.reset()
        for compressed in _compressed(in_flight):
            compressed.advance_by_one()
        for reduction in in_flight:
            try:
                reduction.wait()
            except Exception as failure:
                failures.append(failure)
        return failures

    def reset(self, backward_passes_per_step: int | None = None) -> None:
        """Forget what is pending or in flight, and count backward passes from the beginning."""
        for reduction in self._in_flight:
            reduction.leave()
        self._in_flight, self._pending, self._pending_bytes = [], [], 0
        self.synchronized = False
        self._schedule.reset(backward_passes_per_step)

    def restart_count(self) -> None:
        """Count passes from the beginning: the gradients were set to zero before their step."""
        if not self.busy:
            self._schedule.reset()


def _compressed(in_flight: Sequence[InFlight | FeedbackInFlight]) -> list[FeedbackInFlight]:
    return [each for each in in_flight if isinstance(each, FeedbackInFlight)]


def named_by_position(param_groups: ParamGroups) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield all parameters, each with the name that it has when the user gives it none."""
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            yield parameter, f"allreduce.noname.{number}.{index}"


def name_new(param_groups: ParamGroups, names: dict[torch.Tensor, str]) -> list[torch.Tensor]:
    """Name the parameters that have no name yet by their positions; return them.

    Groups that have changed may have others at these positions, so names get numbers behind them:
    the same ones on all ranks, where groups change alike.
    """
    new = {each: name for each, name in named_by_position(param_groups) if each not in names}
    used = {*names.values()} if new else set()
    for parameter, default in new.items():
        numbered = (f"{default}.{number}" for number in itertools.count(1))
        name = next(each for each in itertools.chain([default], numbered) if each not in used)
        names[parameter] = name
        used.add(name)
    return [*new]
