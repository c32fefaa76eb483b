"""A process of a cluster without a framework: workers add numbers up on the servers, in steps.

`KILL=ROLE NUMBER STEP` kills a process when the worker 0 has finished a step, once for each file
in the folder that it is given; `FAIL=NUMBER` lets a worker exit with 3 in step 5; `SAY=STEP` lets
the worker 0 make the file `reached` there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from hvdlite.ps import context
from hvdlite.ps.context import PREFIX, serve
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions


def main(folder: Path, steps: int) -> None:
    context.init()
    role, number = context.role(), int(os.environ["HVDLITE_NODE_NUMBER"])
    where = os.environ.get("HVDLITE_HOST_NAME", "")
    print(f"{role} {number} is here: {where}", flush=True)
    victim, victims_number, kill_step = os.environ.get("KILL", "nobody 0 0").split()
    own_turn = (victim, int(victims_number)) == (role, number)
    if own_turn:
        threading.Thread(target=_die, args=(folder / "kill",), daemon=True).start()
    if role == "server":
        serve()
    values = [np.zeros(8), np.zeros(5)]
    specs = [TensorSpec(str(n), "float64", each.shape) for n, each in enumerate(values)]
    options = TableOptions("sync", average=False)
    table = context.worker().declare(PREFIX + "sums", specs, options, lambda: values)
    table.pull(values)
    for step in range(table.clock, steps):
        if os.environ.get("FAIL") == str(number) and step == 5:
            sys.exit(3)
        if number == 0 and os.environ.get("SAY") == str(step):
            (folder / "reached").touch()
        if number == 0 and step == int(kill_step) and victim != "nobody":
            (folder / "kill").touch()
            while (folder / "kill").exists():
                time.sleep(0.01)
        table.push([np.full(8, number + 1.0), np.ones(5)], {})
        table.pull(values)
    print("sums", values[0][0], values[1][4], flush=True)
    context.shutdown()


def _die(order: Path) -> None:
    while True:
        if order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
