"""The collectives of a sharded optimizer, and the state of its shards: cut, gathered, saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.autograd.graph import increment_version

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.submit import Operation, start
from hvdlite.common.api.tensor_entries import NO_ROOM
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.torch import mpi_ops
from hvdlite.torch.optimizer.gradient_exchange import Exchange, name_new, named_by_position
from hvdlite.torch.optimizer.segment_schedule import ParamGroups
from hvdlite.torch.optimizer.sparsity import Layouts
from hvdlite.torch.sharded_state.elementwise import beside
from hvdlite.torch.sharded_state.shards import FlatShard, Place, State, arrange

Tensor = torch.Tensor


class ShardedExchange(Exchange):
    """The exchange of one optimizer; what `GradientExchange` is for one whose state is whole."""

    busy = False  # Nothing is sent before the step.
    feedback = None  # Compressors that need it are refused.

    def __init__(
        self,
        param_groups: ParamGroups,
        names: dict[Tensor, str],
        passes: int,
        reduction: ReductionConfig,
        state: Mapping[Tensor, State],
        common: Set[str],
    ) -> None:
        """Take over the parameters, and the state that the optimizer has. Nothing is sent.

        `common` are the names in its state of what is one for all elements of a parameter.
        """
        self.param_groups, self.names, self.passes = param_groups, names, passes
        self.reduction, self._common = reduction, common
        # The parameters whose new gradients are noted. There are none before a synchronize().
        self._hooked: set[Tensor] = set()
        # The state of the shards, by `FlatShard.shard`, and what the wrapped optimizer keeps beside
        # that of its parameters; its step changes both.
        self.state: defaultdict[Any, Any] = defaultdict(dict, beside(state))
        self.shards: list[FlatShard] = []
        # The state of whole parameters that was loaded, until the next step cuts it.
        of_parameters = {key: each for key, each in state.items() if isinstance(key, Tensor)}
        self.loaded: dict[Tensor, State] | None = of_parameters or None
        # The state of parameters that are in no shard: frozen, or not used by any rank so far.
        self.kept: dict[Tensor, State] = {}
        # The trained parameters with their groups, and the ranks, for which the shards were
        # arranged.
        self._arranged_for: tuple[list[tuple[str, int]], tuple[int, ...]] | None = None
        label = next(iter(names.values()), "")  # This is the same on all ranks.
        self._layouts = Layouts(reduction, label)
        # The era of the ranks that have agreed on which parameters are used.
        self._era: object = None
        # The parameters that some rank has used so far; the step leaves all others as they are.
        self._used: set[str] = set()

    # -- shards

    def ensure(self, *, for_step: bool = False) -> None:
        """Arrange the shards anew where parameters, groups, ranks or loaded state have changed.

        Parameters of another dtype or on another device are others, too. `for_step`: ask
        the other ranks for gradients that this rank lacks; all ranks take part. Raises
        `RuntimeError` where the ranks have changed, and the state is that of the old ones.
        """
        name_new(self.param_groups, self.names)
        trained = self._find_trained(for_step)
        arranged_for = self._with_groups({*trained.values()}), self._members()
        if (
            arranged_for == self._arranged_for
            and self.loaded is None
            and all(shard.fits() for shard in self.shards)
        ):
            for shard in self.shards:
                shard.adopt_parameters()
            return
        states = self._whole_states() if self.loaded is None else self.loaded
        self.kept = {p: state for p, state in states.items() if p not in trained}
        for shard in self.shards:
            shard.release_parameters()
        self.shards = arrange(self.param_groups, trained, states, self.place(), self._common)
        self._forget_state()
        for shard in self.shards:
            state = shard.cut(states, self._common)
            if state:
                self.state[shard.shard] = state
        self._arranged_for, self.loaded = arranged_for, None

    def settle(self) -> None:
        """Arrange the shards where no other rank is needed for it; else leave them as they are.

        Raises `RuntimeError` as `ensure`.
        """
        if self.loaded is not None or not any(self.state.get(each.shard) for each in self.shards):
            self.ensure()
        else:
            self._check_members()

    def arrange_as(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Arrange the shards as saved ones. Raises `ValueError` where the parameters are others."""
        name_new(self.param_groups, self.names)
        own = {
            self.names[parameter]: (number, parameter)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        for flat in saved:
            for name, shape in zip(flat["parameters"], flat["shapes"], strict=True):
                found = None
                if name in own:
                    number, parameter = own[name]
                    found = number, str(parameter.dtype), tuple(parameter.shape)
                if found != (flat["group"], flat["dtype"], tuple(shape)):
                    raise ValueError(
                        f"the state dict has shards of other parameters: {name} is (group, dtype, "
                        f"shape) {(flat['group'], flat['dtype'], tuple(shape))} there, and "
                        f"{found} here"
                    )
        for shard in self.shards:
            shard.release_parameters()
        lists = [[own[name][1] for name in flat["parameters"]] for flat in saved]
        self.shards = [
            FlatShard(flat["group"], parameters, self.names[parameters[0]], self.place())
            for flat, parameters in zip(saved, lists, strict=True)
        ]
        self._forget_state()
        self.kept, self.loaded = {}, None
        arranged = {name for flat in saved for name in flat["parameters"]}
        self._used |= arranged
        # The next step arranges them anew where it trains others, such as those that are thawed.
        self._arranged_for = self._with_groups(arranged), self._members()

    def _with_groups(self, names: Set[str]) -> list[tuple[str, int]]:
        return [
            (self.names[parameter], number)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if self.names[parameter] in names
        ]

    def _forget_state(self) -> None:
        """Forget the state of shards that are no longer."""
        others = beside(self.state)
        self.state.clear()
        self.state.update(others)

    def _find_trained(self, for_step: bool) -> dict[Tensor, str]:
        candidates = {
            parameter: self.names[parameter]
            for parameter, _ in named_by_position(self.param_groups)
            if parameter.requires_grad or parameter.grad is not None
        }
        if for_step:
            era = for_collective().era(self.reduction.process_set)
            if era is not self._era:
                self._layouts.ask_again()  # A newcomer of an elastic job knows nothing yet.
                self._era = era
            gradients = {name: parameter.grad for parameter, name in candidates.items()}
            self._used |= set(self._layouts.agree(gradients))
        names = self._used
        if not for_step:  # Else the state of what no rank has used yet stays whole, in `kept`.
            names = names | {self.names[parameter] for parameter in self.loaded or ()}
        return {parameter: name for parameter, name in candidates.items() if name in names}

    def _members(self) -> tuple[int, ...]:
        return tuple(self.reduction.process_set.ranks or ())

    def place(self) -> Place:
        """Return the position of this rank among those that share the state."""
        process_set: ProcessSet = self.reduction.process_set
        position = process_set.rank()
        return Place(position or 0, process_set.size())

    # -- gradients

    def reduce_shards(self) -> None:
        """Reduce the gradients of all ranks; each rank keeps those of its shards."""
        self.ensure(for_step=True)
        self._reduce()
        self.synchronized = True

    def _reduce(self) -> None:
        compression = self.reduction.compression
        started = []
        for shard in self.shards:
            shard.pack_gradients(self.reduction.sparse_as_dense)
        for shard in self.shards:
            packed, context = compression.compress(shard.gradient)
            target = shard.shard_gradient
            if packed is not shard.gradient:
                target = packed.new_empty(target.shape)
            options = self.reduction.options
            operation = self._start("reducescatter", shard, packed, target, options)
            started.append((shard, operation, target, context))
        _wait([operation for _, operation, _, _ in started])
        for shard, _, target, context in started:
            if target is not shard.shard_gradient:
                shard.shard_gradient.copy_(compression.decompress(target, context))

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce the gradients, and show all of them to every rank, to be clipped or looked at."""
        if not self.reduction.active:
            self.synchronized = True
            return
        self.ensure(for_step=True)
        self._reduce()
        self._gather([(each, each.shard_gradient, each.gradient) for each in self.shards])
        for shard in self.shards:
            shard.show_gradients()
        for parameter, name in named_by_position(self.param_groups):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                self.hook(parameter, name)
        self.synchronized = True

    def take_gradients(self) -> None:
        """Take the shards of gradients that are reduced, and may have been changed since."""
        self.ensure()
        for shard in self.shards:
            shard.pack_gradients(self.reduction.sparse_as_dense)
            shard.shard_gradient.copy_(shard.gradient[shard.own])

    def gather_parameters(self) -> None:
        """Send the shards that a step has changed to all ranks."""
        self._gather([(each, each.shard.detach(), each.data) for each in self.shards])
        for shard in self.shards:
            for parameter in shard.parameters:
                # See [Note: views and version counters] in torch/optimizer/flat_gradients.py.
                increment_version(parameter)

    def _gather(self, parts: Sequence[tuple[FlatShard, Tensor, Tensor]]) -> None:
        """Gather a part of each shard from all ranks, into the tensor that comes after it.

        Raises `HorovodInternalError` where a rank has joined, which gives none.
        """
        options = CallOptions(self.reduction.process_set)
        try:
            _wait([self._start("allgather", *part, options) for part in parts])
        except HorovodInternalError as error:
            if NO_ROOM not in str(error):
                raise
            raise HorovodInternalError(
                "a rank has joined, and with shard_state=True its part of the weights or of their "
                "state is missing: let all ranks make equally many steps, or leave shard_state out",
                job_goes_on=True,
            ) from error

    def _start(
        self,
        collective: str,
        shard: FlatShard,
        tensor: Tensor,
        target: Tensor,
        options: CallOptions,
    ) -> Operation[Tensor]:
        runtime, adapter = for_collective(), mpi_ops.runner.adapter
        entries = start(runtime, adapter, collective, shard.label, [tensor], options, [target])
        return Operation(entries)

    # -- what the mixin asks of an exchange

    def watch(self) -> None:
        """Do nothing: parameters that were added are arranged with the next step."""

    def reset(self, backward_passes_per_step: int | None = None) -> None:
        """Forget that gradients are reduced."""
        self.synchronized = False
        self.passes = backward_passes_per_step or self.passes

    def restart_count(self) -> None:
        """Do nothing: backward passes accumulate in the gradients, and are not counted."""

    # -- state

    @torch.no_grad()
    def _whole_states(self) -> dict[Tensor, State]:
        """Return the state of each parameter; all ranks take part where there is any."""
        states = dict(self.kept)
        self._check_members()
        for shard in self.shards:
            state = self.state.get(shard.shard)
            if not state:
                continue
            gathered = {}
            for name, value in state.items():
                if shard.is_cut(value):
                    buffer = shard.allocate(value.dtype)
                    self._gather([(shard, value, buffer)])
                    gathered[name] = buffer
            states.update(shard.join(state, gathered))
        return states

    def _check_members(self) -> None:
        """Raise `RuntimeError` where the ranks are others than those that have the state."""
        arranged_for = self._arranged_for
        if self.state and arranged_for is not None and arranged_for[1] != self._members():
            raise RuntimeError(
                "the ranks have changed since the optimizer's state was divided among them, and "
                "the parts of those that left are lost: use hvd.elastic.TorchState, which keeps "
                "all of it, or load a consolidated state dict"
            )

    def whole_states(self) -> dict[Tensor, State]:
        """Return a copy of the state of each parameter, as the wrapped optimizer would have it."""
        if self.loaded is not None:
            return {
                parameter: {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in state.items()
                }
                for parameter, state in self.loaded.items()
            }
        return self._whole_states()

    def describe(self) -> dict[str, Any]:
        """Return the layout of the shards: D and M as in checkpoints, and what each consists of."""
        place = self.place()
        return {
            "layout": [[place.members], [0]],
            "position": place.position,
            "flat": [shard.describe(self.names) for shard in self.shards],
        }


def _wait(operations: Sequence[Operation[Any]]) -> None:
    """Wait for all; raise the first error when all have ended."""
    failure: Exception | None = None
    for operation in operations:
        try:
            operation.wait_for_tensors()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
