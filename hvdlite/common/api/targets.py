"""Checks of the tensors that results are written to, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvdlite.common.api.tensor_entries import TensorEntry
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.plain.adapter import TensorSpec


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
