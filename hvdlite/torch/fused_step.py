"""An optimizer's step over segments: one kernel for many parameters.

The gradients of a segment lie in one buffer (`FlatGradients`). Its parameters, and the state of the
optimizer, move to buffers of the same layout; Parameter objects and ``optimizer.state`` stay what
they are, and show views. Neighbours in the buffer that the optimizer treats alike are a run, and
its formula, which is torch's own, sees one flat tensor for each run.

What does not lie where it should is in no run: a parameter without a gradient, one of no segment,
and one whose ``data`` or ``grad`` the user has replaced. The optimizer's ordinary step does what is
right with those.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.autograd.graph import increment_version

from hvdlite.torch.flat_gradients import FlatGradients
from hvdlite.torch.optimizer_kernels import Formula, Run, formula_of

Tensor = torch.Tensor
ParamGroups = list[dict[str, Any]]
_NOWHERE = -1  # the group of a parameter that is in no run


class _Part:
    """One parameter in its segment."""

    __slots__ = ("address", "gradient", "index", "number", "parameter", "state")

    def __init__(self, parameter: Tensor, gradient: Tensor, number: int, index: int) -> None:
        self.parameter = parameter
        self.gradient = gradient
        self.number = number  # among the parts of all segments
        self.index = index  # in the segment
        self.address = parameter.data_ptr()  # in the buffer
        self.state: dict[str, Tensor] = {}  # the views that the optimizer's state should have

    def at_home(self) -> bool:
        """Whether parameter and gradient lie in the buffers."""
        parameter = self.parameter
        return parameter.grad is self.gradient and parameter.data_ptr() == self.address


@dataclass
class _Run(Run):
    """Neighbours in one segment."""

    parts: Sequence[_Part] = ()
    other_steps: Tensor | None = None  # how often all but the first were changed


class _Segment:
    """The flat buffers of one segment; those of the optimizer's state come when they are needed."""

    def __init__(self, flat: FlatGradients, first: int) -> None:
        self.layout, self.gradient = flat.layout, flat.buffer
        self.data = self.layout.allocate()
        self.parts: list[_Part] = []
        places = zip(flat.parameters, self.layout.views(self.data), strict=True)
        for index, (parameter, place) in enumerate(places):
            parameter.data = place.copy_(parameter.data)
            self.parts.append(_Part(parameter, flat.view(parameter), first + index, index))
        self.steps = torch.zeros(len(self.parts))
        self._state: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def count_on(self, device: torch.device) -> None:
        """Keep there how many steps were made with each parameter."""
        if self.steps.device != device:
            self.steps = self.steps.to(device)
            for part in self.parts:
                part.state.pop("step", None)

    def place(self, name: str, part: _Part) -> Tensor:
        """Where the state `name` of a parameter belongs."""
        if name == "step":
            return self.steps[part.index]
        if name not in self._state:
            buffer = self.layout.allocate()
            self._state[name] = buffer, self.layout.views(buffer)
        return self._state[name][1][part.index]

    def run(self, parts: Sequence[_Part], names: Sequence[str], fresh: bool) -> _Run:
        """Some neighbours as one."""
        first, last = parts[0].index, parts[-1].index
        piece = slice(self.layout.offsets[first], self.layout.ends[last])
        run = _Run(self.data[piece], self.gradient[piece], fresh)
        run.parts = parts
        for name in names:
            if name == "step":  # that of the first is counted, the others follow
                run.state[name] = self.steps[first]
                run.other_steps = self.steps[first + 1 : last + 1]
            else:
                run.state[name] = self._state[name][0][piece]
        return run


