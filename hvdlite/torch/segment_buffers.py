"""Parameters and optimizer state of one segment, in flat buffers of the layout of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdlite.torch.flat_gradients import FlatGradients
from hvdlite.torch.optimizer_kernels import ParameterRun

Tensor = torch.Tensor


class SegmentParameter:
    """One parameter of a segment."""

    __slots__ = ("address", "gradient", "index", "number", "parameter", "state")

    def __init__(self, parameter: Tensor, gradient: Tensor, number: int, index: int) -> None:
        """Describe a parameter by its `index` in this segment and its `number` in all of them."""
        self.parameter = parameter
        self.gradient = gradient
        self.number = number
        self.index = index
        self.address = parameter.data_ptr()  # The parameter lies in the buffer already.
        # The views that the optimizer's state should have for this parameter, by name.
        self.state: dict[str, Tensor] = {}

    def is_in_buffers(self) -> bool:
        """Return whether parameter and gradient lie in the buffers: the user replaced neither."""
        parameter = self.parameter
        return parameter.grad is self.gradient and parameter.data_ptr() == self.address


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
        self._state: dict[str, tuple[Tensor, list[Tensor]]] = {}

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
            buffer = self.layout.allocate()
            self._state[name] = buffer, self.layout.views(buffer)
        return self._state[name][1][member.index]

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
                run.state[name] = self._state[name][0][span]
        return run
