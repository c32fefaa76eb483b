"""What a rank in Spark runs: ``python -m hvdlite.spark.rank ANSWER``.

The call comes on standard input, which stays open as long as the task that has started this rank
lives. The answer goes into the file ANSWER.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from hvdlite.launcher.worker import dump_error


def main(path: str) -> int:
    """Call the function, and leave the answer; 1 when it raised."""
    fd = os.dup(0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    task = os.fdopen(fd, "rb")
    try:
        function, args, kwargs = _read_call(task)
        threading.Thread(target=_end_with_task, args=(task,), daemon=True).start()
        answer, code = cloudpickle.dumps(function(*args, **kwargs)), 0
    except Exception as error:
        answer, code = dump_error(error), 1
    Path(path).write_bytes(answer)
    return code


def _read_call(task: BinaryIO) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    version = pickle.load(task)
    if version != sys.version_info[:2]:
        driver, own = (".".join(map(str, number)) for number in (version, sys.version_info[:2]))
        raise RuntimeError(
            f"the driver runs Python {driver}, and {sys.executable} of this rank is Python {own}: "
            "functions are sent between equal versions only"
        )
    sys.path += [folder for folder in pickle.load(task) if folder not in sys.path]
    function, args, kwargs = pickle.load(task)
    return function, args, kwargs


def _end_with_task(task: BinaryIO) -> None:
    """End this process, and those that it has started, when the task is no more."""
    task.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
