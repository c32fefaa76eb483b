"""The record of the operators of a module, while it runs on meta tensors.

The record has two sides: `Operator`s, which say how each may be cut, and `Call`s, which say what
runs. Both name tensors alike, and one call has one operator.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hvdlite.torch.sharding.planning.notes import Notes
from hvdlite.torch.sharding.rules.rule import tensors_of

aten = torch.ops.aten
# Operators that are nothing on tensors without values.
_NOTHING = {"lift_fresh", "set_data", "requires_grad_"}
_FUNCTIONAL = {"normal_": aten.normal_functional.default, "zero_": aten.zeros_like.default}


def _refuse_own_derivatives(tracer: CodeType) -> None:
    """Raise `ValueError` inside an `autograd.Function`.

    The record has the operators of its forward, which run without gradients; what it has written
    as their derivative would be lost without a word. `tracer` is the code that runs the module.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not tracer:
        if frame.f_code is _APPLY:
            raise ValueError(
                f"{frame.f_locals['cls'].__qualname__} has a backward() of its own, and a sharded "
                "part takes the derivatives of operators: call it outside of the part"
            )
        frame = frame.f_back  # type: ignore[assignment]


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class Record(Notes, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators, named by the module that they run in."""

    def __init__(
        self, names: Mapping[int, str], leaves: Mapping[str, torch.Tensor], tracer: CodeType
    ) -> None:
        super().__init__(names)
        # Tensors with values that the module has beside its parameters and buffers.
        self.constants: dict[str, torch.Tensor] = {}
        # Those of them that were there before the module ran.
        self._lasting: set[str] = set()
        self._tracer = tracer
        self._leaves = set(leaves)
        # What a view of it has changed since, by ids, with the operator that did it.
        self._stale: dict[int, str] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
        for tensor in leaves.values():
            self.know(tensor, self._names[id(tensor)])

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note it."""
        _refuse_own_derivatives(self._tracer)
        args, options = tree_map(self._without_values, (tuple(args), dict(kwargs or {})))
        kwargs = dict(options)
        makes = "device" in kwargs or not tensors_of(args, kwargs)
        if makes and any(each.name == "device" for each in function._schema.arguments):
            kwargs["device"] = torch.device("meta")
        name = function._schema.name.partition("::")[2]
        if name in _NOTHING:
            return args[0]
        if name == "detach_":  # Its values stay as they are, and views of it may be used.
            if self.name(args[0]) not in self._leaves:
                self.note(aten.detach.default, "detach", args, {}, args[0], renames=True)
            return args[0]
        result = function(*args, **kwargs)
        for each in tensors_of(args, kwargs):
            self.check_fresh(each, name)
        if function._schema.is_mutable:
            self._in_place(function, name, args, kwargs, result)
        else:
            self.note(function, name, args, kwargs, result)
        return result

    def check_fresh(self, tensor: torch.Tensor, user: str) -> None:
        """Raise `ValueError` for a tensor that a view of it has changed since."""
        if id(tensor) in self._stale:
            raise ValueError(
                f"{self._stale[id(tensor)]} changes a tensor in place of which a view is used "
                f"afterwards, by {user}: write it without changing in place, as a sharded part "
                "runs on tensors of its own"
            )

    def names_of(self, value: Any) -> set[str]:
        """Return the names that the tensors in a value have here, if they were used."""
        seen = [self._stand_ins.get(id(each), each) for each in tree_leaves(value)]
        return {self._names[id(each)] for each in seen if id(each) in self._names}

    def made_of(self, sources: set[str]) -> set[str]:
        """Return the names of what is computed of any of some tensors."""
        found = set(sources)
        for call in self.calls:
            if not found.isdisjoint(call.inputs):
                found.update(call.outputs)
        return found

    def _without_values(self, value: Any) -> Any:
        """Return a stand-in for a tensor with values, which becomes a constant."""
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        if id(value) not in self._stand_ins:
            name = f"constant{len(self.constants)}"
            if not value.is_inference():
                self._lasting.add(name)
            # torch makes a view as of the tensor itself: of an ordinary one it cannot be another.
            with torch.inference_mode(value.is_inference()):
                stand_in = torch.empty_like(value, device="meta")
            # What the module has made of a list just now cannot be saved for a backward pass.
            with torch.inference_mode(False):
                self.constants[name] = value.clone() if value.is_inference() else value
            self.know(stand_in, name)
            self._stand_ins[id(value)] = stand_in
            # What torch makes of a list ends with its operator, and the next one may get its id.
            self._kept.append(value)
        return self._stand_ins[id(value)]

    def _in_place(
        self, function: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note an operator that changes its first argument as one with a new result."""
        target = args[0] if args else None
        packet = getattr(aten, name.removesuffix("_"), None)
        overload = getattr(packet, function._overloadname, None)
        if overload is None and name in _FUNCTIONAL:
            overload = _FUNCTIONAL[name]
        if result is not target or not isinstance(target, torch.Tensor) or overload is None:
            raise ValueError(f"{function} changes tensors in place, which a sharded part cannot")
        sharing = self._by_storage[target.untyped_storage()._cdata] - {id(target)}
        own = self._names[id(target)]
        if own in self._leaves:
            if sharing:
                raise ValueError(f"{function} changes {own}, which has views, in a sharded part")
            self.note(function, name, args, kwargs, target, changes=own)
            return
        if self._lasting & {own, *(self._names[each] for each in sharing)}:
            raise ValueError(
                f"{function} changes a tensor in place that is neither made in a sharded part nor "
                "a buffer of it: make it a buffer, by register_buffer()"
            )
        if any(self._names[each] in self._leaves for each in sharing):
            raise ValueError(
                f"{function} changes a part of a parameter or buffer in place, which a sharded "
                "part cannot: keep it outside of the part"
            )
        self._stale |= dict.fromkeys(sharing, ".".join([*self.path[-1:], name]))
        made = overload(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.dtype != target.dtype:
            self.note(overload, name, args, kwargs, made)
            overload, name, args, kwargs = (
                aten._to_copy.default, "_to_copy", (made,), {"dtype": target.dtype}
            )  # fmt: skip
        self.note(overload, name, args, kwargs, target, renames=True)
