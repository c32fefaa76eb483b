"""What a rank in Spark runs: a rank of `hvdlite.run` that ends with the task that has started it.

Standard input stays open as long as that task lives.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from hvdlite.launcher import function_rank


def main() -> int:
    """Call the function, and leave the answer; 1 when it raised."""
    task = os.dup(0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    threading.Thread(target=_end_with_task, args=(task,), daemon=True).start()
    return function_rank.main()


def _end_with_task(task: int) -> None:
    """End this process, and those that it has started, when the task is no more."""
    os.read(task, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
