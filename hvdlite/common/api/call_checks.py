"""What one rank can check of a call alone: its process set, dtype, operator, root and splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.tensor_entries import TensorEntry
from hvdlite.common.base.reduce_op import BITWISE, ReduceOp
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.adapter import COMPLEX, DTYPES, EXACT, FLOATS, Adapter, TensorSpec


def members_of(runtime: Runtime, what: str, process_set: ProcessSet) -> tuple[int, ...]:
    """Return the global ranks of a set that this rank belongs to. Raises `ValueError` otherwise."""
    members = registered(runtime, what, process_set)
    if runtime.rank not in members:
        raise ValueError(
            f"{what}: Rank {runtime.rank} is not a member of the provided process set {process_set}"
        )
    return members


def registered(runtime: Runtime, what: str, process_set: ProcessSet) -> tuple[int, ...]:
    """Return the global ranks of a set. Raises `ValueError` for one that does not exist."""
    process_set_id = process_set.process_set_id
    members = None
    if process_set_id is not None:
        members = runtime.engine.process_sets.find(process_set_id)
    if members is None:
        raise ValueError(
            f"{what}: Process set provided does not exist or is not registered: {process_set}"
        )
    return members


def check_text(collective: str, name: str) -> None:
    """Raise `ValueError` for a name that no message can carry."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{collective} {name!a}: the name cannot be sent to other ranks, as "
            f"{name[error.start]!a} at position {error.start} is half a character (a surrogate, "
            "as from a file name that is not UTF-8): give another name"
        ) from None


def check_call(
    collective: str, name: str, spec: TensorSpec, options: CallOptions, members: tuple[int, ...]
) -> None:
    """Raise `ValueError` for what no other rank could make right."""
    collective_spec = SPECS[collective]
    if spec.dtype not in DTYPES:
        raise ValueError(
            f"{collective} '{name}': Tensor type {spec.dtype} is not supported; "
            f"these are: {', '.join(sorted(DTYPES))}. Convert it, or send it by broadcast_object "
            "or allgather_object"
        )
    if collective_spec.reduces:
        _check_reduction(f"{collective} '{name}'", spec.dtype, options.reduce_op)
        for factor in (options.prescale_factor, options.postscale_factor):
            if isinstance(factor, str) or math.isnan(factor):
                raise ValueError(f"{collective} '{name}': {factor!r} is no scale factor")
            if options.reduce_op in BITWISE and factor != 1:
                raise ValueError(
                    f"{collective} '{name}': {options.reduce_op.name} is not scaled: give no "
                    f"factor, not {factor}"
                )
        if not collective_spec.scalars and not spec.shape:
            raise ValueError(f"{collective} '{name}' does not support scalar inputs")
    if collective_spec.rooted and not isinstance(options.root_rank, (int, np.integer)):
        raise ValueError(
            f"{collective} '{name}': invalid root rank {options.root_rank!r}: give a whole number"
        )
    if collective_spec.rooted and options.root_rank not in members:
        raise ValueError(
            f"{collective} '{name}': invalid root rank {options.root_rank}: "
            f"the process set has the global ranks {list(members)}"
        )


def _check_reduction(what: str, dtype: str, reduce_op: ReduceOp) -> None:
    if reduce_op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in COMPLEX:
        raise ValueError(
            f"{what}: {reduce_op.name.capitalize()} of {dtype} has no meaning: complex numbers "
            "have no order. Reduce the real and imaginary parts, or the absolute values"
        )
    if reduce_op is ReduceOp.AVERAGE and dtype == "bool":
        raise ValueError(
            f"{what}: the Average of bool has no meaning. Use op=Sum or Max for 'on any rank', "
            "Product or Min for 'on all ranks', or convert to a number type"
        )
    if reduce_op in BITWISE and dtype not in EXACT:
        raise ValueError(
            f"{what}: {reduce_op.name} of {dtype} has no meaning: bits are combined of integers "
            "and bool. View the tensor as integers of the same size"
        )
    if reduce_op is ReduceOp.ADASUM and dtype not in FLOATS:
        raise ValueError(f"{what}: Adasum needs a floating-point tensor, this is {dtype}")


def splits_of(
    adapter: Adapter[Any], name: str, spec: TensorSpec, options: CallOptions, members: int
) -> tuple[int, ...]:
    """Return the rows of an alltoall for each member. Raises `ValueError`."""
    what = f"alltoall '{name}'"
    rows = spec.shape[0] if spec.shape else 0
    if options.splits is None:
        if spec.shape and rows % members:
            raise ValueError(
                f"{what}: without splits the first dimension must be divisible by the number of "
                f"ranks; {rows} rows for {members} ranks"
            )
        return (rows // members,) * members
    try:
        splits = adapter.read_splits(options.splits)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if len(splits) != members:
        raise ValueError(f"{what}: {len(splits)} splits for {members} ranks")
    if any(split < 0 for split in splits):
        raise ValueError(f"{what}: splits must not be negative: {splits}")
    if sum(splits) > rows:
        raise ValueError(f"{what}: the splits {splits} sum to {sum(splits)}, beyond {rows} rows")
    return tuple(splits)


# Checks of the tensors that results are written to, before anything is sent.


def check_target(
    collective: str, name: str, spec: TensorSpec, target: TensorSpec, members: int, index: int
) -> None:
    """Raise `ValueError` for a target that has no room for the result, or too much.

    `spec` is the tensor of the member at `index`. Where other ranks decide how many rows come, the
    entry tells it after the run.
    """
    elements = math.prod(target.shape)
    result = SPECS[collective].result_elements(spec.shape, members, index)
    what = f"{collective} '{name}': the target has the shape {list(target.shape)}"
    if target.dtype != spec.dtype:
        raise ValueError(f"{what} of {target.dtype}, and the result is of {spec.dtype}")
    if result is not None and elements != result:
        raise ValueError(
            f"{what}, which is {elements} elements, and the result has {result}: the tensor has "
            f"the shape {list(spec.shape)}, on {members} ranks"
        )
    row = math.prod(spec.shape[1:])
    if result is None and row and elements % row:
        raise ValueError(
            f"{what}, which is {elements} elements, and the result has rows of {row}: the tensor "
            f"has the shape {list(spec.shape)}"
        )


def check_targets(entries: Sequence[TensorEntry[Any]]) -> None:
    """Raise `ValueError` where two tensors of an in-place group have memory in common.

    One result would be written while another rank may still read the other's input: the values
    would depend on timing, and differ between ranks. Addresses cost 1 us for each tensor, so that
    they are compared once for a name, and afterwards only whether a tensor is there twice.
    """
    if not entries:
        return
    last_end, last = 0, entries[0]
    for start, index in sorted((each.target_address, i) for i, each in enumerate(entries)):
        entry = entries[index]
        if start < last_end and entry.size_bytes:
            raise ValueError(
                f"{entry.request.collective} '{entry.request.name}' and '{last.request.name}' "
                "share memory: in place, each tensor of a group needs memory of its own. Give one "
                "of them once, give a clone, or call the form that is not in place"
            )
        if entry.size_bytes:
            last_end, last = start + entry.size_bytes, entry