class FusedStep:
    """The steps of one optimizer."""

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, segments: Sequence[FlatGradients]
    ) -> tuple[FusedStep | None, str]:
        """Make it, and move the parameters; or else say why this cannot be, and move nothing.

        `optimizer` is a plain SGD, Adam or AdamW of torch, or what `DistributedOptimizer` has made
        of one. Its parameters must not be in other segments than `segments`; some may be in none.
        Those of one group should stand side by side in a segment: they become one tensor then.
        """
        formula = formula_of(optimizer)
        reason = _reason_against(formula, optimizer, segments)
        if formula is None or reason:
            return None, reason
        return cls(formula, optimizer, segments), ""

    @torch.no_grad()
    def __init__(
        self,
        formula: Formula,
        optimizer: torch.optim.Optimizer,
        segments: Sequence[FlatGradients],
    ) -> None:
        """For what `of` has found good."""
        self._formula, self._optimizer = formula, optimizer
        self._segments: list[_Segment] = []
        self._parts: dict[Tensor, _Part] = {}
        for flat in segments:
            segment = _Segment(flat, len(self._parts))
            self._segments.append(segment)
            self._parts.update((part.parameter, part) for part in segment.parts)
        self._calls: list[tuple[int, list[_Run]]] = []  # (group, what is treated alike)
        self._plan: object = None  # what `_calls` was made for

    @torch.no_grad()
    def step(self) -> None:
        """Change all parameters that have a gradient, with the options of this moment.

        The hooks of the optimizer are not called. Raises what torch raises for the options.
        """
        groups: ParamGroups = self._optimizer.param_groups
        membership, others = self._look(groups)
        names = [self._formula.names(group) for group in groups]
        plan = membership, names, self._step_versions()
        if plan != self._plan or not self._owns_state(membership):
            self._make_runs(membership, names, groups)
        scaler = self._scaler()
        for number, runs in self._calls:
            self._formula.apply(groups[number], runs, scaler)
        new_state = self._settle()
        if any(others):
            self._ordinary_step(groups, others)
        self._plan = None if new_state else (membership, names, self._step_versions())

    def _step_versions(self) -> list[int]:
        """These tell whether somebody else has written to a count of steps."""
        return [segment.steps._version for segment in self._segments]

    def _look(self, groups: ParamGroups) -> tuple[list[int], list[list[Tensor]]]:
        """The group of each part that is in a run; and by groups, all other parameters."""
        membership = [_NOWHERE] * len(self._parts)
        others: list[list[Tensor]] = [[] for _ in groups]
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                part = self._parts.get(parameter)
                if part is not None and part.at_home():
                    membership[part.number] = number
                elif parameter.grad is not None:
                    others[number].append(parameter)
        return membership, others

    def _owns_state(self, membership: list[int]) -> bool:
        """Whether the optimizer's state shows the buffers: nobody has loaded or replaced it."""
        state = self._optimizer.state
        for part, group in zip(self._parts.values(), membership, strict=True):
            if group != _NOWHERE and part.state:
                own = state.get(part.parameter, {})
                for name, view in part.state.items():
                    if own.get(name) is not view:
                        return False
        return True

    def _make_runs(
        self, membership: list[int], names: list[tuple[str, ...]], groups: ParamGroups
    ) -> None:
        """Bring the state to the buffers, and find neighbours that are treated alike."""
        calls: dict[tuple[object, ...], tuple[int, list[_Run]]] = {}
        on_device = any(group.get("fused") for group in groups)
        for segment in self._segments:
            segment.count_on(segment.data.device if on_device else torch.device("cpu"))
            fresh = {
                part.number
                for part in segment.parts
                if membership[part.number] != _NOWHERE
                and self._adopt(segment, part, names[membership[part.number]])
            }
            steps = segment.steps.tolist()
            keys = {
                part: (membership[part.number], part.number in fresh, steps[part.index])
                for part in segment.parts
            }
            for (group, is_fresh, _), parts in groupby(segment.parts, keys.__getitem__):
                if group != _NOWHERE:
                    kind = group, is_fresh, segment.layout.dtype, segment.layout.device
                    run = segment.run([*parts], names[group], is_fresh)
                    calls.setdefault(kind, (group, []))[1].append(run)
        self._calls = [*calls.values()]

    def _adopt(self, segment: _Segment, part: _Part, names: Sequence[str]) -> bool:
        """Let the state of one parameter live in the buffers. Whether the step has to make it."""
        part.state = {
            name: part.state[name] if name in part.state else segment.place(name, part)
            for name in names
        }
        fresh = False
        for name, place in part.state.items():
            own = self._optimizer.state[part.parameter]
            value = own.get(name)
            if value is None and self._formula.knows_fresh:
                fresh = True  # it becomes visible after the step
                continue
            if value is None:
                place.zero_()
            elif value is not place:
                place.copy_(torch.as_tensor(value))
            own[name] = place
        return fresh

    def _settle(self) -> bool:
        """Let everything that shows the buffers know of the step. Whether there is new state."""
        new = False
        for _, runs in self._calls:
            for run in runs:
                # Backward through a graph of before the step would compute with changed values:
                # with this it is an error, as after every step of torch's.
                for part in run.parts:
                    increment_version(part.parameter)
                if run.other_steps is not None:
                    run.other_steps.copy_(run.state["step"])
                if run.fresh:
                    new = True
                    for part in run.parts:
                        self._optimizer.state[part.parameter].update(part.state)
        return new

    def _scaler(self) -> dict[str, Any]:
        """What ``torch.amp.GradScaler`` has left for an optimizer that was made with fused=True."""
        names = "grad_scale", "found_inf"
        return {name: getattr(self._optimizer, name, None) for name in names}

    def _ordinary_step(self, groups: ParamGroups, parameters: list[list[Tensor]]) -> None:
        """The optimizer's own step for some parameters, by groups, without its hooks."""
        kind = self._formula.kind
        double = object.__new__(kind)
        double.__dict__.update(vars(self._optimizer))  # its state, above all
        double.__dict__["param_groups"] = [
            {**group, "params": some} for group, some in zip(groups, parameters, strict=True)
        ]
        inspect.unwrap(kind.step)(double)


