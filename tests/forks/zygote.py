"""Forks processes for the one that started it: python -m tests.forks.zygote DESCRIPTOR MODULE...

It imports the modules, and has one thread. Each process that it forks is a child of the one that
asks for it, as if that had started it. One that starts processes itself has a zygote of its own,
which was forked before anything else happened in it.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forks import AGENT, LAUNCHERS, LENGTH, Zygote, popen_of, set_death_signal

CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
CLONE = {"x86_64": 56, "aarch64": 220}
PR_GET_TID_ADDRESS = 40
OURS = ("hvdlite", "tests")

_system = ctypes.PyDLL(None, use_errno=True)  # Its calls keep Python's lock.
_python = ctypes.pythonapi


def fork_sibling() -> int:
    """Fork, as `os.fork` does, a process whose parent is that of this one."""
    # Where the C library keeps the number of the thread.
    number = ctypes.c_void_p()
    _system.prctl(PR_GET_TID_ADDRESS, ctypes.byref(number), 0, 0, 0)
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | signal.SIGCHLD
    words = [ctypes.c_long(CLONE[os.uname().machine]), ctypes.c_long(flags)]
    # The last two are the address and what is not used, or the reverse.
    words += [ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(number.value or 0)]
    words += [words[-1]]
    _python.PyOS_BeforeFork()
    child = int(_system.syscall(*words))
    (_python.PyOS_AfterFork_Parent if child else _python.PyOS_AfterFork_Child)()
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return child


def requests(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request; return in it, with what it is to be. Ends with its user.

    The descriptors are those of its streams, and one that it closes when all is as after a start.
    """
    while True:
        head, fds, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        if not head:
            os._exit(0)
        (left,) = LENGTH.unpack(head)
        data = b""
        while len(data) < left:
            data += connection.recv(left - len(data))
        ready, becoming = os.pipe()
        child = fork_sibling()
        if child == 0:
            os.close(ready)
            return pickle.loads(data), [*fds, becoming]
        for fd in (*fds, becoming):
            os.close(fd)
        os.read(ready, 1)  # Ends when the child is what was asked for, or has died.
        os.close(ready)
        connection.sendall(LENGTH.pack(child))


def overwrite(words: list[str], environ: dict[str, str]) -> None:
    """Let /proc show this command line and environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin_words, end_words, begin_environ, end_environ = map(int, fields[45:49])
    for texts, begin, end in (
        (words, begin_words, end_words),
        ([f"{name}={text}" for name, text in environ.items()], begin_environ, end_environ),
    ):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(begin, block[: end - begin].ljust(end - begin, b"\0"), end - begin)


def become(request: dict[str, Any], fds: list[int], base: list[str]) -> None:
    """Be the process that is asked for, as after its start; `base` is where all modules are."""
    *streams, becoming = fds
    for to, fd in enumerate(streams):
        os.dup2(fd, to)
    for fd in streams:
        os.close(fd)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None:  # Those of the C library are none of ours.
            wanted = signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL
            signal.signal(number, wanted)
    if (prepare := pickle.loads(request["prepare"])) is not None:
        prepare()
    environ = request["environ"]
    start_python(environ, unbuffered=request["words"][1] == "-u")
    overwrite(request["words"], environ)
    given = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*map(os.path.abspath, given), *base]
    if any(Path(path, "sitecustomize.py").exists() for path in given):
        sys.modules.pop("sitecustomize", None)
        import_module("sitecustomize")
    os.close(becoming)


def start_python(environ: dict[str, str], unbuffered: bool) -> None:
    """Do what Python does at its start with signals, streams and the environment."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()  # Also the pointers of the C library to what is overwritten then.
    os.environ.update(environ)
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    unbuffered = unbuffered or bool(environ.get("PYTHONUNBUFFERED"))
    for fd, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        raw = io.FileIO(fd, "w", closefd=False)
        lines = fd == 2 or os.isatty(fd)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw), encoding=before.encoding,
            errors=before.errors, line_buffering=lines, write_through=unbuffered,
        )  # fmt: skip
        stream.mode = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "numpy.random" in sys.modules:
        import_module("numpy.random").seed()


def forget(before: set[str]) -> None:
    """Forget our modules that only launchers import."""
    for name in [each for each in sys.modules if each not in before]:
        if name.partition(".")[0] in OURS:
            del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(last, None)


def run(words: list[str]) -> None:
    """Run a command of Python, given as Python has it."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.orig_argv = words
    flag, *sys.argv = [word for word in words[1:3] if word != "-u"] + words[3:]
    if flag == "-m":
        sys.path.insert(0, os.getcwd())
        module, sys.argv[0] = sys.argv[0], "-m"
        sys.modules.pop(module, None)  # runpy warns of a module that is there.
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    elif flag == "-c":
        sys.path.insert(0, "")
        program, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(program, "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(flag)))
        sys.argv.insert(0, flag)
        main.__dict__["__file__"] = os.path.join(os.getcwd(), flag)
        exec(compile(Path(flag).read_bytes(), flag, "exec"), main.__dict__)


def let_launcher_fork(zygote: Zygote) -> None:
    """Let hvdlite-run, or an agent, start its processes by its zygote."""
    from functools import partial

    from hvdlite.launcher.processes import child

    subprocess.Popen = popen_of(zygote)  # type: ignore[misc]
    # As a function that can be sent.
    child.die_with_parent = lambda number: partial(set_death_signal, int(number))


def main() -> None:
    """Import all that is asked for, and be what is asked for."""
    started_with = {name: text for name, text in os.environ.items() if name != "ROOM"}
    base = sys.path[1:]
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.environ["HVDLITE_LAUNCHER_EVENTS"] = "token 0 /"  # What depends on it is imported, too.
    for module in sys.argv[2:-1]:
        import_module(module)
    del os.environ["HVDLITE_LAUNCHER_EVENTS"]
    known = {*sys.modules}
    for module in ("hvdlite.launcher.cli", AGENT):
        import_module(module)
    gc.collect()
    gc.freeze()  # Collections of forked processes would copy it.
    assert len(os.listdir("/proc/self/task")) == 1, "its threads would not be in its forks"
    while True:
        request, fds = requests(connection)
        connection.close()
        if request["words"][1:2] != ["-m"] or request["words"][2] not in (*LAUNCHERS, AGENT):
            forget(known)
            break
        ours, its = socket.socketpair()
        if os.fork():
            its.close()
            let_launcher_fork(Zygote(ours, started_with))
            break
        ours.close()
        for fd in fds:
            os.close(fd)
        connection = its
    become(request, fds, base)
    run(request["words"])


if __name__ == "__main__":
    main()
