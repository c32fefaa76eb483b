"""What a rank of hvdlite.run runs: `python -m hvdlite.launcher.function_rank`.

The function comes, and the answers go, through files in a directory that only the user may enter.
Agents have such a directory on each host; under mpirun it is one that all hosts share. In Spark a
task starts it `WITH_INPUT`, which stays open as long as that task lives.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.report_failure import leave_out_own_frames, report
from hvdlite.launcher.jobs.passed_variables import CALL_VARIABLE

CALL = "call.pickle"
WITH_INPUT = "--end-with-input"
RANK_VARIABLE = "HVDLITE_RANK"
WORKER_VARIABLE = "HVDLITE_WORKER"  # Of an elastic job, whose ranks change: its number.
OLDEST_PROTOCOL = 2  # Of pickle: each Python 3 reads it.


@dataclass(frozen=True)
class Raised:
    """The exception that a rank's function raised."""

    error: BaseException | None  # None: it cannot be pickled
    text: str  # the traceback
    victim: bool  # it only tells of another rank's failure
    when: float  # epoch seconds
    rank: int = -1  # Of a worker of an elastic job, at its start.


def dump_call(call: tuple[Any, ...]) -> bytes:
    """Return ``(function, args, kwargs)`` as ranks read it from the file CALL."""
    origin = tuple(sys.version_info[:2]), sys.path
    pickled: bytes = pickle.dumps(origin, protocol=OLDEST_PROTOCOL) + cloudpickle.dumps(call)
    return pickled


def read_answers(directory: str, ranks: Iterable[int]) -> dict[int, Any]:
    """Return each rank's result, or `Raised`; ranks that gave no answer are left out.

    The ranks of an elastic job are workers by number here. Raises `HorovodInternalError` for a
    result that does not load in this process.
    """
    answers = {}
    for rank in ranks:
        path = _answer_path(directory, rank)
        if path.exists():
            try:
                answers[rank] = pickle.loads(path.read_bytes())
            except Exception as error:
                raise HorovodInternalError(
                    f"the result of rank {rank} cannot be loaded here ({type(error).__name__}: "
                    f"{error}): return what pickle can load in the process that called run()",
                    rank,
                ) from error
    return answers


def read_failures(directory: str) -> dict[int, Raised]:
    """Return what the workers of an elastic job have raised, by their rank at the start.

    Of several with one rank, it is the last. Parts of answers from hosts that were lost are no use.
    """
    found = []
    for path in Path(directory).glob("answer.*.pickle"):
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            answer = pickle.loads(path.read_bytes())
            if isinstance(answer, Raised) and answer.rank >= 0:
                found.append(answer)
    return {answer.rank: answer for answer in sorted(found, key=lambda answer: answer.when)}


def _answer_path(directory: str, rank: int) -> Path:
    return Path(directory, f"answer.{rank}.pickle")


def main() -> int:
    """Call the function, and leave the answer; 1 when it raised."""
    if WITH_INPUT in sys.argv:
        sys.argv.remove(WITH_INPUT)  # The function may read the arguments of its program.
        task = os.dup(0)
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        threading.Thread(target=_end_with, args=(task,), daemon=True).start()
    directory = os.environ[CALL_VARIABLE]
    start_rank = int(os.environ[RANK_VARIABLE])
    rank = int(os.environ.get(WORKER_VARIABLE, start_rank))
    try:
        answer, code = _dump_result(_call(directory)), 0
    except Exception as error:
        report(error)  # now: the other ranks notice only when this process ends
        answer, code = dump_error(error, start_rank), 1
    path = _answer_path(directory, rank)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(answer)
    unfinished.rename(path)
    return code


def _dump_result(result: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the function returns a {type(result).__name__}, which cannot be sent ({error}): "
            "return what pickle takes, such as a list in place of a generator"
        ) from error
    return pickled


def _end_with(task: int) -> None:
    """End this process, and those that it has started, when the task is no more."""
    os.read(task, 1)
    os.killpg(0, signal.SIGKILL)


def _call(directory: str) -> Any:
    if not os.path.exists(directory):
        sys.exit(
            f"hvdlite.run: this host has no {directory}: to run on several hosts, start in a "
            "working directory that all of them share"
        )
    with Path(directory, CALL).open("rb") as file:
        version, paths = pickle.load(file)
        # The bytecode in a pickled function is that of one minor version; another crashes on it.
        theirs, ours = ("{}.{}".format(*each) for each in (version, sys.version_info))
        if theirs != ours:
            raise RuntimeError(
                f"host {socket.gethostname()} runs Python {ours} ({sys.executable}), and the "
                f"function comes from Python {theirs}: a function can be sent only to the same "
                "minor version, so install one for all ranks"
            )
        sys.path += [path for path in paths if path not in sys.path]
        function, args, kwargs = pickle.load(file)
    return function(*args, **kwargs)


def dump_error(error: Exception, rank: int = -1) -> bytes:
    leave_out_own_frames(error)
    text = "".join(traceback.format_exception(error))
    victim = isinstance(error, HorovodInternalError)
    when = time.time()
    try:
        answer: bytes = cloudpickle.dumps(Raised(error, text, victim, when, rank))
        pickle.loads(answer)  # an exception with arguments of its own may not come back
    except Exception:
        answer = cloudpickle.dumps(Raised(None, text, victim, when, rank))
    return answer


if __name__ == "__main__":
    # Through the module, so that Raised is pickled under the name that the caller knows.
    from hvdlite.launcher import function_rank

    sys.exit(function_rank.main())
