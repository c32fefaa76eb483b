"""The two spellings of every method of a process group: tensors with options, or one by one.

``group.allreduce([tensor], options)`` is what torch calls; ``group.allreduce(tensor, op)`` is for
people. The functions return what both mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from hvdlite.torch.process_group.reduce_ops import default_op

_NONE = timedelta(0)
Tensors = Sequence[torch.Tensor]


def as_list(tensors: torch.Tensor | Tensors) -> list[torch.Tensor]:
    """Return one or more tensors as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(
    many: Sequence[Any], one: torch.Tensor | Tensors
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return lists of tensors, one for each of the single tensors, and these."""
    if isinstance(one, torch.Tensor):
        return [list(many)], [one]
    return [list(each) for each in many], list(one)


def op_of(options: Any) -> Any:
    """Return the reduction that options, or an argument, say."""
    if options is None:
        return default_op()
    return getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """Return the rank in the group that options, or an argument, say."""
    return int(getattr(options, "rootRank", options))


def timeout_of(options: Any, timeout: Any, default: timedelta) -> timedelta:
    """Return how long to wait: what the call says, or the timeout of the group."""
    said = timeout if isinstance(timeout, timedelta) else getattr(options, "timeout", None)
    return said if isinstance(said, timedelta) and said > _NONE else default
