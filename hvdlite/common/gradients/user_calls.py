"""How the gradients of a process set are split into segments: what a user says in calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.common.base.warn import warn_user
from hvdlite.common.collectives.table import ROWS
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

    1 to 8 numbers from 0 on with the sum 100: ``[80, 20]`` is a segment of the first four fifths
    that backward has ready, and one of the rest. Call it on all ranks alike, after `init` and
    before the first gradient of the set is reduced. A second call takes the place of the first, and
    sizes win over indices, both with a warning. Raises `ValueError` for anything else.
    """
    _set_split(by_size(percentages), process_set)


def set_split_strategy_by_idx(
    indices: Sequence[int], process_set: ProcessSet = global_process_set
) -> None:
    """Reduce gradients in segments that end with the gradients of these numbers, from 0 on.

    1 to 8 ascending numbers in the order of readiness; the last is that of the last gradient:
    ``[20, 100, 159]`` of 160. For the rest as `set_split_strategy_by_size`.
    """
    _set_split(by_index(indices), process_set)


def set_comm_fusion(
    config: dict[str, dict[str, Any]], process_set: ProcessSet = global_process_set
) -> None:
    """Fuse collectives as MindSpore's ``comm_fusion`` says.

    ``{"allreduce": {"mode": "size", "config": 32}}``: a segment of gradients has at most 32 MiB.
    The collectives are allreduce, allgather and reducescatter; the modes "auto" (64 MiB, config
    None), "size" (MiB, a whole number) and, for allreduce, "index" (a list of last indices; what
    lies past the last gradient is ignored with a warning, and the rest is one more segment).

    Call it on all ranks alike. Raises `TypeError`, `KeyError` or `ValueError` for what is wrong.
    """
    strategies = read_comm_fusion(config)
    runtime = current()
    gradients = [strategies.pop(name) for name in [*strategies] if ROWS[name].carries_gradients]
    _choice(runtime, process_set).set_fusion(next(iter(gradients), None), strategies)
    runtime.requests.clear()  # some may be made with other limits


def _set_split(strategy: Size | Index, process_set: ProcessSet) -> None:
    warning = _choice(current(), process_set).set_split(strategy)
    if warning:
        warn_user(warning)


def _choice(runtime: Runtime, process_set: ProcessSet) -> UserChoice:
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} is not registered: add it first")
    return runtime.choices.setdefault(number, UserChoice())


def chosen(process_set: ProcessSet) -> Strategy:
    """How gradients of `process_set` are cut from now on, by calls or by settings.

    Raises `ValueError` before `init`.
    """
    runtime = current()
    by_calls = _choice(runtime, process_set).strategy()
    return by_calls or read_strategy(runtime.config.segmentation)
