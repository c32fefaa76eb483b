"""The reduction operations and their numbers, which are Horovod's."""

from __future__ import annotations

from enum import IntEnum


class ReduceOp(IntEnum):
    """How values of several ranks become one."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
