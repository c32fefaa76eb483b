"""Compiles `native_ops.cc` once on a machine, into the user's cache.

    ~/.cache/hvdlite/tf/ops-2.21.0-<hash of all that it depends on>.so
                                                                   .so.lock      of who compiles
                                                                   .so.failed    why it could not

The ranks of a host, and hosts that share the directory, may all come here at the same time: one
compiles, the others wait for it. Nobody ever sees half a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

log = logging.getLogger("hvdlite")

SOURCE = Path(__file__).with_name("native_ops.cc")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O2", "-fPIC", "-shared", "-w")  # -w: TensorFlow's headers are full of warnings
_LIMIT_SECONDS = 600  # for the compiler, and for waiting for another process that runs it
_SAY_AFTER_SECONDS = 20
_LOOK_SECONDS = 0.1


class BuildError(Exception):
    """The operations cannot be compiled, or loaded; the text says why."""


def compiled() -> Path | None:
    """The compiled operations for this TensorFlow, if they are there. Raises `BuildError`."""
    directory = _cache()
    if not directory.exists():
        return None
    path = _private(directory) / _file_name()
    return path if path.exists() else None


def compile_once(try_again: bool = False) -> Path:
    """The compiled operations for this TensorFlow; compiled now if they are not there.

    What has failed before fails again at once, unless you `try_again` or the compiler is another.
    Raises `BuildError`.
    """
    found = compiled()
    if found is not None:
        return found
    compiler = _compiler()
    path = _private(_made(_cache())) / _file_name()
    with _locked(path.with_name(path.name + ".lock")):
        if not path.exists():  # another process may have made it meanwhile
            _compile(compiler, path, try_again)
    return path


def _cache() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return base / "hvdlite" / "tf"


def _made(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{error}; set XDG_CACHE_HOME to a directory of your own") from None
    return directory


def _private(directory: Path) -> Path:
    """The directory. Raises `BuildError` where others could put files into it."""
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"others can write to {directory}; set XDG_CACHE_HOME to a safe directory")
    return directory


def _file_name() -> str:
    """Another one for everything that the compiled file depends on."""
    parts = [
        SOURCE.read_text(),
        tf.version.VERSION,
        tf.version.GIT_VERSION,
        *_FLAGS,
        *tf.sysconfig.get_compile_flags(),
        *tf.sysconfig.get_link_flags(),
        *platform.libc_ver(),
        platform.machine(),
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"ops-{tf.version.VERSION}-{digest}.so"


def _compiler() -> list[str]:
    """The command, from $CXX or the first that is there. Raises `BuildError`."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    missing = f"$CXX ({given[0]})" if given else f"C++ compiler ({', '.join(_COMPILERS)})"
    raise BuildError(f"there is no {missing} here")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, also where hosts share the directory. Says so when it has to wait."""
    start = time.monotonic()
    said = False
    with path.open("w") as file:
        while not _lock(file.fileno()):
            waited = time.monotonic() - start
            if waited > _LIMIT_SECONDS:
                raise BuildError(f"another process has held {path} for {waited:.0f} seconds")
            if waited > _SAY_AFTER_SECONDS and not said:
                log.warning("waiting for another process that compiles %s", SOURCE.name)
                said = True
            time.sleep(_LOOK_SECONDS)
        yield


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks: at worst several processes compile
        return True
    return True


def _compile(compiler: list[str], path: Path, try_again: bool) -> None:
    failed = path.with_name(path.name + ".failed")
    by = _identity(compiler)
    if not try_again and failed.exists() and failed.read_text().startswith(by):
        raise BuildError(
            f"{by} could not compile {SOURCE} earlier, see {failed}; "
            "'python -m hvdlite.tf.build' tries again"
        )
    log.warning(
        "compiling %s for TensorFlow %s, once (some 10 seconds of CPU time)",
        SOURCE.name, tf.version.VERSION,
    )  # fmt: skip
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    os.close(descriptor)
    made = Path(name)
    try:
        output = _run(compiler, made)
        if output is None:
            made.chmod(0o700)
            made.replace(path)
            failed.unlink(missing_ok=True)
            return
    finally:
        made.unlink(missing_ok=True)
    failed.write_text(f"{by}\n\n{output}\n")
    raise BuildError(f"{by} cannot compile {SOURCE}, see {failed}")


def _run(compiler: list[str], target: Path) -> str | None:
    """Run the compiler; what it says where it fails."""
    command = [
        *compiler,
        *_FLAGS,
        *tf.sysconfig.get_compile_flags(),
        str(SOURCE),
        *tf.sysconfig.get_link_flags(),
        "-o",
        str(target),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    text = f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return text if done.returncode else None


def _identity(compiler: list[str]) -> str:
    """What tells one compiler from another: the first line of what it says of itself."""
    try:
        said = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    return f"{shlex.join(compiler)} ({said.partition(chr(10))[0].strip()})"
