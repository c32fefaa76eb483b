"""A planned part as an ordinary module on local tensors, with the planned collectives in it.

The calls of a trace become a graph of torch.fx. Between them stand `Move`s, wherever an operator
wants a tensor in another layout than it has, or computes summands of its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from hvdlite.common.layouts.exchange import coordinates_of, repeated, same_parts
from hvdlite.common.layouts.layout import Layout, whole
from hvdlite.common.layouts.operators import Operator, layout_of, summed_gradient
from hvdlite.common.layouts.propagation import Choice
from hvdlite.common.layouts.transfer import bytes_to_receive
from hvdlite.torch.sharding.collectives import Collectives
from hvdlite.torch.sharding.graph.builder import Builder
from hvdlite.torch.sharding.graph.moves import Move, Summed
from hvdlite.torch.sharding.planning.calls import Call, is_ref
from hvdlite.torch.sharding.planning.tracing import Traced
from hvdlite.torch.sharding.rules import pieces
from hvdlite.torch.sharding.rules.rule import Site
from hvdlite.torch.sharding.shares import scale_gradient, share_layout

# The gradients of larger parameters are summed one by one, while backward goes on.
_SMALL_BYTES = 1 << 18


@dataclass(frozen=True)
class Lowered:
    """A part on local tensors: its graph, and what goes in and comes out.

    The graph takes the tensors `inputs` and then those of the names `leaves`, and returns a list
    of the outputs. `warnings` has operators that run on whole inputs, with the bytes received.
    """

    graph: GraphModule
    leaves: list[str]
    seed: pieces.Seed
    draws: bool
    warnings: list[tuple[str, int]]


@dataclass(frozen=True)
class _Value:
    """A tensor in the graph: what this rank holds of it.

    `summed`: positions of the layout's device matrix along which ranks hold summands. `is_made`:
    no input and no parameter is in it, so that every rank has all of it.
    """

    node: Any
    shape: tuple[int, ...]
    layout: Layout
    summed: Summed = ()
    is_made: bool = False


class Lowering:
    """Builds the graph of one plan, for this rank."""

    def __init__(
        self,
        traced: Traced,
        operators: Sequence[Operator],
        choices: Mapping[str, Choice],
        leaves: Mapping[str, Layout],
        collectives: Collectives,
        device: Any,
        shared: Sequence[bool] = (),
    ) -> None:
        """`leaves`: how parameters and buffers are held. `shared`: inputs that all ranks have."""
        self._traced, self._record = traced, traced.record
        self._operators = {each.name: each for each in operators}
        self._choices = choices
        self._leaves = leaves
        self._collectives = collectives
        self._ranks = collectives.ranks
        self._device = device
        self._shared = shared or [False] * len(traced.inputs)
        self._builder = Builder(collectives)
        self._values: dict[str, _Value] = {}
        self._moved: dict[Any, Any] = {}
        self._seed, self._draws = pieces.Seed(), 0
        self._warnings: list[tuple[str, int]] = []
        self._held_products: dict[str, Call] = {}
        self._leaf_nodes: dict[Any, str] = {}
        self._wishes = self._all_wishes()

    def run(self) -> Lowered:
        """Return the graph."""
        self._inputs()
        names = {each for call in self._record.calls for each in call.inputs}
        names |= set(self._traced.outputs)
        used = [each for each in self._leaves if each in names]
        for name in used:
            node = self._builder.input(f"leaf{len(self._values)}")
            self._values[name] = _Value(node, self._record.shapes[name], self._leaves[name])
            self._leaf_nodes[node] = name
        for name, tensor in self._record.constants.items():
            buffer = f"constant{len(self._values)}"
            shape = tuple(tensor.shape)
            node = self._builder.constant(buffer, tensor)
            self._values[name] = _Value(node, shape, whole(len(shape), self._ranks), (), True)
        for call in self._record.calls:
            self._lower(call)
        outputs = [self._output(i, n) for i, n in enumerate(self._traced.outputs)]
        self._builder.join_sums(self._small_leaves())
        graph = self._builder.finish(outputs)
        return Lowered(graph, used, self._seed, self._draws > 0, self._warnings)

    # What goes in, and what comes out.

    def _inputs(self) -> None:
        for name, shared in zip(self._traced.inputs, self._shared, strict=True):
            node = self._builder.input(name)
            shape = self._record.shapes[name]
            if not shared:
                node = self._builder.function(scale_gradient, node, float(self._ranks))
            held = whole(len(shape), self._ranks) if shared else share_layout(shape, self._ranks)
            value = _Value(node, shape, held)
            if name in self._choices:  # A strategy for the input itself.
                self._values[f"{name} as it comes"] = value
                choice = self._choices[name]
                node = self._wanted(f"{name} as it comes", choice.inputs[0], ())
                value = _Value(node, shape, choice.output)
            self._values[name] = value

    def _output(self, index: int, name: str) -> Any:
        value = self._values[name]
        if value.is_made:  # All of it; an operator may have computed a part of it on each rank.
            return self._wanted(name, whole(len(value.shape), self._ranks), ())
        wanted, losses = self._leaving(index, name)
        node = self._wanted(name, wanted, losses)
        return self._builder.function(scale_gradient, node, 1 / self._ranks)

    def _leaving(self, index: int, name: str) -> tuple[Layout, Summed]:
        """Return how an output leaves: ranks with equal parts have losses of their own."""
        choice = self._choices.get(f"output{index}")
        shape = self._record.shapes[name]
        wanted = share_layout(shape, self._ranks) if choice is None else choice.output
        return wanted, repeated(wanted)

    # How operators want their inputs.

    def _all_wishes(self) -> dict[str, set[tuple[Layout, Summed]]]:
        """Return by tensor all layouts that it is wanted in."""
        wishes: dict[str, set[tuple[Layout, Summed]]] = {}
        for call in self._record.calls:
            if call.operator is not None:
                for name, wish in zip(call.inputs, self._wishes_of(call), strict=True):
                    wishes.setdefault(name, set()).add(wish)
        for index, name in enumerate(self._traced.outputs):
            wishes.setdefault(name, set()).add(self._leaving(index, name))
        return wishes

    def _wishes_of(self, call: Call) -> list[tuple[Layout, Summed]]:
        assert call.operator is not None
        operator, choice = self._operators[call.operator], self._choices[call.operator]
        by_name = {each.tensor: each for each in operator.inputs}
        return [
            (
                layout_of(operand, choice.cuts, self._ranks),
                summed_gradient(operand, choice.cuts),
            )
            for operand in (
                operator.inputs
                if len(operator.inputs) == len(call.inputs)
                else [by_name[each] for each in call.inputs]
            )
        ]

    def _wanted(self, name: str, wanted: Layout, gradient_summed: Summed) -> Any:
        """Return the node of a tensor in another layout.

        Raises `ValueError` for one without values that comes from elsewhere.
        """
        if name not in self._values:
            raise ValueError(
                f"a sharded part uses a tensor of shape {self._record.shapes[name]} that has no "
                "values, and that is no input, no parameter and no buffer: make one of them of it"
            )
        value = self._values[name]
        if value.summed and len(self._wishes.get(name, ())) > 1:
            # The sum of what is wanted in several layouts is taken only once.
            move = Move(
                value.shape, value.layout, value.summed, value.layout, (), self._collectives
            )
            node = self._builder.module(move, (value.node,))
            value = _Value(node, value.shape, value.layout, (), value.is_made)
            self._values[name] = value
        dtype = self._record.dtypes[name.removesuffix(" as it comes")]
        if value.is_made or not (dtype.is_floating_point or dtype.is_complex):
            gradient_summed = ()  # It has no gradient.
        stays = same_parts(value.layout, wanted, value.shape)
        if stays and not value.summed and not gradient_summed:
            return value.node
        key = (name, value.node, wanted, gradient_summed)
        if key not in self._moved:
            move = Move(
                value.shape, value.layout, value.summed, wanted, gradient_summed, self._collectives
            )
            self._moved[key] = self._builder.module(move, (value.node,))
        return self._moved[key]

    def _small_leaves(self) -> dict[Any, torch.dtype]:
        """Return the leaves of little memory that nobody changes: biases, and weights of norms."""
        changed = {name for call in self._record.calls for name in (call.changes, *call.updates)}
        found = {}
        for node, name in self._leaf_nodes.items():
            dtype, layout = self._record.dtypes[name], self._leaves[name]
            part = math.prod(self._record.shapes[name]) // math.prod(layout.cuts)
            if name not in changed and part * dtype.itemsize <= _SMALL_BYTES:
                found[node] = dtype
        return found

    # Calls.

    def _lower(self, call: Call) -> None:
        if call.operator is None:
            self._make(call)
            return
        operator, choice = self._operators[call.operator], self._choices[call.operator]
        if self._fuses(call, choice):
            self._held_products[call.outputs[0]] = call
            return
        product = self._held_products.get(call.inputs[0]) if call.inputs else None
        computed = product or call
        left = iter(self._nodes(computed))
        args, kwargs = tree_map(
            lambda each: next(left) if is_ref(each) else self._real(each),
            (computed.args, computed.kwargs),
        )
        target = computed.target
        if computed.rule is not None and computed.rule.local is not None:
            own = self._choices[computed.operator or ""]
            site = Site(own.cuts, own.output.device_matrix, self._collectives)
            target, args, kwargs = computed.rule.local(site, args, kwargs)
        if product is not None:
            args = (*args[:2], self._nodes(call)[1], *args[3:])
        made = all(self._values[each].is_made for each in computed.inputs)
        if call.operator in self._record.whole and not made:
            self._warn(call, choice)
        if call.draws:
            target = self._drawing(target, choice, operator)
        node = self._builder.operator(_in_modes(call, target), args, kwargs)
        if call.changes is not None:
            self._check_change(call, call.changes, choice.inputs[0])
            return
        for name in call.updates:
            self._check_change(call, name, choice.inputs[call.inputs.index(name)])
        complete = call.rule.complete if call.rule else frozenset()
        summed = tuple(
            axis for axis in operator.summed if choice.cuts[axis] > 1 and axis not in complete
        )
        for index, name in enumerate(call.outputs):
            one = node
            if call.picks:
                one = self._builder.function(getitem, node, call.picks[index])
            if call.detached:
                one = self._builder.operator(torch.ops.aten.detach.default, (one,), {})
            shape = self._record.shapes[name]
            layout = layout_of(operator.outputs[index], choice.cuts, self._ranks)
            self._values[name] = _Value(one, shape, layout, summed, made)

    def _nodes(self, call: Call) -> list[Any]:
        wishes = self._wishes_of(call)
        return [
            None if name in self._held_products else self._wanted(name, *wish)
            for name, wish in zip(call.inputs, wishes, strict=True)
        ]

    def _fuses(self, call: Call, choice: Choice) -> bool:
        """Return whether a product and the bias that is added to it next are one operator."""
        if call.bias is None:
            return False
        adding = self._choices[f"{call.operator}.add"]
        operator = self._operators[call.operator or ""]
        product = call.outputs[0]
        return (
            not any(choice.cuts[axis] > 1 for axis in operator.summed)
            and len(self._wishes[product]) == 1
            and same_parts(choice.output, adding.output, self._record.shapes[product])
        )

    def _make(self, call: Call) -> None:
        args, kwargs = tree_map(self._real, (call.args, call.kwargs))
        target = call.target
        if call.draws:
            target = pieces.Draw(target, self._seed, self._draws, 0)
            self._draws += 1
        name = call.outputs[0]
        shape = self._record.shapes[name]
        self._values[name] = _Value(
            self._builder.operator(target, args, kwargs),
            shape,
            whole(len(shape), self._ranks),
            (),
            True,
        )

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "meta":
            return self._device
        return value

    def _drawing(
        self, target: Callable[..., Any], choice: Choice, operator: Operator
    ) -> pieces.Draw:
        """Return the operator with random numbers for this rank's part of the result."""
        coordinates = coordinates_of(choice.output.device_matrix, self._collectives.rank)
        part = 0
        for axis, cuts in enumerate(choice.cuts):
            part = part * cuts + (coordinates[axis] if axis in operator.output.axes else 0)
        draw = pieces.Draw(target, self._seed, self._draws, part)
        self._draws += 1
        return draw

    def _check_change(self, call: Call, name: str, wanted: Layout) -> None:
        shape = self._record.shapes[name]
        if not same_parts(self._values[name].layout, wanted, shape):
            raise ValueError(
                f"{call.operator} changes {name} in place, which is cut otherwise than the "
                "operator: give it a parameter_plan, or a strategy to the operator"
            )
        # What was made of its old values is not used for its new ones.
        self._moved = {key: node for key, node in self._moved.items() if key[0] != name}

    def _warn(self, call: Call, choice: Choice) -> None:
        """Note the bytes for an operator that runs on whole inputs."""
        moved = 0
        for name, wanted in zip(call.inputs, choice.inputs, strict=False):
            value = self._values[name]
            size = self._record.dtypes[name].itemsize
            moved += bytes_to_receive(value.layout, wanted, value.shape, size)
        if moved:
            kind = getattr(call.target, "_schema", None)
            name = kind.name.partition("::")[2] if kind is not None else str(call.target)
            self._warnings.append((name, moved))


def _in_modes(call: Call, target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator with the modes of torch that the module had set for it."""
    if call.detached and call.changes is not None:  # Else the results are detached.
        target = partial(pieces.without_gradients, target)
    if call.autocast:
        target = partial(pieces.with_autocast, call.autocast, target)
    return target
