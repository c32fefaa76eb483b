"""The optimizer of ``shard_state=True``: a step over the shards of this rank."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.torch.compression import Compression
from hvdlite.torch.optimizer.in_flight import CASTS
from hvdlite.torch.optimizer.reducing_optimizer import Names, ReducingMixin
from hvdlite.torch.sharded_state.elementwise import (
    beside,
    check_elementwise,
    step_over,
    take_over,
)
from hvdlite.torch.sharded_state.exchange import ShardedExchange
from hvdlite.torch.sharded_state.shards import State
from hvdlite.torch.subclass import hooked, wrap, wrapped_class

Tensor = torch.Tensor


class ShardingMixin(ReducingMixin):
    """The mixin that comes before the class of the wrapped optimizer.

    ``param_groups`` has the user's parameters and options, ``state`` what belongs to the shards.
    """

    _exchange: ShardedExchange  # type: ignore[assignment]
    _state_is_common = False

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Reduce the gradients, step over the shards of this rank, and send them to all ranks.

        With a `closure`, it is called once before. Raises `TypeError` for other options.
        """
        exchange = self._exchange
        if not exchange.reduction.active:
            exchange.synchronized = False
            with self._allow_step():
                arguments = [] if closure is None else [closure]
                return super(ReducingMixin, self).step(*arguments, **options)
        if options:
            raise TypeError(f"shard_state=True: step() takes no {', '.join(options)}")
        loss = None
        if closure is not None:
            exchange.synchronized = False
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self._should_synchronize and not exchange.synchronized:
                exchange.reduce_shards()
            else:
                self._synchronize_for_step()
                exchange.take_gradients()
            exchange.synchronized = self._synchronized_for_scaler = False
            with self._allow_step():
                _sharded_step(self)
            exchange.gather_parameters()
        self._end_step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # `_sharded_step` calls the user's hooks.

    def state_dict(self) -> dict[str, Any]:
        """Return the options, and the state of this rank's shards, in the layout [N], [0].

        The shards are those of the last step, or of a load; no other rank takes part. It fits the
        same parameters on the same number of ranks; `consolidate` gives what fits all. Raises
        `RuntimeError` where the ranks have changed.
        """
        exchange = self._exchange
        if not exchange.reduction.active:
            return super().state_dict()
        self._call_before_state_dict()
        exchange.settle()
        place = exchange.place()
        note = ShardOfOneRank(f"of rank {place.position} of {place.members}")
        state = {
            number: {**exchange.state[shard.shard], KEY: note}
            for number, shard in enumerate(exchange.shards)
            if shard.shard in exchange.state
        }
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        whole = {numbers[parameter]: kept for parameter, kept in exchange.kept.items()}
        shards = {**exchange.describe(), "whole": whole}
        state |= beside(exchange.state)
        return self._hooked_state_dict(
            {"state": state, "param_groups": self._options(), "shards": shards}
        )

    def _call_before_state_dict(self) -> None:
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)

    def _hooked_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what the user's hooks make of a state dict, as torch does at its end."""
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def consolidate(self) -> dict[str, Any]:
        """Return the state dict that the wrapped optimizer would have; all ranks take part.

        Every rank gets all of it. It can be loaded by `load_state_dict` on any number of ranks, and
        by an optimizer that is not wrapped. Raises `HorovodInternalError` when a rank is lost.
        """
        exchange = self._exchange
        if not exchange.reduction.active:
            return super().state_dict()
        self._call_before_state_dict()
        parameters = self._parameters()
        states = exchange.whole_states()
        state = {
            number: states[parameter]
            for number, parameter in enumerate(parameters)
            if parameter in states
        }
        state |= copy.deepcopy(beside(exchange.state))
        return self._hooked_state_dict({"state": state, "param_groups": self._options()})

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _options(self) -> list[dict[str, Any]]:
        """Return the groups as state dicts have them: with numbers in the place of parameters."""
        groups, number = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            groups.append({**group, "params": list(range(number, number + count))})
            number += count
        return groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned on this rank, or a state dict that is consolidated.

        Raises `ValueError` for shards of other parameters, of another number of ranks or of another
        rank, and for groups of other sizes.
        """
        exchange = self._exchange
        if not exchange.reduction.active:
            _refuse_shards(state_dict)
            super().load_state_dict(state_dict)
            return
        state_dict = state_dict.copy()  # Hooks may change it.
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != saved_sizes:
            raise ValueError(
                f"the saved groups have {saved_sizes} parameters, those of this optimizer {sizes}"
            )
        saved, parameters = copy.deepcopy(state_dict["state"]), self._parameters()
        others = {key: saved.pop(key) for key in [*saved] if not isinstance(key, int)}
        if "shards" in state_dict:
            _check_shards(state_dict["shards"], exchange.describe())
            exchange.arrange_as(state_dict["shards"]["flat"])
            whole = copy.deepcopy(state_dict["shards"]["whole"])
            exchange.kept = {parameters[number]: state for number, state in whole.items()}
            for number, state in saved.items():
                exchange.state[exchange.shards[number].shard] = plain(state)
        else:
            exchange.loaded = {
                parameters[number]: _fit(state, parameters[number])
                for number, state in saved.items()
            }
        for key in beside(exchange.state):
            del exchange.state[key]
        exchange.state.update(others)
        exchange.reset()
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def share_state(self, root_rank: int, process_set: ProcessSet) -> bool:
        """Copy the options of `root_rank`, and whole state that it has loaded, to all ranks.

        State that is divided among the ranks stays where it is.
        """
        exchange = self._exchange
        if not exchange.reduction.active:
            return False
        sent: dict[str, Any] = {"options": self._options(), "state": None}
        if exchange.loaded is not None:
            sent["state"] = self.consolidate()["state"]
        sent = broadcast_object(sent, root_rank, "sharded_optimizer", process_set)
        if sent["state"] is not None:
            self.load_state_dict({"state": sent["state"], "param_groups": sent["options"]})
            return True
        for group, options in zip(self.param_groups, sent["options"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
        return True


def _fit(state: State, parameter: Tensor) -> State:
    """Return whole state on the device of its parameter, and in its dtype, as torch loads it."""
    fitted: State = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and parameter.is_floating_point():
            fitted[name] = value.to(dtype=parameter.dtype, device=parameter.device)
        else:
            fitted[name] = value
    return fitted


def _refuse_shards(state_dict: dict[str, Any]) -> None:
    if "shards" in state_dict:
        (members,), _ = state_dict["shards"]["layout"]
        raise ValueError(
            f"the state dict has a shard of one of {members} ranks, and this rank is alone: save "
            "optimizer.consolidate() instead"
        )


def _check_shards(saved: dict[str, Any], own: dict[str, Any]) -> None:
    meanings = {
        "layout": "layout, which is the number of ranks",
        "position": "rank of the set",
    }
    for word, what in meanings.items():
        if saved[word] != own[word]:
            raise ValueError(
                f"the state dict has shards of another {what}: {saved[word]} there, {own[word]} "
                "here. Save optimizer.consolidate(), which fits any number of ranks"
            )


def _step_over_shards(optimizer: ShardingMixin) -> None:
    exchange = optimizer._exchange
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    for shard in exchange.shards:
        shard.shard.grad = shard.shard_gradient
        groups[shard.group]["params"].append(shard.shard)
    take_over(optimizer, step_over(optimizer, wrapped_class(optimizer), groups, exchange.state))


_sharded_step = hooked(_step_over_shards)


def shard(
    optimizer: torch.optim.Optimizer, names: Names, passes: int, reduction: ReductionConfig
) -> Any:
    """Wrap the optimizer. Raises `ValueError` where its step, or the reduction, cannot be cut."""
    if reduction.scaling.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        op = reduction.scaling.op.name.capitalize()
        raise ValueError(f"shard_state=True: op must be Average or Sum, not {op}")
    compression = reduction.compression
    if compression is not Compression.none and compression not in CASTS:
        raise ValueError(
            f"shard_state=True: {compression} compresses gradient by gradient, and those of a "
            "shard are sent as one tensor: use Compression.none, fp16 or bf16"
        )
    common = check_elementwise(optimizer, type(optimizer))
    wrapped = wrap(ShardingMixin, optimizer, reduction)
    exchange = ShardedExchange(
        optimizer.param_groups, names, passes, reduction, optimizer.state, common
    )
    wrapped._exchange = exchange
    if reduction.active:
        # Of the wrapped optimizer, too: else it would keep all of its state in memory.
        wrapped.state = optimizer.state = exchange.state
    return wrapped


KEY = "shard"


class ShardOfOneRank(str):
    """A note beside the state of a shard, which DCP cannot write; all else takes it for a text.

    DCP takes tensors of one name for copies, and writes those of one rank: the shards of all others
    would be lost. It asks whatever has these methods how to write it.
    """

    __slots__ = ()

    def __create_write_items__(self, fqn: str, value: Any) -> NoReturn:
        raise ValueError(
            f"{fqn!r} is of the state_dict() of an optimizer with shard_state=True, of which each "
            "rank has another part, and torch.distributed.checkpoint would write that of one rank "
            "alone: call hvd.checkpoint.save(directory, {..., 'optimizer': optimizer}), or give "
            "optimizer.consolidate()"
        )

    def __create_chunk_list__(self) -> NoReturn:
        self.__create_write_items__(KEY, self)

    def __get_tensor_shard__(self, index: Any) -> NoReturn:
        self.__create_write_items__(KEY, self)

    def __deepcopy__(self, memo: Any) -> ShardOfOneRank:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[()]]:
        # torch.load(weights_only=True), the default, knows no class of ours.
        return OrderedDict, ()


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a shard without the note."""
    return {name: value for name, value in state.items() if name != KEY}
