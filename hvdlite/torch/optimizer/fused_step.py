"""An optimizer's step over segments: one kernel for many parameters.

The gradients of a segment lie in one buffer (`FlatGradients`). Its parameters and the state of the
optimizer move to buffers of the same layout (`SegmentBuffers`). Parameter objects and
``optimizer.state`` stay the same objects, and show views of the buffers. Neighbours in a buffer
that the optimizer treats alike form a run, and torch's own kernel handles a run as one flat tensor.

The optimizer's ordinary step handles all other parameters: those without a gradient, those of no
segment, and those whose ``data`` or ``grad`` the user has replaced. State that the user has
replaced, or whose ``data``, moves to the buffers again.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.autograd.graph import increment_version

from hvdlite.torch.optimizer.flat_gradients import FlatGradients
from hvdlite.torch.optimizer.kernels import (
    OptimizerKernel,
    ParameterRun,
    kernel_of,
    reason_against_fusing,
)
from hvdlite.torch.optimizer.segment_schedule import ParamGroups

Tensor = torch.Tensor


class SegmentParameter:
    """One parameter of a segment."""

    __slots__ = ("address", "gradient", "index", "number", "parameter", "state")

    def __init__(self, parameter: Tensor, gradient: Tensor, number: int, index: int) -> None:
        """Describe a parameter by its `index` in this segment and its `number` in all of them."""
        self.parameter, self.gradient, self.number = parameter, gradient, number
        self.index = index
        self.address = parameter.data_ptr()  # The parameter lies in the buffer already.
        # The views that the optimizer's state should have for this parameter, by name, and where
        # each lies: the user may give other memory to the same tensor.
        self.state: dict[str, tuple[Tensor, int]] = {}


@dataclass
class SegmentParameterRun(ParameterRun):
    """Neighbours in one segment."""

    members: Sequence[SegmentParameter] = ()
    # The steps of all members but the first, where the optimizer counts steps.
    other_steps: Tensor | None = None


class SegmentBuffers:
    """The flat buffers of one segment. Those of the optimizer's state are made when needed."""

    def __init__(self, flat: FlatGradients, first_number: int) -> None:
        """Move the parameters of `flat` into a buffer; the first one gets the number given."""
        self.layout, self.gradient = flat.layout, flat.buffer
        self.data = self.layout.allocate()
        self.members: list[SegmentParameter] = []
        places = zip(flat.parameters, self.layout.views(self.data), strict=True)
        for index, (parameter, view) in enumerate(places):
            parameter.data = view.copy_(parameter.data)
            self.members.append(
                SegmentParameter(parameter, flat.view(parameter), first_number + index, index)
            )
        self.steps = torch.zeros(len(self.members))
        self._state: dict[str, Tensor] = {}

    def move_steps(self, device: torch.device) -> None:
        """Keep the count of steps of each parameter on this device."""
        if self.steps.device != device:
            self.steps = self.steps.to(device)
            for member in self.members:
                member.state.pop("step", None)

    def state_view(self, name: str, member: SegmentParameter) -> Tensor:
        """Return the place of the state `name` of one parameter."""
        if name == "step":
            return self.steps[member.index]
        if name not in self._state:
            self._state[name] = self.layout.allocate()
        return self.layout.view(self._state[name], member.index)

    def run(
        self, members: Sequence[SegmentParameter], names: Sequence[str], fresh: bool
    ) -> SegmentParameterRun:
        """Return neighbours as one run, with their state of these names."""
        first, last = members[0].index, members[-1].index
        span = slice(self.layout.offsets[first], self.layout.ends[last])
        run = SegmentParameterRun(self.data[span], self.gradient[span], fresh)
        run.members = members
        for name in names:
            if name == "step":  # The kernel counts for the first; its count is copied to the rest.
                run.state[name] = self.steps[first]
                run.other_steps = self.steps[first + 1 : last + 1]
            else:
                run.state[name] = self._state[name][span]
        return run


_NO_GROUP = -1  # the group of a parameter that is in no run


