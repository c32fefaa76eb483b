"""Processes of Python that are forked instead of started anew, for tests that start jobs.

What a process imports costs more than most tests do with it: half a second of a core for a rank,
two for PyTorch. `Popen` of `forks` is `subprocess.Popen` for all else: who starts a process is its
parent; its command line, its environment in /proc, its exit code and its end with its parent are
those of a process that is started. hvdlite-run and its agents that are forked so fork their
processes in turn. What forked processes share is the seed of Python's hashes.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle

ROOT = Path(__file__).parents[2]
ZYGOTE = "tests.forks.zygote"
LENGTH = struct.Struct("=q")
# What ranks import, and what the preloaded process has for each kind of them.
NUMPY = ("hvdlite.numpy",)
TORCH = ("tests.lean", "hvdlite.torch", "torch.optim")
# Commands of these modules start processes themselves.
LAUNCHERS = ("hvdlite.launcher", "tests.launcher.impatient", "tests.launcher.live.hasty")
AGENT = "hvdlite.launcher.agent_process.agent"
# Variables that are read when a process starts, or imports a framework.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "MKL_", "TORCH_",
                 "LC_", "LANG")  # fmt: skip
# Of these, a forked process heeds what it is told.
HEEDED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONBREAKPOINT"}
ROOM_ARGUMENT, ROOM_VARIABLE = "-" * 16_000, "=" * 64_000  # For what /proc shows of others.

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1

_signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Zygote:
    """One end of the connection to a child process that forks what this process starts."""

    def __init__(self, connection: socket.socket, started_with: Mapping[str, str]) -> None:
        self._connection, self._started_with = connection, read_at_start(started_with)
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Let a child process of this one be forked; return its number. Raises `OSError`."""
        data = pickle.dumps(request)
        with self._lock:
            socket.send_fds(self._connection, [LENGTH.pack(len(data))], fds)
            self._connection.sendall(data)
            answer = self._connection.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(answer) < LENGTH.size:
            raise ConnectionError("the process that forks others has ended")
        (pid,) = LENGTH.unpack(answer)
        return int(pid)

    def takes(self, words: list[str], environ: Mapping[str, str], folder: str) -> bool:
        """Return whether a command is Python's, as this process has it, and can be forked."""
        program = shutil.which(words[0], path=environ.get("PATH"))
        if program is None or len(words) < 2:
            return False
        here = os.path.dirname(sys.executable)
        python = os.path.dirname(program) == here and os.path.samefile(program, sys.executable)
        known = words[1] in ("-m", "-c") or words[1:3] == ["-u", "-c"]
        known = known or os.path.isfile(os.path.join(folder, words[1]))
        return python and known and read_at_start(environ) == self._started_with


def read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a forked process cannot have otherwise than its zygote."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_AT_START) and name not in HEEDED
    }


def popen_of(zygote: Zygote) -> type[subprocess.Popen[Any]]:
    """Return a class that lets Python's commands be forked by the zygote, and starts others."""

    class Forked(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, *args: Any, **kwargs: Any) -> None:
            given = _signature.bind(self, *args, **kwargs).arguments
            words = given["args"]
            words = [words] if isinstance(words, str) else [os.fsdecode(word) for word in words]
            environ = os.environ if given["env"] is None else given["env"]
            folder = os.fsdecode(given["cwd"] or os.getcwd())
            plain = not (given["shell"] or given["executable"] or given["pass_fds"])
            plain = plain and os.path.isdir(folder)
            if not (plain and zygote.takes(words, environ, folder)):
                super()._execute_child(*args, **kwargs)  # type: ignore[misc]
                return
            ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            request = {
                "words": words, "environ": dict(environ), "folder": folder,
                "session": given["start_new_session"], "ignored": _ignored(),
                "prepare": cloudpickle.dumps(given["preexec_fn"]),
            }  # fmt: skip
            self.pid = zygote.fork(
                request, [fd if end == -1 else end for fd, end in enumerate(ends)]
            )
            self._child_created = True
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    return Forked


def set_signals(ignored: Collection[int] = ()) -> None:
    """Set the dispositions that a job starts with, whatever those of the test command are."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def set_death_signal(number: int) -> None:
    """Let this process be ended by a signal when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _ignored() -> list[int]:
    """Return the signals that this process ignores, and so what it starts."""
    by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    found = signal.valid_signals() - by_python
    return [int(each) for each in found if signal.getsignal(each) is signal.SIG_IGN]


@cache
def forks(*modules: str, **variables: str) -> type[subprocess.Popen[Any]]:
    """Return `Popen` whose processes have imported these modules, as of a process of this one.

    The variables are set while the modules are imported.
    """
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environ = {n: text for n, text in environ.items() if not n.startswith(("HVDLITE_", "HOROVOD_"))}
    environ["OMP_NUM_THREADS"] = "1"
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", ZYGOTE, str(its.fileno()), *modules, ROOM_ARGUMENT],
            env={**environ, **variables, "ROOM": ROOM_VARIABLE}, cwd=ROOT, pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    atexit.register(_end, ours, process)
    return popen_of(Zygote(ours, environ))


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()
