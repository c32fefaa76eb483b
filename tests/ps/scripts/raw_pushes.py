"""A process of a cluster whose workers push many steps before they pull what has become of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from hvdlite.ps import context
from hvdlite.ps.context import PREFIX, serve
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.worker.shard import PsRolledBack


def main(folder: Path, pushes: int, saved: int, steps: int) -> None:
    """Go back from step `pushes` to step `saved`, and on to step `steps`."""
    context.init()
    if context.role() == "server":
        serve()
    rank = context.rank()
    values = [np.zeros(8), np.zeros(5)]
    specs = [TensorSpec(str(n), "float64", each.shape) for n, each in enumerate(values)]
    options = TableOptions("sync", average=False)
    table = context.worker().declare(PREFIX + "sums", specs, options, lambda: values)
    table.pull(values)

    def push() -> None:
        handle = table.push([np.full(8, rank + 1.0), np.ones(5)], {})
        assert handle.ended_within(30)
        handle.wait()

    while table.clock < pushes:
        push()
    (folder / f"pushed{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    with pytest.raises(PsRolledBack, match=f"goes on from step {saved}, and this wo") as raised:
        table.pull(values)
    assert raised.value.version == table.clock == saved
    while table.clock < steps:
        push()
        table.pull(values)
    print("sums", values[0][0], values[1][4], os.environ["HVDLITE_NODE_ID"], flush=True)
    context.shutdown()
