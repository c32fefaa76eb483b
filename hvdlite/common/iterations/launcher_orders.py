"""Obeys the orders of the launcher in this rank (connections/order_lines.py), as to show its stack.

One thread reads them from a named pipe, and sleeps there until one comes: a rank that nobody looks
at pays nothing. It works while the training thread hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from hvdlite.common.base.report_failure import (
    EVENTS_VARIABLE,
    STANDARD_ERROR,
    launcher_pipe,
    tell_launcher,
)
from hvdlite.common.base.user_frames import main_thread_stack
from hvdlite.common.connections.order_lines import (
    BEGUN,
    COUNT,
    OF_ALL,
    PASS,
    PIPE_NAME,
    STACK,
    TENSOR,
    TIMELINE,
    Order,
    pack_answer,
    pack_order,
    unpack_order,
)
from hvdlite.common.iterations.counts import Counts
from hvdlite.common.requests.messages import EVERY_RANK
from hvdlite.common.runtime.current import this_process
from hvdlite.common.runtime.runtime import Runtime

Answer = dict[str, Any]
READ_BYTES = 1 << 16
MOST_STEPS = 10_000  # Of a timeline.
SILENT_SECONDS = 30.0  # A timeline ends when so long no step has ended.
WRITE_SECONDS = 2.0  # The pipe to the launcher may be full for a while.

_obeying: set[int] = set()  # Of processes: a forked child is none that obeys.


def obey_launcher(counts: Callable[[], Counts]) -> None:
    """Obey the launcher of this process from now on, where there is one on this host.

    `counts` begins to count, if need be, for a thread that does not train.
    """
    folder = _folder()
    if folder is None or os.getpid() in _obeying:
        return
    _obeying.add(os.getpid())
    rank = os.environ[EVENTS_VARIABLE].split(" ", 2)[1]
    pipe = os.path.join(folder, f"{PIPE_NAME}.{rank}")
    with contextlib.suppress(OSError):  # The launcher is gone.
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe, 0o600)
        # Open for writing, too: then it does not end when a writer leaves.
        fd = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(
            target=_obey, args=(fd, counts), name="hvdlite-orders", daemon=True
        ).start()


# The orders that other ranks have passed on to this process, by its id; a thread obeys them.
_passed: dict[int, SimpleQueue[str]] = {}


def obey_passed_orders(runtime: Runtime, counts: Callable[[], Counts]) -> None:
    """Obey in this world what ranks on the launcher's host pass on, where that has no pipe here."""
    if launcher_pipe() != STANDARD_ERROR:
        return
    lines = _passed.get(os.getpid())
    if lines is None:
        lines = _passed[os.getpid()] = SimpleQueue()
        threading.Thread(
            target=_obey_passed, args=(lines, counts), name="hvdlite-orders", daemon=True
        ).start()
    runtime.engine.take_launcher_orders(lines.put)


def _obey_passed(lines: SimpleQueue[str], counts: Callable[[], Counts]) -> None:
    while True:
        order = unpack_order(lines.get())
        if order is not None:
            _obey_order(order, counts)


def launcher_has_asked_to_count(runtime: Runtime) -> bool:
    """Return whether somebody has looked at this job before; tell ranks that cannot see it.

    To be asked after each `init`: the order to count, which is given once, may have come to a
    process that was none of the ranks just then, such as between two worlds of an elastic job.
    """
    folder = _folder()
    if folder is None:
        return False
    try:
        with open(os.path.join(folder, COUNT), "rb") as file:
            if file.read() == OF_ALL:
                runtime.engine.pass_launcher_order(EVERY_RANK, pack_order(Order(0, COUNT)))
    except OSError:
        return False
    return True


def _folder() -> str | None:
    """Return the folder of the launcher's pipe; None where it has none on this host."""
    path = launcher_pipe()
    return None if path is None or path == STANDARD_ERROR else os.path.dirname(path)


def _obey(fd: int, counts: Callable[[], Counts]) -> None:
    rest = b""
    while True:
        *lines, rest = (rest + os.read(fd, READ_BYTES)).split(b"\n")
        for line in lines:
            order = unpack_order(line.decode(errors="replace"))
            if order is not None:
                _obey_order(order, counts)


def _obey_order(order: Order, counts: Callable[[], Counts]) -> None:
    try:
        answer = OBEY[order.kind](order, counts)
    except Exception as error:  # No order may end a training.
        answer = _error(error)
    if answer is not None:
        _answer(order.number, answer)


def _answer(number: int, value: Answer) -> None:
    for line in pack_answer(number, value):
        tell_launcher("answer", line, seconds=WRITE_SECONDS)


def _count(_order: Order, counts: Callable[[], Counts]) -> None:
    counts().tell_launcher()


def _tensor(order: Order, counts: Callable[[], Counts]) -> Answer:
    (name,) = order.arguments
    return counts().history(str(name))


def _pass(order: Order, _counts: Callable[[], Counts]) -> None:
    rank, line = order.arguments
    runtime = this_process.runtime
    if runtime is not None:
        runtime.engine.pass_launcher_order(int(rank), str(line))


def _timeline(order: Order, counts: Callable[[], Counts]) -> None:
    path, steps = order.arguments

    def record() -> None:
        try:
            answer = _record(counts(), order.number, str(path), min(max(int(steps), 1), MOST_STEPS))
        except Exception as error:
            answer = _error(error)
        _answer(order.number, answer)

    threading.Thread(target=record, name="hvdlite-timeline-order", daemon=True).start()


def _record(counts: Counts, order: int, path: str, steps: int) -> Answer:
    """Write a timeline of the next steps, whose file is told at once as an answer to `order`."""
    recording = counts.runtime.recording
    if recording.timeline.enabled:
        raise RuntimeError("this rank writes a timeline already")
    file = recording.start(os.path.abspath(path), False)
    if not file:
        recording.stop()
        raise RuntimeError("another one is rank 0 by now: ask again")
    try:
        _answer(order, {BEGUN: file})
        seen = counts.wait_for_steps(steps, SILENT_SECONDS)
    finally:
        if recording.timeline.records_to(file):  # The script may have begun one meanwhile.
            recording.stop()
    return {"file": file, "steps": seen, "seconds": SILENT_SECONDS}


def _error(error: Exception) -> Answer:
    return {"error": f"{type(error).__name__}: {error}"}


OBEY: dict[str, Callable[[Order, Callable[[], Counts]], Answer | None]] = {
    COUNT: _count,
    STACK: lambda order, counts: {"stack": main_thread_stack()},
    TENSOR: _tensor,
    TIMELINE: _timeline,
    PASS: _pass,
}
