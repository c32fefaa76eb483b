"""The operators of a module, from a run on meta tensors: no value is read or made."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map

from hvdlite.torch.sharding.planning.calls import Ref, autocasts
from hvdlite.torch.sharding.planning.record import Record
from hvdlite.torch.sharding.rules.attention import attention
from hvdlite.torch.sharding.rules.views import with_tensors

# The attribute of a sharded module that has the forward() from before.
ORIGINAL = "_hvdlite_forward"
# What torch's checkpoints run by, and the lock of the thread in whose trace they are replaced.
_OF_CHECKPOINTS = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
_CHECKPOINTS = threading.RLock()
# What a part may return beside tensors.
_PLAIN = (Number, np.generic, np.ndarray, str, bytes, Enum, torch.Size, torch.dtype)


@dataclass(frozen=True)
class Traced:
    """What `trace` finds: the record, the names of inputs, and the outputs with names inside."""

    record: Record
    inputs: list[str]
    outputs: list[str]
    result: Any


def trace(module: torch.nn.Module, example: Sequence[Any]) -> Traced:
    """Return the operators of a module for inputs like `example`, whose values are not read.

    Raises `ValueError` for a module that reads values, that changes what has views, or that keeps
    what a call has made. Its attributes are afterwards as they were.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Parameters of a sharded module are DTensors, whose shapes are those of whole tensors.
    stand_ins = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in tensors.items()
    }
    inputs = tree_map(
        lambda each: torch.empty_like(each, device="meta") if torch.is_tensor(each) else each,
        tuple(example),
    )
    leaves = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)]
    input_names = [f"input{index}" for index in range(len(leaves))]
    names = {id(each): name for name, each in stand_ins.items()}
    names |= {id(each): name for each, name in zip(leaves, input_names, strict=True)}
    recorder = Record(names, stand_ins, trace.__code__)
    for each, name in zip(leaves, input_names, strict=True):
        recorder.know(each, name)
    with (
        _attributes(module, recorder, input_names), _unsharded(module), _plain_checkpoints(),
        _paths(module, recorder), torch.inference_mode(), torch.enable_grad(),
        _Functions(recorder), recorder,
    ):  # fmt: skip
        try:
            result = torch.func.functional_call(module, stand_ins, inputs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error).lower():
                raise
            last = recorder.operators[-1].name if recorder.operators else "its start"
            raise ValueError(
                f"a sharded part is planned without values, and {type(module).__name__} reads some "
                f"after {last}: keep that outside of the part ({error})"
            ) from error
    outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    for each in outputs:
        recorder.check_fresh(each, "the caller")

    def named(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(recorder.name(value))
        if value is None or isinstance(value, _PLAIN):
            return value
        raise ValueError(
            f"a sharded part returns a {type(value).__name__}, whose tensors would have no values: "
            "return tensors, numbers and texts, and tuples, lists and dicts of them"
        )

    return Traced(
        recorder, input_names, [recorder.name(each) for each in outputs], tree_map(named, result)
    )


@contextmanager
def _attributes(module: torch.nn.Module, recorder: Record, inputs: Sequence[str]) -> Iterator[None]:
    """Put the attributes of submodules back, and raise `ValueError` for what lasts beyond a call.

    That is what is made of inputs, of parameters, or of what the attribute was before: nobody
    would see it change. A table that is made of constants and buffers is made again in each call.
    """
    parameters = {name for name, _ in module.named_parameters()}
    at_start: list[_Table] = []

    def enter(*_: Any) -> None:
        at_start.extend(_tables(module))

    def leave(*_: Any) -> None:
        for path, table, before in at_start:
            known = dict(_entries(before))
            for key, value in _entries(table):
                old = known.get(key)
                made = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
                if value is old or not made or _is_derived(table, key):
                    continue
                names = {recorder.name(each) for each in made} - parameters
                if names & recorder.made_of({*inputs, *parameters, *recorder.names_of(old)}):
                    raise ValueError(
                        f"{_named(path, key)} gets a tensor in a sharded part, which neither the "
                        "next call nor the caller would see: return it, or change a buffer in "
                        "place, as by copy_()"
                    )

    kept = _tables(module)
    handles = [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for each in handles:
            each.remove()
        for _, table, before in kept:
            table.clear()
            table.update(before) if isinstance(table, dict) else table.extend(before)


# What names of entries begin with, the dict or list that they are in, and a copy of that.
_Table = tuple[str, Any, Any]


def _tables(module: torch.nn.Module) -> list[_Table]:
    """Return what the attributes of submodules are in, and dicts and lists among them."""
    found: dict[int, _Table] = {}

    def add(table: Any, path: str) -> None:
        if type(table) not in (dict, OrderedDict, list) or id(table) in found:
            return
        found[id(table)] = path, table, table.copy()
        for key, value in _entries(table):
            add(value, path if key in ("_buffers", "_parameters") else _named(path, key))

    for name, submodule in module.named_modules():
        add(vars(submodule), name and f"{name}.")
    return list(found.values())


def _named(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if path and not path.endswith(".") else f"{path}{key}"


def _entries(table: Any) -> Any:
    return table.items() if isinstance(table, dict) else enumerate(table)


def _is_derived(table: Any, key: Any) -> bool:
    """Return whether torch computes a weight anew before each call, as for its norm or pruning."""
    own = table.get("_parameters", ()) if isinstance(table, dict) else ()
    return f"{key}_g" in own or f"{key}_orig" in own


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


class _Functions(TorchFunctionMode):
    """While it is entered, functions of torch run as they can be recorded.

    Attention has its heads in a dimension of their own, and lists in an index are tensors. The
    record knows how the module has operators cast.
    """

    def __init__(self, recorder: Record) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        self._recorder.autocasts = autocasts()
        if function is functional.multi_head_attention_forward:
            return attention(*args, **(kwargs or {}))
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], with_tensors(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))


class _Plain:
    """Runs what a checkpoint would run without gradients, as the record would take it for."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_saved(*_: Any, **__: Any) -> Iterator[None]:
    yield


@contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Let `torch.utils.checkpoint` call its function: a trace has no backward to save for."""
    with _CHECKPOINTS:
        kept = [getattr(checkpoint, name) for name in _OF_CHECKPOINTS]
        try:
            for name, plain in zip(_OF_CHECKPOINTS, (_Plain, _nothing_saved), strict=True):
                setattr(checkpoint, name, plain)
            yield
        finally:
            for name, before in zip(_OF_CHECKPOINTS, kept, strict=True):
                setattr(checkpoint, name, before)


@contextmanager
def _paths(module: torch.nn.Module, recorder: Record) -> Iterator[None]:
    """Keep the path of the submodule that runs at the end of a list."""

    def enter(name: str, *_: Any) -> None:
        recorder.path.append(name)

    def leave(*_: Any) -> None:
        recorder.path.pop()

    handles: list[Any] = []
    for name, submodule in module.named_modules():
        if name:
            handles.append(submodule.register_forward_pre_hook(partial(enter, name)))
            handles.append(submodule.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for each in handles:
            each.remove()
