"""How each kind of object in a `TorchState` is saved, restored and made equal on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.elastic.source import check_same_tensors, sync_source
from hvdlite.common.elastic.state import named_leaves
from hvdlite.common.runtime.basics import rank
from hvdlite.torch.elastic.tensors import Snapshot, broadcast_flat, is_plain
from hvdlite.torch.functions import share_optimizer_state
from hvdlite.torch.optimizer.reducing_optimizer import ReducingMixin

Tensor = torch.Tensor


class StateHandler:
    """Saves, restores and syncs one value of a state; a subclass says how.

    A handler is made with its value alone, and saves it at once.
    """

    # Whether the value changes in `optimizer.step()` only, so that its tensors are not copied.
    by_step = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def gather(self) -> None:
        """Get what other ranks have of the value, for the `save` that follows."""

    def save(self) -> None:
        """Copy the value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last save."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the value equal to that of rank 0, or of the root of the sync."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another value, and save it."""
        self.value = value
        self.save()

    def enter_world(self) -> None:
        """Adapt to a new world, whose size may be another one."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are equal on all ranks, bit by bit."""
        return iter(())


class ModelStateHandler(StateHandler):
    """A model: all of its state dict, buffers included."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        # The parameters that are not copied, by identity, because an optimizer's step alone
        # changes them.
        self.stepped: set[int] = set()
        self._saved = Snapshot()
        self.save()

    def save(self) -> None:
        """Copy the state dict, in `by_step` without the parameters of the optimizer."""
        state = self.value.state_dict()
        if self.by_step:
            for name, parameter in self.value.named_parameters(remove_duplicate=False):
                if id(parameter) in self.stepped:
                    state.pop(name, None)
        self._saved.take(state)

    def restore(self) -> None:
        self.value.load_state_dict(self._saved.tree(), strict=not self.by_step)

    def sync(self) -> None:
        """Send the current weights of the root. Raises `ValueError` where models differ."""
        source = sync_source()
        if not source.takes_part:
            return
        state = self.value.state_dict()
        tensors = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and is_plain(value)
        }
        kinds = {
            name: f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
            for name, tensor in tensors.items()
        }
        check_same_tensors(kinds, "model", source)
        broadcast_flat([*tensors.values()], "elastic.model", source)
        others = {name: value for name, value in state.items() if name not in tensors}
        if others:
            others = broadcast_object(others, source.root_rank, "elastic.model", source.process_set)
            if rank() != source.root_rank:
                self.value.load_state_dict(others, strict=False)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters. Ranks may have buffers of their own, as batch norms do."""
        yield from self.value.named_parameters()


class OptimizerStateHandler(StateHandler):
    """An optimizer: its state and the options of its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._saved = Snapshot()
        self._gathered: dict[str, Any] | None = None
        self.save()

    def gather(self) -> None:
        """Get all of a state that is divided among the ranks: its parts would be lost with them."""
        if self._is_divided():
            self._gathered = self.value.consolidate()

    def save(self) -> None:
        """Copy the state dict, in `by_step` the options only."""
        if self.by_step:
            self._saved.take(
                [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in self.value.param_groups
                ]
            )
            return
        if self._gathered is None:
            self.gather()
        gathered, self._gathered = self._gathered, None
        self._saved.take(self.value.state_dict() if gathered is None else gathered)

    def restore(self) -> None:
        """Load what was saved, and forget gradients, and reductions that are in flight."""
        self._forget_gradients()
        self._gathered = None  # Of a save that has failed.
        saved = self._saved.tree()
        # Groups that were added since are added again by the function, which begins anew.
        groups = self.value.param_groups
        kept = len(saved if self.by_step else saved["param_groups"])
        for parameter in (each for group in groups[kept:] for each in group["params"]):
            self.value.state.pop(parameter, None)
        del groups[kept:]
        if self.by_step:
            for group, options in zip(self.value.param_groups, saved, strict=True):
                group.update(options)
            return
        self.value.load_state_dict(saved)
        if not self._is_divided():
            self._undo_casts(saved)

    def _is_divided(self) -> bool:
        return hasattr(self.value, "consolidate")

    def _undo_casts(self, saved: dict[str, Any]) -> None:
        """Give state the dtype that it had: torch gives it that of the parameter."""
        parameters = [p for group in self.value.param_groups for p in group["params"]]
        for number, entries in saved["state"].items():
            if not isinstance(number, int) or not isinstance(entries, dict):
                continue
            state = self.value.state[parameters[number]]
            for name, tensor in entries.items():
                loaded = state.get(name)
                if isinstance(loaded, Tensor) and loaded.dtype != tensor.dtype:
                    state[name] = tensor.to(loaded.device)

    def sync(self) -> None:
        """Send state and options of the root. Raises `ValueError` where optimizers differ."""
        source = sync_source()
        if not source.takes_part:
            return
        if isinstance(self.value, torch.optim.LBFGS):  # Its state belongs to no parameter.
            state = broadcast_object(
                self.value.state_dict(), source.root_rank, process_set=source.process_set
            )
            if rank() != source.root_rank:
                self.value.load_state_dict(state)
            return
        sizes = {
            f"param_groups[{number}]": f"{len(group['params'])} parameters"
            for number, group in enumerate(self.value.param_groups)
        }
        check_same_tensors(sizes, "optimizer", source)
        share_optimizer_state(
            self.value,
            source.root_rank,
            source.process_set,
            lambda blocks: broadcast_flat(blocks, "elastic.optimizer", source),
        )

    def enter_world(self) -> None:
        """Forget gradients of the old world: all ranks begin with the first pass of a step.

        State that was divided among the ranks of the old world is divided anew, from the last save.
        """
        self._forget_gradients()
        if self._is_divided():
            self.value.load_state_dict(self._saved.tree())

    @torch.no_grad()
    def _forget_gradients(self) -> None:
        if isinstance(self.value, ReducingMixin):
            self.value._exchange.reset()
        for group in self.value.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.requires_grad:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the state by the number of their parameter."""
        if self._is_divided():
            return
        for name, leaf in named_leaves(self.value.state_dict()["state"], "state"):
            if isinstance(leaf, Tensor):
                yield name, leaf


class StateDictHandler(StateHandler):
    """Anything with ``state_dict()`` and ``load_state_dict()``: schedulers, gradient scalers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        self.save()

    @staticmethod
    def fits(value: Any) -> bool:
        """Return whether the value has both methods."""
        methods = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
        return not isinstance(value, type) and all(map(callable, methods))

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self._load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        source = sync_source()
        if not source.takes_part:
            return
        state = broadcast_object(
            self.value.state_dict(), source.root_rank, process_set=source.process_set
        )
        if rank() != source.root_rank:
            self._load(state)

    def _load(self, state: Any) -> None:
        self.value.load_state_dict(state)
        if isinstance(self.value, torch.amp.GradScaler):
            # Else it refuses to unscale again in the step that had failed.
            self.value._per_optimizer_states.clear()


class SamplerStateHandler(StateDictHandler):
    """An `ElasticSampler`: the epoch, and how many of its samples are done."""

    def sync(self) -> None:
        """Load the current state of the root; the root itself shares the rest of the epoch anew."""
        super().sync()
        self.value.reset()

    def enter_world(self) -> None:
        """Share what is left among the ranks of the new world."""
        self.value.reset()
