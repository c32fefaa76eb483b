"""The public functions that choose how gradients of a process set are split into segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.common.base.warn import warn_user
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.runtime.state import current
from hvdlite.common.segmentation.parsing import (
    by_index,
    by_size,
    read_comm_fusion,
    read_strategy,
)
from hvdlite.common.segmentation.strategies import Index, Size, Strategy
from hvdlite.common.segmentation.user_choice import UserChoice


def set_split_strategy_by_size(
    percentages: Sequence[float], process_set: ProcessSet = global_process_set
) -> None:
    """Reduce gradients in segments of these percentages of their bytes, in the order of readiness.

    `percentages` are 1 to 8 numbers from 0 on with the sum 100: with ``[80, 20]``, the first four
    fifths that backward computes are one segment, and the rest is another. Call it on all ranks
    alike, after `init` and before the first gradient of the set is reduced. A second call replaces
    the first, and sizes win over indices, both with a warning. Raises `ValueError` for anything
    else.
    """
    _set_split(by_size(percentages), process_set)


def set_split_strategy_by_idx(
    indices: Sequence[int], process_set: ProcessSet = global_process_set
) -> None:
    """Reduce gradients in segments that end with the gradients of these indices, from 0 on.

    `indices` are 1 to 8 ascending numbers in the order of readiness, of which the last one belongs
    to the last gradient: ``[20, 100, 159]`` for 160 gradients. For everything else see
    `set_split_strategy_by_size`.
    """
    _set_split(by_index(indices), process_set)


def set_comm_fusion(
    config: dict[str, dict[str, Any]], process_set: ProcessSet = global_process_set
) -> None:
    """Fuse collectives as MindSpore's ``comm_fusion`` does.

    ``{"allreduce": {"mode": "size", "config": 32}}``: a segment of gradients has at most 32 MiB.
    The collectives are allreduce, allgather and reducescatter; the modes "auto" (64 MiB, config
    None), "size" (MiB, a whole number) and, for allreduce, "index" (a list of last indices; those
    past the last gradient are ignored with a warning, and the rest is one more segment).

    Call it on all ranks alike. Raises `TypeError`, `KeyError` or `ValueError` for a wrong `config`.
    """
    strategies = read_comm_fusion(config)
    runtime = current()
    gradients = [strategies.pop(name) for name in [*strategies] if SPECS[name].carries_gradients]
    _choice(runtime, process_set).set_fusion(next(iter(gradients), None), strategies)
    runtime.forget_calls()  # Prepared requests may contain other limits.


def _set_split(strategy: Size | Index, process_set: ProcessSet) -> None:
    warning = _choice(current(), process_set).set_split(strategy)
    if warning:
        warn_user(warning)


def _choice(runtime: Runtime, process_set: ProcessSet) -> UserChoice:
    process_set_id = process_set.process_set_id
    if process_set_id is None:
        raise ValueError(f"{process_set} is not registered: add it first")
    return runtime.choices.setdefault(process_set_id, UserChoice())


def chosen(process_set: ProcessSet) -> Strategy:
    """Return the strategy for gradients of `process_set`, by calls or by settings, and fix it.

    Raises `ValueError` before `init`.
    """
    runtime = current()
    by_calls = _choice(runtime, process_set).strategy()
    return by_calls or read_strategy(runtime.config.segmentation)
