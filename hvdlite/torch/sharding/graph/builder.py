"""Builds a graph of torch.fx: its nodes, and one exchange for the sums of small gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hvdlite.torch.sharding.collectives import Collectives
from hvdlite.torch.sharding.graph.moves import JoinedSums, Move

aten = torch.ops.aten
# The same operators as functions of Python, which take 1 to 2 us less for each call.
_IN_PYTHON: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add, aten.mul.Tensor: torch.mul, aten.sub.Tensor: torch.sub,
    aten.bmm.default: torch.bmm, aten.mm.default: torch.mm, aten.matmul.default: torch.matmul,
    aten.linear.default: functional.linear, aten.layer_norm.default: torch.layer_norm,
    aten.gelu.default: functional.gelu, aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape, aten.transpose.int: torch.transpose,
    aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
}  # fmt: skip
# What they return, and the gradients of what they take first, are tensors that nobody else has.
# The gradient of a bias may be that of the result, where there is one row.
_OWN_RESULTS = {functional.linear, torch.mm, torch.bmm, torch.matmul}
_OWN_GRADIENTS = _OWN_RESULTS | {torch.layer_norm}


class _Step(torch.nn.Module):
    """A function whose arguments are the tensors of the graph and what was known before."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        super().__init__()
        leaves, self._spec = tree_flatten((list(args), dict(kwargs)))
        self._function = function
        self._leaves = [None if isinstance(each, Node) else each for each in leaves]
        self._places = [i for i, each in enumerate(leaves) if isinstance(each, Node)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._function(*args, **kwargs)


class Builder:
    """The graph of a part, node by node; a node stands for a local tensor."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._graph = Graph()
        self._root = torch.nn.Module()
        self._steps = 0

    def input(self, name: str) -> Any:
        """Return the node of what the graph is called with."""
        return self._graph.placeholder(name)

    def constant(self, name: str, tensor: torch.Tensor) -> Any:
        """Return the node of a tensor that the graph keeps."""
        self._root.register_buffer(name, tensor, persistent=False)
        return self._graph.get_attr(name)

    def module(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        """Return the node of what a module does."""
        name = f"step{self._steps}"
        self._steps += 1
        self._root.add_module(name, module)
        return self._graph.call_module(name, args)

    def function(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the node of what a function does, that torch.fx finds by its name."""
        return self._graph.call_function(function, args)

    def operator(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the node of an operator, or of what runs in its place."""
        if isinstance(target, torch._ops.OpOverload):
            return self._graph.call_function(_IN_PYTHON.get(target, target), args, kwargs)
        tensors = tuple(each for each in tree_leaves((args, kwargs)) if isinstance(each, Node))
        return self.module(_Step(target, args, kwargs), tensors)

    def finish(self, outputs: Sequence[Any]) -> GraphModule:
        """Return the module that runs the graph."""
        self._graph.output(list(outputs))
        self._graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())
        self._graph.lint()
        # Sums take the memory of products, and of gradients that products compute.
        for node in self._graph.nodes:
            move = node.op == "call_module" and self._root.get_submodule(node.target)
            if isinstance(move, Move):
                (source,) = node.args
                move.own(
                    source.target in _OWN_RESULTS and len(source.users) == 1,
                    all(
                        user.target in _OWN_GRADIENTS and node not in user.args[2:]
                        for user in node.users
                    ),
                )
        return GraphModule(self._root, self._graph, "ShardedPart")

    def join_sums(self, small: Mapping[Any, torch.dtype]) -> None:
        """Take the sums of gradients of such inputs by one exchange, when all are there.

        `small` has the nodes of the inputs, as of biases and norms, with their dtypes.
        """
        joined: dict[Any, list[Any]] = {}
        for node in self._graph.nodes:
            leaf = next(iter(node.args), None)
            if node.op != "call_module" or leaf not in small:
                continue
            move = self._root.get_submodule(node.target)
            if isinstance(move, Move) and move.sums_gradient_among:
                joined.setdefault((move.sums_gradient_among, small[leaf]), []).append(node)
        last = [node for node in self._graph.nodes if node.op == "placeholder"][-1:]
        for (members, _), nodes in joined.items():
            if len(nodes) > 1:
                self._join(JoinedSums(members, self._collectives), nodes, last[0])

    def _join(self, sums: JoinedSums, nodes: Sequence[Any], after: Any) -> None:
        with self._graph.inserting_after(after):
            join = self.module(sums, tuple(each.args[0] for each in nodes))
        for index, node in enumerate(nodes):
            with self._graph.inserting_after(join):
                one = self._graph.call_function(getitem, (join, index))
            node.replace_all_uses_with(one)
            self._graph.erase_node(node)
