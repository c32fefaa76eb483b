"""The end of a worker's process whose driver has gone, from a thread that is not the main one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

END_SECONDS = 1.5  # How long the script may take to end by itself.
STEP_SECONDS = 0.01


class ProcessEnd:
    """Ends this process once; made early, so that other handlers of its exit run first."""

    def __init__(self) -> None:
        self._code: int | None = None
        # CPython takes an exception of another thread for one without a value where nothing has
        # caught it, so the code of `SystemExit` may get lost.
        atexit.register(self._keep_code)

    def begin(self, code: int, is_ending: Callable[[], bool]) -> None:
        """End with `code`: by `SystemExit` in the main thread, or without it in the end.

        Returns when `is_ending` says that the process ends by itself.
        """
        self._code = code

        class JobIsOver(SystemExit):
            def __init__(self) -> None:
                super().__init__(code)

        # It is raised as soon as the main thread runs Python code.
        ident = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(JobIsOver))
        end = time.monotonic() + END_SECONDS
        while not is_ending():
            if time.monotonic() > end:
                _exit_at_once(code)
            time.sleep(STEP_SECONDS)

    def cancel(self) -> None:
        """Leave the exit alone, unless it has begun."""
        if self._code is None:
            atexit.unregister(self._keep_code)

    def _keep_code(self) -> None:
        if self._code is not None:
            _exit_at_once(self._code)


def _exit_at_once(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
