"""The reduction operations and their numbers, which are Horovod's as far as it has them."""

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
    # Bit by bit, of integers and bool. Horovod has none of them, and the public names lack them.
    BAND = 6
    BOR = 7
    BXOR = 8


BITWISE = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
