"""The operators of a module, recorded while it runs on meta tensors: no value is read or made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hvdlite.common.layouts.operators import Operand, Operator, elementwise, matmul

aten = torch.ops.aten
# The attribute of a sharded module that has the forward() from before.
ORIGINAL = "_hvdlite_forward"
# Operators that need their last dimensions whole, with the argument that says which.
_NORMALIZING = {aten.softmax.int, aten._softmax.default, aten.log_softmax.int}
_TRANSPOSING = {aten.t.default, aten.numpy_T.default}


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators, named by the module that they run in."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        # The weights that a Linear holds as [out, in], while its strategy is for [in, out].
        self.transposed: set[str] = set()
        self.path: list[str] = []
        # By the path of a submodule: the names of the tensors that its first call was given.
        self.given: dict[str, list[str]] = {}
        # The first operator that runs in no submodule.
        self.first: str | None = None
        self._names = dict(names)
        # All tensors stay alive, so that their ids stay theirs.
        self._kept: list[Any] = []
        self._used: set[str] = set()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note it."""
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        if isinstance(result, torch.Tensor) and tensors:
            self._record(function, args, tensors, result)
        elif tensors:
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor):
                    self._opaque(function, tensors, each)
        return result

    def name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor, which is a new one for one that was not seen before."""
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"%{len(self._names)}"
            self._kept.append(tensor)
        return self._names[id(tensor)]

    def _record(
        self, function: Any, args: Sequence[Any], tensors: list[Any], result: torch.Tensor
    ) -> None:
        if any(result is each for each in tensors):
            return  # An operator in place: its result is the tensor that was there.
        if function is aten.linear.default:
            self._linear(args, result)
        elif function in (aten.matmul.default, aten.mm.default) and args[1].ndim == 2:
            self._add(matmul, function, self._entry(args[0]), self._entry(args[1]), result)
        elif function in _TRANSPOSING and result.ndim == 2:
            self._transpose(function, tensors[0], result)
        elif torch.Tag.pointwise in function.tags or function in _COPIES:
            self._pointwise(function, tensors, result, ())
        elif function in _NORMALIZING:
            self._pointwise(function, tensors, result, (args[1],))
        elif function is aten.layer_norm.default:
            self._pointwise(function, tensors, result, range(-len(args[1]), 0))
        else:
            self._opaque(function, tensors, result)

    def _entry(self, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        return self.name(tensor), tuple(tensor.shape)

    def _linear(self, args: Sequence[Any], result: torch.Tensor) -> None:
        inputs, weight, bias = (*args, None)[:3]
        weight_name, (outer, inner) = self._entry(weight)
        self.transposed.add(weight_name)
        product = f"{self.name(result)}.product" if bias is not None else self.name(result)
        base = self._unique(aten.linear.default)
        self.operators.append(
            matmul(
                base,
                self._entry(inputs),
                (weight_name, (inner, outer)),
                product,
                bytes_per_element=result.element_size(),
            )
        )
        if bias is not None:
            entries = [(product, tuple(result.shape)), self._entry(bias)]
            name = f"{base}.add"
            size = result.element_size()
            self.operators.append(
                elementwise(name, entries, self.name(result), bytes_per_element=size)
            )

    def _pointwise(
        self, function: Any, tensors: list[Any], result: torch.Tensor, uncut: Sequence[int]
    ) -> None:
        entries = [self._entry(each) for each in tensors]
        self._add(elementwise, function, entries, result, uncut=tuple(uncut))

    def _add(
        self, make: Callable[..., Operator], function: Any, *inputs: Any, **options: Any
    ) -> None:
        *entries, result = inputs
        size = result.element_size()
        name = self._unique(function)
        self.operators.append(
            make(name, *entries, self.name(result), bytes_per_element=size, **options)
        )

    def _transpose(self, function: Any, tensor: torch.Tensor, result: torch.Tensor) -> None:
        source = Operand(*self._entry(tensor), (0, 1))
        target = Operand(*self._entry(result), (1, 0))
        self.operators.append(
            Operator(
                self._unique(function), (source,), target, tuple(tensor.shape),
                bytes_per_element=result.element_size(), is_view=True,
            )
        )  # fmt: skip

    def _opaque(self, function: Any, tensors: list[Any], result: torch.Tensor) -> None:
        """Note an operator without a rule: its inputs and output are whole."""
        inputs = tuple(Operand(*self._entry(each), (None,) * each.ndim) for each in tensors)
        output = Operand(*self._entry(result), (None,) * result.ndim)
        size = result.element_size()
        name = self._unique(function)
        self.operators.append(Operator(name, inputs, output, (), bytes_per_element=size))

    def _unique(self, function: Any) -> str:
        """Return the path of the module, for its first operator; then with what it does."""
        path = self.path[-1] if self.path else ""
        kind = str(function).split(".")[1]
        name = path if path and path not in self._used else ".".join(filter(None, (path, kind)))
        base, number = name, 0
        while name in self._used:
            number += 1
            name = f"{base}_{number}"
        self._used.add(name)
        if not path and self.first is None:
            self.first = name
        return name


_COPIES = {aten.dropout.default, aten.clone.default, aten.contiguous.default}


def trace(module: torch.nn.Module, example: Sequence[Any]) -> tuple[Trace, list[str], list[str]]:
    """Return the operators of a module for inputs like `example`, whose values are not read.

    Also returns the names of the inputs and of the outputs, as the operators know them.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Parameters of a sharded module are DTensors, whose shapes are those of whole tensors.
    stand_ins = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in tensors.items()
    }
    inputs = tree_map(_meta, tuple(example))
    leaves = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)]
    names = {id(each): name for name, each in stand_ins.items()}
    names |= {id(each): f"input{index}" for index, each in enumerate(leaves)}
    recorder = Trace(names)
    with _unsharded(module), _paths(module, recorder), torch.inference_mode(), recorder:
        outputs = torch.func.functional_call(module, stand_ins, inputs)
    out = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
    return recorder, [f"input{i}" for i in range(len(leaves))], [recorder.name(e) for e in out]


@contextmanager
def _unsharded(module: torch.nn.Module) -> Iterator[None]:
    """Give sharded modules the forward() back that they had before."""
    sharded = [each for each in module.modules() if ORIGINAL in each.__dict__]
    replaced = [each.forward for each in sharded]
    for each in sharded:
        each.forward = each.__dict__[ORIGINAL]
    try:
        yield
    finally:
        for each, forward in zip(sharded, replaced, strict=True):
            each.forward = forward


def _meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


class _paths:  # noqa: N801 - reads as a function
    """Keeps the path of the submodule that runs at the end of a list."""

    def __init__(self, module: torch.nn.Module, recorder: Trace) -> None:
        self._module, self._path, self._recorder = module, recorder.path, recorder
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, submodule in self._module.named_modules():
            if name:
                enter = submodule.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                leave = submodule.register_forward_hook(self._leaving, always_call=True)
                self._handles += [enter, leave]

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [
                each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
            ]
            self._recorder.given.setdefault(name, [self._recorder.name(each) for each in tensors])
            self._path.append(name)

        return enter

    def _leaving(self, *_: Any) -> None:
        self._path.pop()

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
