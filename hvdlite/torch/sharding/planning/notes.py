"""What a record notes of each operator: how it may be cut, and the call of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hvdlite.common.layouts.operators import Operand, Operator
from hvdlite.torch.sharding.planning.calls import Call, Ref, autocasts, draws
from hvdlite.torch.sharding.rules import images, pieces, products
from hvdlite.torch.sharding.rules.elementwise import broadcast_axes
from hvdlite.torch.sharding.rules.rule import Rule, tensors_of
from hvdlite.torch.sharding.rules.table import rule_of

aten = torch.ops.aten
_NEW = {
    "new_zeros": aten.zeros.default, "new_ones": aten.ones.default, "new_full": aten.full.default,
    "new_empty": aten.empty.memory_format,
}  # fmt: skip
_SEVERAL = {
    "unbind": {"int"}, "chunk": {"default"}, "split": {"Tensor", "sizes"},
    "split_with_sizes": {"default"}, "unsafe_split": {"Tensor"}, "unsafe_chunk": {"default"},
}  # fmt: skip
_CONVOLUTIONS = {f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)}
_PRODUCTS = {"addmm": aten.mm.default, "baddbmm": aten.bmm.default}


class Notes:
    """Operators, named by the module that they run in, the calls of them, and names of tensors."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.calls: list[Call] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        # The operators that have no rule.
        self.whole: set[str] = set()
        self.path: list[str] = []
        # The first operator that runs in no submodule.
        self.first: str | None = None
        self._names = dict(names)
        # All tensors stay alive, so that their ids stay theirs.
        self._kept: list[Any] = []
        self._by_storage: dict[int, set[int]] = {}
        self._used: set[str] = set()
        # How the module has operators cast, which can be seen only before they are dispatched.
        self.autocasts = self._outer_autocasts = autocasts()

    def name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor, which is a new one for one that was not seen before."""
        if id(tensor) not in self._names:
            self.know(tensor, f"%{len(self._kept)}")
        return self._names[id(tensor)]

    def know(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name."""
        self._names[id(tensor)] = name
        self._kept.append(tensor)
        self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
        storage = tensor.untyped_storage()._cdata
        self._by_storage.setdefault(storage, set()).add(id(tensor))

    def note(
        self,
        function: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        changes: str | None = None,
        renames: bool = False,
    ) -> None:
        given = tensors_of(args, kwargs)
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        is_given = any(result is each for each in given)
        if not results or (changes is None and not renames and is_given):
            return
        refs, first = tree_map(self._ref, (args, kwargs)), len(self.calls)
        if renames:
            self.know(result, f"%{len(self._kept)}")
        if name in _NEW:
            sizes, options = _new(name, args, kwargs, result)
            self._factory(_NEW[name], sizes, options, result)
        elif not given:
            self._factory(function, args, kwargs, result)
        elif name == "linear":
            of_linear = products.linear(result.ndim - 1, args[0].shape, args[1].shape)
            self._layer(function, of_linear, args, result, result.ndim - 1)
        elif name in _CONVOLUTIONS and args[0].ndim == args[1].ndim:
            of_images = images.convolution(function, args, kwargs, result)
            self._layer(function, of_images, args, result, 1)
        elif name in _PRODUCTS:
            self._product_and_sum(_PRODUCTS[name], args, kwargs, result)
        elif name in _SEVERAL and function._overloadname in _SEVERAL[name]:
            self._several(name, args, kwargs, result)
        else:
            rule = rule_of(function, args, kwargs, result)
            self._call(function, refs, given, result, rule, changes)
        changed = tuple(set(self.autocasts) - set(self._outer_autocasts))
        if changed:
            self.calls[first:] = [replace(each, autocast=changed) for each in self.calls[first:]]

    def _ref(self, value: Any) -> Any:
        return Ref(self.name(value)) if isinstance(value, torch.Tensor) else value

    def _factory(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator that makes a tensor of none: each rank makes all of it."""
        call = Call(
            None, function, tuple(args), kwargs, (self.name(result),),
            draws=draws(function, args, kwargs),
        )  # fmt: skip
        self.calls.append(call)

    def _call(
        self,
        function: Any,
        refs: tuple[tuple[Any, ...], dict[str, Any]],
        given: list[torch.Tensor],
        result: Any,
        rule: Rule | None,
        changes: str | None = None,
    ) -> None:
        """Note a call, and how it may be cut: without a rule its inputs and results are whole."""
        inputs = [(Ref(self.name(each)), tuple(each.shape)) for each in given]
        if changes is not None:
            rule = rule and replace(rule, is_view=True)
        leaves = [result] if isinstance(result, torch.Tensor) else list(result)
        places = [i for i, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        if any(not isinstance(each, torch.Tensor) and each is not None for each in leaves):
            raise ValueError(f"{function} returns lists of tensors, which a sharded part cannot")
        # A counter that a norm changes first, and packed weights, are not what a module is about.
        is_named = changes is None and function is not torch.ops.hvdlite.rows_apart.default
        name = self._unique(function, is_named)
        outputs = [(self.name(leaves[i]), tuple(leaves[i].shape)) for i in places]
        self._operator(name, inputs, outputs[0], rule, leaves[places[0]], outputs[1:])
        if rule is None:
            self.whole.add(name)
        several = not isinstance(result, torch.Tensor)
        updates: tuple[str, ...] = ()
        if function is aten.batch_norm.default and refs[0][5]:  # Its running statistics.
            updates = tuple(each.name for each in refs[0][3:5] if isinstance(each, Ref))
        self.calls.append(
            Call(
                name, function, refs[0], refs[1],
                tuple(each for each, _ in outputs),
                tuple(places) if several else (), rule,
                draws(function, refs[0], refs[1]), changes, updates,
                not torch.is_grad_enabled(),
            )
        )  # fmt: skip

    def _operator(
        self,
        name: str,
        inputs: Sequence[tuple[Ref, tuple[int, ...]]],
        output: tuple[str, tuple[int, ...]],
        rule: Rule | None,
        like: torch.Tensor,
        also: Sequence[tuple[str, tuple[int, ...]]] = (),
    ) -> None:
        axes = rule.inputs if rule else [(None,) * len(shape) for _, shape in inputs]
        turned = rule.turned if rule else ()
        operands = tuple(
            Operand(ref.name, shape, of_input, index in turned)
            for index, ((ref, shape), of_input) in enumerate(zip(inputs, axes, strict=True))
        )
        self.operators.append(
            Operator(
                name, operands, Operand(*output, rule.output if rule else (None,) * len(output[1])),
                rule.lengths if rule else (), rule.uncut if rule else frozenset(),
                like.element_size(), rule.is_view if rule else False,
                rule.exchanged if rule else None,
                tuple(
                    Operand(*each, rule.also[i] if rule else (None,) * len(each[1]))
                    for i, each in enumerate(also)
                ),
                rule.work if rule else 0,
            )
        )  # fmt: skip

    def _layer(
        self, function: Any, rule: Rule, args: Sequence[Any], result: torch.Tensor, channels: int
    ) -> None:
        """Note a product with weights, and the sum with the bias as an operator of its own.

        The bias runs along the dimension `channels` of the result.
        """
        inputs, weight, bias = (*args, None)[:3]
        self._product(function, rule, [inputs, weight], bias, result, (), channels, args[3:])

    def _product_and_sum(self, product: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        addend, left, right = args[:3]
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        like = product(left, right)
        rule = products.matmul(product, (left, right), {}, like)
        scales = () if beta == alpha == 1 else (beta, alpha)
        self._product(product, rule, [left, right], addend, result, scales)

    def _product(
        self,
        function: Any,
        rule: Rule | None,
        factors: list[torch.Tensor],
        addend: torch.Tensor | None,
        result: torch.Tensor,
        scales: tuple[float, ...] = (),
        channels: int | None = None,
        options: Sequence[Any] = (),
    ) -> None:
        base, final = self._unique(function), self.name(result)
        product = final if addend is None else f"{final}.product"
        shape = tuple(result.shape)
        self.shapes[product], self.dtypes[product] = shape, result.dtype
        inputs = [(Ref(self.name(each)), tuple(each.shape)) for each in factors]
        self._operator(base, inputs, (product, shape), rule, result)
        detached = not torch.is_grad_enabled()
        refs = (*(ref for ref, _ in inputs), *([None, *options] if options else []))
        bias = self.name(addend) if addend is not None and channels is not None else None
        self.calls.append(
            Call(base, function, refs, {}, (product,), (), rule, detached=detached, bias=bias)
        )
        if addend is None:
            return
        entries = [(Ref(product), shape), (Ref(self.name(addend)), tuple(addend.shape))]
        adding = Rule(
            (
                tuple(range(len(shape))),
                (broadcast_axes(entries[1][1], shape) or ()) if channels is None else (channels,),
            ),
            tuple(range(len(shape))), shape,
        )  # fmt: skip
        self._operator(f"{base}.add", entries, (final, shape), adding, result)
        target: Callable[..., Any] = aten.add.Tensor
        args: tuple[Any, ...] = (entries[0][0], entries[1][0])
        if channels is not None:
            target, args = pieces.add_along, (*args, channels)
        if scales:
            target, args = pieces.scaled_sum, (*reversed(args), *scales)
            adding = replace(adding, inputs=adding.inputs[::-1])
            last = self.operators[-1]
            self.operators[-1] = replace(last, inputs=last.inputs[::-1])
        self.calls.append(
            Call(f"{base}.add", target, args, {}, (final,), (), adding, detached=detached)
        )

    def _several(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note views of parts of a tensor, one by one."""
        tensor = args[0]
        place = 1 if name == "unbind" else 2  # Of the dimension among the arguments.
        dim = kwargs.get("dim", args[place] if len(args) > place else 0)
        start = 0
        for index, each in enumerate(result):
            if name == "unbind":
                function: Any = aten.select.int
                given: tuple[Any, ...] = (tensor, dim, index)
            else:
                length = each.shape[dim]
                function, given = aten.slice.Tensor, (tensor, dim, start, start + length)
                start += length
            rule = rule_of(function, given, {}, each)
            refs = (Ref(self.name(tensor)), *given[1:])
            self._call(function, (refs, {}), [tensor], each, rule)

    def _unique(self, function: Any, is_named: bool = True) -> str:
        """Return the path of the module, for its first operator; then with what it does."""
        path = self.path[-1] if self.path else ""
        kind = function._schema.name.partition("::")[2]
        is_first = is_named and path and path not in self._used
        name = path if is_first else ".".join(filter(None, (path, kind)))
        base, number = name, 0
        while name in self._used:
            number += 1
            name = f"{base}_{number}"
        self._used.add(name)
        if not path and is_named and self.first is None:
            self.first = name
        return name


def _new(name: str, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> Any:
    """Return the arguments of the operator that makes a tensor without another one."""
    options = {**kwargs, "dtype": result.dtype, "device": torch.device("meta")}
    return (list(result.shape), *args[2:]), options
