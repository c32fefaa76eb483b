"""A KeyboardInterrupt at any point of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.engine import engine, inbox, pending, short_calls
from hvdlite.common.requests import handles
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks
from tests.short_calls import begin, interrupted_after, until

pytestmark = pytest.mark.timeout(120)
MODULES = [engine, inbox, pending, short_calls, handles]


@pytest.mark.parametrize("cycle_time_ms", [0, 1])
@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_async])
def test_what_a_rank_has_counted_is_reported(
    call: Callable[..., Any], cycle_time_ms: float
) -> None:
    """No other rank waits for it in vain, and its name can come again."""

    def main(rank: int) -> None:
        table = current().engine._pending
        begin()
        for points in range(1000):
            go_on, run = np.zeros(1), partial(call, np.ones(2), name=f"x{points}")
            if rank:
                run()
            else:
                go_on += interrupted_after(table, "add", points, MODULES, run)
                until(lambda: not table._entries)
            if not hvd.allreduce(go_on, name="go on", op=hvd.Sum)[0]:
                break
        assert 3 < points < 200

    run_ranks(2, main, config=Config(cycle_time_ms=cycle_time_ms))
