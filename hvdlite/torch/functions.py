"""Broadcasts of parameters, optimizer state and Python objects.

The state of an optimizer is sent in two parts: a pickled skeleton, and the memory of its tensors.
Kernels that treat a parameter, its gradient and its state as flat memory need the same order of
elements in all of them. A tensor is therefore sent as the memory that it shows, and gets its
strides back. Tensors that share memory on the root share it on all other ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from hvdlite import as_horovod
from hvdlite.common.api.objects import allgather_object, broadcast_object
from hvdlite.common.gradients.compressed_bucket import shared_part
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.torch import mpi_ops
from hvdlite.torch.subclass import OptimizerMixin

# Blocks begin at multiples of the size of the largest elements, so that they fit every dtype.
ALIGNMENT_BYTES = 16
Span = tuple[int, int]  # the offsets of the first byte, and of the one after the last


@dataclass(frozen=True)
class _Block:
    """The description of a block of memory, of which tensors of the state are views."""

    size_bytes: int
    device: str  # the device on the root


@dataclass(frozen=True)
class _View:
    """The description of a tensor that the skeleton leaves out."""

    block: int
    offset_bytes: int  # from the beginning of the block
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def show(self, block: torch.Tensor) -> torch.Tensor:
        """Return the tensor that shows this part of `block`, a row of bytes."""
        start = block.storage_offset() + self.offset_bytes
        tensor = torch.empty(0, dtype=self.dtype, device=block.device)
        storage = block.untyped_storage()
        return tensor.set_(storage, start // self.dtype.itemsize, self.shape, self.strides)


@dataclass(frozen=True)
class _Parameter:
    """The device and the memory layout of the root's parameter of this position."""

    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Parameter:
        return cls(str(tensor.device), tuple(tensor.shape), tensor.stride())


@dataclass
class OptimizerState:
    """The state and the options of an optimizer; pickled without the memory of its tensors."""

    skeleton: bytes
    views: list[_View]
    blocks: list[_Block]
    parameters: list[_Parameter]
    # The memory of each block, uint8, of shape ``(size_bytes,)``. It is broadcast separately.
    memory: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the state of `optimizer`; `memory` is the memory of the optimizer's tensors."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        state = optimizer.state_dict()
        if "compression" in state:  # Without residuals, which are those of this rank alone.
            state = {**state, "compression": shared_part(state["compression"])}
        pickler.dump(state)
        views, memory = _blocks_of(pickler.tensors)
        blocks = [_Block(block.numel(), str(block.device)) for block in memory]
        parameters = [_Parameter.of(parameter) for parameter in _parameters(optimizer)]
        return cls(file.getvalue(), views, blocks, parameters, memory)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "memory": []}

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        """Allocate `memory`, without values, for an optimizer that will adopt this state.

        State on the device of one of the root's parameters goes to the device of the same parameter
        on this rank.
        """
        # `install` raises the error for different numbers of parameters.
        pairs = zip(self.parameters, _parameters(optimizer), strict=False)
        devices = {root_parameter.device: parameter.device for root_parameter, parameter in pairs}
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
        root_sizes = [len(group["params"]) for group in saved["param_groups"]]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if root_sizes != sizes:
            raise ValueError(
                "the optimizer of the root rank has groups of other sizes: "
                f"{root_sizes} parameters there, {sizes} here"
            )
        for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
        load_compression = getattr(optimizer, "load_compression", None)
        if load_compression is not None:
            load_compression(saved)
        parameters = _parameters(optimizer)
        optimizer.state.clear()
        for key, value in saved["state"].items():
            if isinstance(key, int) and key < len(parameters):
                _follow_strides(value, self.parameters[key], parameters[key])
                optimizer.state[parameters[key]] = value
            else:
                optimizer.state[key] = value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _follow_strides(state: Any, root_parameter: _Parameter, parameter: torch.Tensor) -> None:
    """Give state the strides of its parameter on this rank, where it had those of the root's.

    Models can be in channels_last on some ranks only.
    """
    if not isinstance(state, dict) or parameter.stride() == root_parameter.strides:
        return
    for name, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.shape == root_parameter.shape == parameter.shape
            and value.stride() == root_parameter.strides
        ):
            copy = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
            state[name] = copy.copy_(value)


# -- tensors as views of memory


