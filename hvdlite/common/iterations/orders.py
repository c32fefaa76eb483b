"""Obeys the orders of the launcher in this rank (connections/orders.py), such as to show its stack.

One thread reads them from a named pipe, and sleeps there until one comes: a rank that nobody looks
at pays nothing. It works while the training thread hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from hvdlite.common.base.report_failure import (
    EVENTS_VARIABLE,
    STANDARD_ERROR,
    launcher_pipe,
    main_thread_stack,
    tell_launcher,
)
from hvdlite.common.connections.orders import (
    BEGUN,
    COUNT,
    PIPE_NAME,
    STACK,
    TENSOR,
    TIMELINE,
    Order,
    pack_answer,
    unpack_order,
)
from hvdlite.common.iterations.counts import Counts

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


def launcher_has_asked_to_count() -> bool:
    """Return whether somebody has looked at this job before.

    To be asked after each `init`: the order to count, which is given once, may have come to a
    process that was none of the ranks just then, such as between two worlds of an elastic job.
    """
    folder = _folder()
    return folder is not None and os.path.exists(os.path.join(folder, COUNT))


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


def _stack(_order: Order, _counts: Callable[[], Counts]) -> Answer:
    return {"stack": main_thread_stack()}


def _tensor(order: Order, counts: Callable[[], Counts]) -> Answer:
    (name,) = order.arguments
    return counts().history(str(name))


def _timeline(order: Order, counts: Callable[[], Counts]) -> None:
    path, steps = order.arguments

    def begun(file: str) -> None:
        _answer(order.number, {BEGUN: file})

    def record() -> None:
        try:
            answer = _record(counts(), str(path), min(max(int(steps), 1), MOST_STEPS), begun)
        except Exception as error:
            answer = _error(error)
        _answer(order.number, answer)

    threading.Thread(target=record, name="hvdlite-timeline-order", daemon=True).start()


def _record(counts: Counts, path: str, steps: int, begun: Callable[[str], None]) -> Answer:
    """Write a timeline of the next steps, whose file `begun` is told of at once."""
    recording = counts.runtime.recording
    if recording.timeline.enabled:
        raise RuntimeError("this rank writes a timeline already")
    file = recording.start(os.path.abspath(path), False)
    if not file:
        recording.stop()
        raise RuntimeError("another one is rank 0 by now: ask again")
    try:
        begun(file)
        seen = counts.wait_for_steps(steps, SILENT_SECONDS)
    finally:
        if recording.timeline.records_to(file):  # The script may have begun one meanwhile.
            recording.stop()
    return {"file": file, "steps": seen, "seconds": SILENT_SECONDS}


def _error(error: Exception) -> Answer:
    return {"error": f"{type(error).__name__}: {error}"}


OBEY: dict[str, Callable[[Order, Callable[[], Counts]], Answer | None]] = {
    COUNT: _count, STACK: _stack, TENSOR: _tensor, TIMELINE: _timeline,
}  # fmt: skip
