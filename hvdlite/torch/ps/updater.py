"""What a server makes of an optimizer of PyTorch: it steps over the server's flat blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowStore
from hvdlite.ps.tables.row_table import AddedRows
from hvdlite.torch.dtypes import as_array
from hvdlite.torch.ps.arrays import tensor_of
from hvdlite.torch.sharded_state.elementwise import step_over

NUMBERS = (bool, int, float)
State = dict[str, Any]
_COMMON, _SLOT = "common.", "slot."
_VECTORS = 128  # A multiple of the elements that PyTorch treats at once, on all processors.


class TorchUpdater:
    """Steps with the user's own optimizer, whose parameters become the blocks of this server.

    Nothing of it is sent or unpickled: the server runs the same script as the workers.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, described: TableDescription, *, whole: bool = False
    ) -> None:
        """Let `whole` tensors keep their shapes; else each block is one flat parameter."""
        self._optimizer = optimizer
        self._blocks = described.blocks
        self._shapes = described.shapes(whole=whole)
        self._memory: list[torch.Tensor] = []  # Of each block.
        self._parameters: list[torch.nn.Parameter] = []
        self._copies: dict[int, Array] = {}

    def begin(self, values: Sequence[Array]) -> None:
        """See `Updater`."""
        self._memory = [tensor_of(array) for array in values]
        self._parameters = []
        for group in self._optimizer.param_groups:
            group["params"] = []
        self._optimizer.state.clear()
        for number, block in enumerate(self._blocks):
            for tensor in self._cut(number, self._memory[number]):
                self._parameters.append(torch.nn.Parameter(tensor))
                group = self._optimizer.param_groups[block.group]
                group["params"].append(self._parameters[-1])

    def _cut(self, number: int, block: torch.Tensor) -> list[torch.Tensor]:
        """Return what a block consists of, in memory that they share."""
        shapes = self._shapes[number]
        if shapes == [(-1,)]:
            return [block]
        pieces = torch.split(block, [prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def values(self) -> list[Array]:
        """See `Updater`."""
        return [as_array(block) for block in self._memory]

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        for group, given in zip(self._optimizer.param_groups, numbers, strict=False):
            group.update(given)
        pieces = [
            piece
            for number, gradient in enumerate(gradients)
            for piece in self._cut(number, self._own(number, gradient))
        ]
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def _own(self, number: int, gradient: Array) -> torch.Tensor:
        """Return a tensor that an optimizer may change, in memory that is used again."""
        if not gradient.flags.writeable:
            kept = self._copies.setdefault(number, np.empty_like(gradient))
            np.copyto(kept, gradient)
            gradient = kept
        return tensor_of(gradient)

    def state(self) -> dict[str, Array]:
        """See `Updater`: names are ``NUMBER.KEY``, with the numbers of parameters.

        Numbers that are no tensors have 0 dimensions.
        """
        found = {}
        for number, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{number}.{key}"] = as_array(value).reshape(value.shape)
                elif isinstance(value, NUMBERS):
                    found[f"{number}.{key}.number"] = np.array(value, np.float64)
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""
        for name, array in state.items():
            number, _, key = name.partition(".")
            own = self._optimizer.state[self._parameters[int(number)]]
            if key.endswith(".number"):
                value = array.item()
                own[key.removesuffix(".number")] = int(value) if value.is_integer() else value
            else:
                own[key] = tensor_of(array)


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group that are numbers, or pairs of them."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            found[key] = value.item()
        elif isinstance(value, NUMBERS):
            found[key] = value
        elif (
            isinstance(value, (tuple, list))
            and value
            and all(isinstance(each, NUMBERS) for each in value)
        ):
            found[key] = tuple(value)
    return found


# How a server steps over the rows that were pushed, with the user's own optimizer of PyTorch.
#
# Rows that nobody has pushed do not change, nor does the state of the optimizer that belongs to
# them, as with torch.optim.SparseAdam: their momentum waits. What is one for all rows, such as the
# count of steps, moves on with each step of the table.


class TorchRows(AddedRows):
    """Makes the steps of a parameter group on some rows of one of its parameters."""

    def __init__(
        self, store: RowStore, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
    ) -> None:
        super().__init__(store)
        self._optimizer = optimizer
        self._group = {key: value for key, value in group.items() if key != "params"}
        self._common: State = {}
        self._has_state = False

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        ids, rows = gradients
        for given in numbers[:1]:
            self._group.update(given)
        places = self.store.places(ids)
        parameter = torch.nn.Parameter(_flat(self.store.values[places]))
        if self._has_state:
            state = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in self._common.items()
            }
            state |= {key: _flat(slot[places]) for key, slot in self.store.slots.items()}
        else:
            state = self._first_state(parameter)
        self._step(parameter, _flat(rows), state)
        self.store.values[places] = _rows(parameter, rows.shape)
        self._keep(places, state, parameter.numel(), rows.shape)

    def _step(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, state: State) -> None:
        """Make a step of one parameter, whose state is changed in place."""
        if isinstance(self._optimizer, torch.optim.SparseAdam):
            every = torch.arange(len(gradient))[None]
            gradient = torch.sparse_coo_tensor(
                every, gradient, gradient.shape, is_coalesced=True, check_invariants=False
            )
        parameter.grad = gradient
        states: defaultdict[Any, State] = defaultdict(dict)
        states[parameter] = state
        groups = [{**self._group, "params": [parameter]}]
        step_over(self._optimizer, type(self._optimizer), groups, states)
        state.update(states[parameter])

    def _first_state(self, parameter: torch.nn.Parameter) -> State:
        """Return what a new optimizer has for a parameter: mostly nothing, until its first step."""
        defaults = {key: self._group[key] for key in self._optimizer.defaults}
        if not isinstance(self._optimizer, torch.optim.Adagrad):  # It makes its state when made.
            return {}
        return dict(type(self._optimizer)([parameter], **defaults).state[parameter])

    def _keep(
        self, places: NDArray[np.int64], state: State, size: int, shape: tuple[int, ...]
    ) -> None:
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                self._common[key] = value
                continue
            if tuple(value.shape) != (size,):
                raise ValueError(
                    f"{type(self._optimizer).__name__} keeps {key!r} of shape "
                    f"{tuple(value.shape)} for {size} elements: rows need an optimizer that "
                    "treats each element on its own, as SGD, Adagrad and Adam do"
                )
            if key not in self.store.slots:
                fill = self._first_values()[key]
                self.store.add_slot(key, fill, as_array(value).dtype)
            self.store.slots[key][places] = _rows(value, shape)
        self._has_state = True

    def _first_values(self) -> dict[str, float]:
        """Return what the state of rows that were never pushed is: a step of zeros leaves it so."""
        zeros = torch.zeros_like(_flat(self.store.values[:1]))
        parameter = torch.nn.Parameter(zeros.clone())
        state = self._first_state(parameter)
        self._step(parameter, zeros, state)
        return {
            key: value.reshape(-1)[0].item()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }

    def state(self) -> dict[str, Array]:
        """See `Updater`: what belongs to the rows, and what is one for all of them."""
        found = {_SLOT + key: slot for key, slot in self.store.slots.items()}
        for key, value in self._common.items():
            if isinstance(value, torch.Tensor):
                found[_COMMON + key] = as_array(value).reshape(value.shape)
            elif isinstance(value, NUMBERS):
                found[f"{_COMMON}{key}.number"] = np.array(value, np.float64)
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""
        first = self._first_values() if state else {}
        for name, array in state.items():
            if name.startswith(_SLOT):
                key = name.removeprefix(_SLOT)
                self.store.add_slot(key, first[key], array.dtype)
                self.store.slots[key][:] = array.reshape(len(self.store), self.store.spec.length)
            elif name.endswith(".number"):
                value = array.item()
                key = name.removeprefix(_COMMON).removesuffix(".number")
                self._common[key] = int(value) if value.is_integer() else value
            else:
                self._common[name.removeprefix(_COMMON)] = tensor_of(array.copy())
        self._has_state = bool(state)


def _flat(array: Array) -> torch.Tensor:
    """Return rows as a flat tensor, with zeros behind them up to a whole number of vectors.

    PyTorch rounds the last elements, which do not fill a vector, in another way than all others: a
    row's step would depend on the rows beside it, and so on the number of servers.
    """
    padded = np.zeros(-(-max(1, array.size) // _VECTORS) * _VECTORS, array.dtype)
    padded[: array.size] = array.reshape(-1)
    return tensor_of(padded)


def _rows(tensor: torch.Tensor, shape: tuple[int, ...]) -> Array:
    return as_array(tensor)[: prod(shape)].reshape(shape)