def _blocks_of(tensors: Sequence[torch.Tensor]) -> tuple[list[_View], list[torch.Tensor]]:
    """Return the tensors as views of blocks, and the blocks, which are as small as possible."""
    spans = [span_of(tensor) for tensor in tensors]
    numbers_of_storage: dict[tuple[str, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        key = str(tensor.device), tensor.untyped_storage().data_ptr()
        numbers_of_storage.setdefault(key, []).append(number)
    views: list[Any] = [None] * len(tensors)
    memory: list[torch.Tensor] = []
    for numbers in numbers_of_storage.values():
        for begin, end, merged in _merge((spans[number], number) for number in numbers):
            for number in merged:
                tensor = tensors[number]
                views[number] = _View(
                    len(memory),
                    spans[number][0] - begin,
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.stride(),
                )
            storage = tensors[merged[0]].untyped_storage()
            block = torch.empty(0, dtype=torch.uint8, device=tensors[merged[0]].device)
            memory.append(block.set_(storage, begin, (end - begin,), (1,)))
    return views, memory


def span_of(tensor: torch.Tensor) -> Span:
    """Return the bytes of its storage from the first to the last element, gaps included."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in sizes)
    return begin, begin + elements * tensor.element_size()


def _merge(spans: Iterable[tuple[Span, int]]) -> Iterable[tuple[int, int, list[int]]]:
    """Return spans that overlap as one span, with the numbers of all that are in it."""
    merged: list[tuple[int, int, list[int]]] = []
    for (begin, end), number in sorted(spans):
        if merged and begin < merged[-1][1]:
            first, last, numbers = merged.pop()
            merged.append((first, max(last, end), [*numbers, number]))
        else:
            merged.append((begin - begin % ALIGNMENT_BYTES, end, [number]))
    return merged


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that collects strided tensors instead of pickling them.

    Tensors of other layouts, sparse ones for example, are pickled: their parts are strided tensors.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # the index in `tensors`, by id of the object
        # The objects of these ids: while they are alive, no other object gets their ids.
        self._kept: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self._kept.append(obj)
            self.tensors.append(obj.detach().resolve_conj().resolve_neg())
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    """An unpickler that inserts the tensors again."""

    def __init__(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | list[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy tensors of the global rank `root_rank` to all ranks, in place; blocks.

    `params` is a dict such as ``model.state_dict()`` (in the order of its keys), or a list of
    tensors or of ``(name, tensor)`` tuples; None among the tensors is left out. Every rank
    gives tensors of the same shapes and dtypes. Raises `ValueError` for anything else.
    """
    if isinstance(params, Mapping):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; give a dict or a list")
    handles = [
        mpi_ops.broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in named
        if tensor is not None
    ]
    for handle in handles:
        mpi_ops.synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the state and the options of an optimizer from the global rank `root_rank`; blocks.

    The state of the optimizer must belong to its parameters, and all ranks have the same
    parameters. Ranks without state get it without a step: tensors with the strides that they have
    on the root, which share memory where they do so there. `model` has no effect.

    Raises `ValueError` for LBFGS, whose state does not belong to parameters, and on a rank whose
    optimizer has other parameters than the root's.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")

    def send(blocks: list[torch.Tensor]) -> None:
        named = [(f"optimizer_state.{index}", block) for index, block in enumerate(blocks)]
        broadcast_parameters(named, root_rank, process_set)

    share_optimizer_state(optimizer, root_rank, process_set, send)


def share_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    process_set: ProcessSet,
    send: Callable[[list[torch.Tensor]], None],
) -> None:
    """Do the work of `broadcast_optimizer_state`; `send` broadcasts blocks of bytes in place."""
    if isinstance(optimizer, OptimizerMixin) and optimizer.share_state(root_rank, process_set):
        return
    is_root = mpi_ops.rank() == root_rank
    state = OptimizerState.of(optimizer) if is_root else None
    state = broadcast_object(state, root_rank, "optimizer_state", process_set)
    if not is_root:
        state.allocate(optimizer)
    send(state.memory)
    if not is_root:
        state.install(optimizer)
    leave_zero_gradients(optimizer)


def leave_zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give each trainable parameter without a gradient zeros, under the name horovod only.

    Horovod leaves such gradients behind, and some scripts rely on them: they broadcast ``p.grad``.
    """
    if not as_horovod.active():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