class FusedStep:
    """The fused steps of one optimizer."""

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, segments: Sequence[FlatGradients]
    ) -> tuple[FusedStep | None, str]:
        """Move the parameters and return the step; or return None and why it cannot be fused.

        `optimizer` is a plain SGD, Adam or AdamW of torch, or such a one wrapped by
        `DistributedOptimizer`. Its parameters must not be in other segments than `segments`; some
        may be in none. Parameters of one group should be neighbours in a segment: only neighbours
        become one tensor. Where the step cannot be fused, nothing is moved.
        """
        kernel = kernel_of(optimizer)
        reason = reason_against_fusing(kernel, optimizer, segments)
        if kernel is None or reason:
            return None, reason
        return cls(kernel, optimizer, segments), ""

    @torch.no_grad()
    def __init__(
        self,
        kernel: OptimizerKernel,
        optimizer: torch.optim.Optimizer,
        segments: Sequence[FlatGradients],
    ) -> None:
        """Move the parameters; `of` has checked the arguments."""
        self._kernel = kernel
        # The optimizer has this step, and goes as soon as the user drops it: its hooks end then.
        self._optimizer_reference = weakref.ref(optimizer)
        self._segments: list[SegmentBuffers] = []
        self._members: dict[Tensor, SegmentParameter] = {}
        for flat in segments:
            segment = SegmentBuffers(flat, len(self._members))
            self._segments.append(segment)
            self._members.update((member.parameter, member) for member in segment.members)
        # The calls of the kernel: a group of the optimizer, and runs that it treats alike.
        self._calls: list[tuple[int, list[SegmentParameterRun]]] = []
        # The groups, names of state and step counts for which `_calls` was planned. None when
        # the last step has made new state, so that the next step plans anew.
        self._planned_for: object = None
        # The parameters of these calls with the state that they should show.
        self._shown: list[tuple[Tensor, dict[str, tuple[Tensor, int]]]] = []

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_reference()
        assert optimizer is not None
        return optimizer

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient, with the options that the groups have now.

        The hooks of the optimizer are not called. Raises what torch raises for the options.
        """
        groups: ParamGroups = self._optimizer.param_groups
        membership, others = self._assign(groups)
        names = [self._kernel.names(group) for group in groups]
        inputs = membership, names, self._step_versions()
        if inputs != self._planned_for or not self._owns_state():
            self._plan_calls(membership, names, groups)
        # What ``torch.amp.GradScaler`` sets on an optimizer made with ``fused=True``.
        options = "grad_scale", "found_inf"
        scaler = {name: getattr(self._optimizer, name, None) for name in options}
        for number, runs in self._calls:
            self._kernel.apply(groups[number], runs, scaler)
        has_new_state = self._publish()
        if any(others):
            self._ordinary_step(groups, others)
        self._planned_for = None if has_new_state else (membership, names, self._step_versions())

    def _step_versions(self) -> list[int]:
        """Return the versions of the step counts, which tell whether the user wrote to one.

        See [Note: views and version counters] in torch/optimizer/flat_gradients.py.
        """
        return [segment.steps._version for segment in self._segments]

    def _assign(self, groups: ParamGroups) -> tuple[list[int], list[list[Tensor]]]:
        """Return the group of each parameter that a run can have, and the others by groups."""
        membership = [_NO_GROUP] * len(self._members)
        others: list[list[Tensor]] = [[] for _ in groups]
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                member = self._members.get(parameter)
                if (
                    member is not None
                    # Both lie in the buffers: the user has replaced neither.
                    and parameter.grad is member.gradient
                    and parameter.data_ptr() == member.address
                ):
                    membership[member.number] = number
                elif parameter.grad is not None:
                    others[number].append(parameter)
        return membership, others

    def _owns_state(self) -> bool:
        """Return whether the optimizer's state shows the buffers: the user has not replaced it."""
        optimizer_state = self._optimizer.state
        for parameter, views in self._shown:
            state = optimizer_state.get(parameter, {})
            for name, (view, address) in views.items():
                if state.get(name) is not view or view.data_ptr() != address:
                    return False
        return True

    def _plan_calls(
        self, membership: list[int], names: list[tuple[str, ...]], groups: ParamGroups
    ) -> None:
        """Move state into the buffers, and make runs of neighbours that are treated alike."""
        calls: dict[tuple[object, ...], tuple[int, list[SegmentParameterRun]]] = {}
        on_device = any(group.get("fused") for group in groups)
        for segment in self._segments:
            segment.move_steps(segment.data.device if on_device else torch.device("cpu"))
            fresh = {
                member.number
                for member in segment.members
                if membership[member.number] != _NO_GROUP
                and self._adopt_state(segment, member, names[membership[member.number]])
            }
            steps = segment.steps.tolist()
            keys = {
                member: (membership[member.number], member.number in fresh, steps[member.index])
                for member in segment.members
            }
            for (group, is_fresh, _), members in groupby(segment.members, keys.__getitem__):
                if group != _NO_GROUP:
                    kind = group, is_fresh, segment.layout.dtype, segment.layout.device
                    run = segment.run([*members], names[group], is_fresh)
                    calls.setdefault(kind, (group, []))[1].append(run)
        self._calls = [*calls.values()]
        self._shown = [
            (member.parameter, member.state)
            for member, group in zip(self._members.values(), membership, strict=True)
            if group != _NO_GROUP and member.state
        ]

    def _adopt_state(
        self, segment: SegmentBuffers, member: SegmentParameter, names: Sequence[str]
    ) -> bool:
        """Move the state of one parameter into the buffers.

        Return whether it is fresh: the kernel has to make some of it in this step.
        """
        before, member.state = member.state, {}
        fresh = False
        for name in names:
            view, address = before.get(name, (None, 0))
            if view is None or view.data_ptr() != address:
                view = segment.state_view(name, member)
            member.state[name] = view, view.data_ptr()
            state = self._optimizer.state[member.parameter]
            value = state.get(name)
            if value is None and self._kernel.makes_state:
                fresh = True  # `_publish` puts the view into the optimizer's state.
                continue
            if value is None:
                view.zero_()
            elif value is not view:
                view.copy_(torch.as_tensor(value))
            state[name] = view
        return fresh

    def _publish(self) -> bool:
        """Show the step outside of the buffers, and return whether there is new state."""
        has_new_state = False
        for _, runs in self._calls:
            for run in runs:
                # With this, backward through a graph from before the step is an error, as it is
                # after every step of torch: it would compute with changed values.
                # See [Note: views and version counters] in torch/optimizer/flat_gradients.py.
                for member in run.members:
                    increment_version(member.parameter)
                if run.other_steps is not None:
                    run.other_steps.copy_(run.state["step"])
                if run.fresh:
                    has_new_state = True
                    for member in run.members:
                        views = {name: view for name, (view, _) in member.state.items()}
                        self._optimizer.state[member.parameter].update(views)
        return has_new_state

    def _ordinary_step(self, groups: ParamGroups, parameters: list[list[Tensor]]) -> None:
        """Make the optimizer's own step for these parameters, by groups, without its hooks."""
        optimizer_class = self._kernel.optimizer_class
        double = object.__new__(optimizer_class)
        double.__dict__.update(vars(self._optimizer))  # The state, above all, is shared.
        double.__dict__["param_groups"] = [
            {**group, "params": members} for group, members in zip(groups, parameters, strict=True)
        ]
        inspect.unwrap(optimizer_class.step)(double)
