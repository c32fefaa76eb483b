"""Loads: each rank reads what its layout needs, from the files of those who wrote it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.checkpoint import trees
from hvdlite.checkpoint.files import Reader, safetensors
from hvdlite.checkpoint.job import check_same, place, together
from hvdlite.checkpoint.manifest import Manifest, Record
from hvdlite.checkpoint.opened import Opened, on_all_ranks
from hvdlite.checkpoint.tensors import Tensors, kinds_of
from hvdlite.checkpoint.trees import given_layouts, hint
from hvdlite.common.base.warn import warn_user
from hvdlite.common.layouts.layout import Box, Layout, whole
from hvdlite.common.tensors.adapter import numpy_dtype


@dataclass(frozen=True)
class Options:
    """How strict a load is.

    `strict`: a name that the checkpoint lacks is an error; else it is kept with a warning. `cast`:
    values of other dtypes are converted. `verify`: digests are compared also where only a piece
    of a part is needed, for which the whole part is read.
    """

    strict: bool = True
    cast: bool = False
    verify: bool = False


class Wanted(NamedTuple):
    """A tensor of the state, and the part of the checkpoint's tensor that it gets."""

    tensor: Any
    box: Box
    dtype: str


@dataclass(frozen=True)
class Plan:
    """What a load reads on this rank."""

    tree: Any
    tensors: Mapping[str, Wanted]
    values: Mapping[str, Any]
    facts: Mapping[str, str]


def load(
    locate: Callable[[], Path],
    describe: Callable[[Path], Manifest],
    state: Any,
    layouts: Mapping[str, Any] | None,
    tensors: Tensors,
    options: Options,
    what: str,
) -> Any:
    """Give the state the values of a checkpoint, and return it.

    `locate` returns the path of the layout.json, and `describe` what that says; what they raise is
    raised on all ranks. `what` names the load.
    """
    rank, ranks = place()
    plans: list[tuple[Reader, Plan]] = []

    def prepare(opened: Opened) -> bytes:
        safetensors()
        found = describe(opened.path)
        plan = plan_of(found, state, layouts, tensors, options, rank, ranks)
        reader = opened.files.enter_context(Reader(found, options.verify))
        for name, wanted in plan.tensors.items():
            reader.open(name, wanted.box)
        plans[:] = [(reader, plan)]
        return hashlib.sha256(repr(sorted(plan.facts.items())).encode()).digest()

    with on_all_ranks(what, locate, prepare) as digests:
        reader, plan = plans[0]
        check_same(what, plan.facts, digests)
        return together(what, lambda: _Result(_read(reader, plan, state, tensors)))[rank].state


class _Result:
    """The state of this rank, of which other ranks get nothing."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[type[_Result], tuple[None]]:
        return _Result, (None,)


def _read(reader: Reader, plan: Plan, state: Any, tensors: Tensors) -> Any:
    found: dict[str, Any] = dict(plan.values)
    for name, wanted in plan.tensors.items():
        array = reader.read(name, wanted.box)
        if array.dtype.name != wanted.dtype:
            array = array.astype(numpy_dtype(wanted.dtype))
        found[name] = tensors.store(wanted.tensor, array)
    return trees.fill(state, plan.tree, found, tensors)


def plan_of(
    manifest: Manifest,
    state: Any,
    layouts: Mapping[str, Any] | None,
    tensors: Tensors,
    options: Options,
    rank: int,
    ranks: int,
) -> Plan:
    """Return what to read; nothing is changed. Raises `KeyError`, `TypeError`, `ValueError`."""
    tree = trees.expand(state, tensors, manifest)
    _check_empty_dicts(tree, manifest, options)
    leaves = dict(trees.leaves(tree, tensors))
    kinds = kinds_of(leaves, tensors)
    given = given_layouts(layouts, kinds, tree, ranks)
    wanted: dict[str, Wanted] = {}
    values: dict[str, Any] = {}
    facts: dict[str, str] = {}
    for name, leaf in leaves.items():
        if not _is_there(name, name in kinds, manifest, options):
            continue
        if name not in kinds:
            values[name] = manifest.values[name]
            continue
        record = manifest.tensors[name]
        layout = given.get(name) or whole(len(record.shape), ranks)
        wanted[name] = _wanted(name, leaf, layout, record, tensors, options, rank)
        facts[name] = str(layout) if tensors.part(leaf) is None else "a part of its own"
    return Plan(tree, wanted, values, facts)


def _is_there(name: str, is_tensor: bool, manifest: Manifest, options: Options) -> bool:
    if name in (manifest.tensors if is_tensor else manifest.values):
        return True
    if name in (manifest.values if is_tensor else manifest.tensors):
        kinds = ("tensor", "value") if is_tensor else ("value", "tensor")
        raise ValueError(f"{name!r} is a {kinds[0]} here, and a {kinds[1]} in the checkpoint")
    sentence = f"the checkpoint has no {name!r}{hint(name, manifest.names)}"
    if options.strict:
        raise KeyError(f"{sentence} (strict=False keeps what it lacks)")
    warn_user(f"{sentence}: it is kept as it is")
    return False


def _wanted(
    name: str,
    tensor: Any,
    layout: Layout,
    record: Record,
    tensors: Tensors,
    options: Options,
    rank: int,
) -> Wanted:
    dtype, shape = tensors.kind(tensor)
    part = tensors.part(tensor)
    if part is not None and part.shape != record.shape:
        raise ValueError(
            f"{name!r} has the shape {part.shape} here, and {record.shape} in the checkpoint"
        )
    try:
        box = layout.box(record.shape, rank) if part is None else part.box
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    expected = tuple(stop - start for start, stop in box)
    if shape != expected:
        of_it = "" if layout.is_whole else f", of which this rank holds {expected} under {layout}"
        raise ValueError(
            f"{name!r} has the shape {shape} here, and {record.shape} in the checkpoint{of_it}"
        )
    if "complex" in record.dtype and "complex" not in dtype:
        raise ValueError(
            f"{name!r} is {dtype} here, and {record.dtype} in the checkpoint: load it as that, and "
            "take the part of it that you want"
        )
    if dtype != record.dtype and not options.cast:
        raise ValueError(
            f"{name!r} is {dtype} here, and {record.dtype} in the checkpoint: cast=True converts it"
        )
    return Wanted(tensor, box, dtype)


def _check_empty_dicts(tree: Any, manifest: Manifest, options: Options) -> None:
    """Raise `ValueError` where the checkpoint has much for a dict in which there is nothing."""
    for name, is_of_optimizer in trees.empty_dicts(tree):
        lost = [each for each in manifest.names if each.startswith(f"{name}.")]
        if not lost:
            continue
        sentence = (
            f"{name!r} of the state is empty, and the checkpoint has {len(lost)} entries for it"
        )
        if is_of_optimizer:
            raise ValueError(
                f"{sentence}: an optimizer has no state before its first step. Give the optimizer "
                "itself instead of its state_dict()"
            )
        shown = f"{', '.join(map(repr, lost[:3]))}{', ...' if len(lost) > 3 else ''}"
        if not options.strict:
            warn_user(f"{sentence}, {shown}: it is kept empty")
            continue
        raise ValueError(
            f"{sentence}, {shown}: of a dict, the names that it has are loaded. Put these into it, "
            "or leave it out (strict=False keeps it empty)"
        )