def _reason_against(
    formula: Formula | None, optimizer: torch.optim.Optimizer, segments: Sequence[FlatGradients]
) -> str:
    """Why the step cannot be fused; empty when it can."""
    if formula is None:
        return (
            f"{type(optimizer).__name__} is not one of torch's SGD, Adam and AdamW, or changes "
            "their step"
        )
    for number, group in enumerate(optimizer.param_groups):
        for option in ("differentiable", "capturable"):
            if group.get(option):
                return f"group {number} of the optimizer has {option}=True"
    parameters = [parameter for flat in segments for parameter in flat.parameters]
    group_of = {p: n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if len(set(parameters)) < len(parameters):
        return "a parameter is in two segments"
    for parameter in parameters:
        reason = _reason_against_parameter(parameter, parameter in group_of)
        if reason:
            return f"a parameter of shape {tuple(parameter.shape)} {reason}"
    if not any(
        group_of[one] == group_of[next_one]
        for flat in segments
        for one, next_one in pairwise(flat.parameters)
    ):
        return "no segment has two neighbouring gradients of one group of the optimizer"
    return _reason_against_memory(parameters)


def _reason_against_parameter(parameter: Tensor, known: bool) -> str:
    if not known:
        return "is in a segment, but not in the optimizer"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}: flat buffers are for real numbers"
    if type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
        return f"is a {type(parameter.data).__name__} of layout {parameter.layout}"
    return ""


def _reason_against_memory(parameters: Sequence[Tensor]) -> str:
    """Two parameters that share memory would come apart when they move."""
    spans = []
    for parameter in parameters:
        if parameter.numel():
            sizes = zip(parameter.shape, parameter.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in sizes)
            begin = parameter.data_ptr()
            end = begin + reach * parameter.element_size()
            spans.append((str(parameter.device), begin, end, tuple(parameter.shape)))
    for (device, _, end, shape), (next_device, begin, _, next_shape) in pairwise(sorted(spans)):
        if device == next_device and begin < end:
            return f"parameters of shapes {shape} and {next_shape} share memory"
    return ""
