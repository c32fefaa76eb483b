"""An optimizer's state in two parts: a skeleton that is pickled, and the memory of its tensors.

Kernels that go over a parameter, its gradient and its state as flat memory need all of them in one
order. A tensor is therefore sent as the memory that it shows, and gets its strides back; tensors
that share memory on the root share it on all other ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

ALIGNMENT_BYTES = 16  # no dtype has larger elements: a part of memory that begins here fits all
Span = tuple[int, int]  # addresses of the first byte and of the one after the last


@dataclass(frozen=True)
class _Block:
    """Memory of which tensors of the state are views."""

    size_bytes: int
    device: str  # of the root


@dataclass(frozen=True)
class _View:
    """A tensor that was taken out of the skeleton."""

    block: int
    offset_bytes: int  # from the beginning of the block
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def show(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor that shows this part of `block`, a row of bytes."""
        start = block.storage_offset() + self.offset_bytes
        tensor = torch.empty(0, dtype=self.dtype, device=block.device)
        storage = block.untyped_storage()
        return tensor.set_(storage, start // self.dtype.itemsize, self.shape, self.strides)


@dataclass(frozen=True)
class _Parameter:
    """What the root's parameter of this position looks like."""

    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Parameter:
        return cls(str(tensor.device), tuple(tensor.shape), tensor.stride())


@dataclass
class OptimizerState:
    """The state and the options of an optimizer. The memory of its tensors is not pickled."""

    skeleton: bytes
    views: list[_View]
    blocks: list[_Block]
    parameters: list[_Parameter]
    memory: list[torch.Tensor] = field(default_factory=list)  # of each block, uint8, one row

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Take a state apart; `memory` is that of the optimizer's own tensors."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(optimizer.state_dict())
        views, memory = _blocks_of(pickler.tensors)
        blocks = [_Block(each.numel(), str(each.device)) for each in memory]
        parameters = [_Parameter.of(each) for each in _parameters(optimizer)]
        return cls(file.getvalue(), views, blocks, parameters, memory)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "memory": []}

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `memory`, without values, for an optimizer that is to take over this state.

        What is on the device of one of the root's parameters is made on that of the same parameter
        here.
        """
        pairs = zip(self.parameters, _parameters(optimizer), strict=False)  # `install` complains
        devices = {theirs.device: own.device for theirs, own in pairs}
        self.memory = [
            torch.empty(
                block.size_bytes,
                dtype=torch.uint8,
                device=devices.get(block.device, block.device),
            )
            for block in self.blocks
        ]

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Make this the state of `optimizer`. Raises `ValueError` where it does not fit."""
        tensors = [view.show(self.memory[view.block]) for view in self.views]
        saved = _Unpickler(self.skeleton, tensors).load()
        theirs = [len(group["params"]) for group in saved["param_groups"]]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if theirs != ours:
            raise ValueError(
                "the optimizer of the root rank has groups of other sizes: "
                f"{theirs} parameters there, {ours} here"
            )
        for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
        own = _parameters(optimizer)
        optimizer.state.clear()
        for key, value in saved["state"].items():
            if isinstance(key, int) and key < len(own):
                _follow_layout(value, self.parameters[key], own[key])
                optimizer.state[own[key]] = value
            else:
                optimizer.state[key] = value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _follow_layout(state: Any, theirs: _Parameter, own: torch.Tensor) -> None:
    """Lay the state out as its parameter is here, where it was so on the root.

    Models can be in channels_last on some ranks only.
    """
    if not isinstance(state, dict) or own.stride() == theirs.strides:
        return
    for name, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.shape == theirs.shape == own.shape
            and value.stride() == theirs.strides
        ):
            state[name] = torch.empty_like(own, dtype=value.dtype, device=value.device).copy_(value)


# -- tensors as views of memory


def _blocks_of(tensors: Sequence[torch.Tensor]) -> tuple[list[_View], list[torch.Tensor]]:
    """Each tensor as a view, and the blocks: the least that shows all tensors."""
    spans = [_span(tensor) for tensor in tensors]
    of_storage: dict[tuple[str, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        key = str(tensor.device), tensor.untyped_storage().data_ptr()
        of_storage.setdefault(key, []).append(number)
    views: list[Any] = [None] * len(tensors)
    memory: list[torch.Tensor] = []
    for numbers in of_storage.values():
        for begin, end, parts in _merged((spans[number], number) for number in numbers):
            for number in parts:
                tensor = tensors[number]
                views[number] = _View(
                    len(memory),
                    spans[number][0] - begin,
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.stride(),
                )
            memory.append(_bytes_of(tensors[parts[0]], begin, end))
    return views, memory


def _span(tensor: torch.Tensor) -> Span:
    """The bytes of its storage from the first to the last element, gaps included."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in sizes)
    return begin, begin + elements * tensor.element_size()


def _merged(spans: Iterable[tuple[Span, int]]) -> Iterable[tuple[int, int, list[int]]]:
    """Spans that overlap as one, with the numbers of all that are in it."""
    merged: list[tuple[int, int, list[int]]] = []
    for (begin, end), number in sorted(spans):
        if merged and begin < merged[-1][1]:
            first, last, numbers = merged.pop()
            merged.append((first, max(last, end), [*numbers, number]))
        else:
            merged.append((begin - begin % ALIGNMENT_BYTES, end, [number]))
    return merged


def _bytes_of(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A part of the storage of `tensor`."""
    bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return bytes_.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles everything but tensors, which it collects.

    Tensors of other layouts are pickled with their parts, which are tensors.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # by id, of `_kept`
        self._kept: list[torch.Tensor] = []  # alive, so that no other object gets their ids

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self._kept.append(obj)
            self.tensors.append(obj.detach().resolve_conj().resolve_neg())
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]
