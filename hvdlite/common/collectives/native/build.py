"""Compiles C++ that makes hvdlite faster once on a machine, into the user's cache.

    ~/.cache/hvdlite/<folder>/<name>-<hash of all that it depends on>.so
                                                                     .so.lock     of who compiles
                                                                     .so.failed   why it could not

The ranks of a host, and hosts that share the directory, may all come here at the same time: one
compiles, the others wait for it. Nobody ever sees half a file. Nothing needs what is compiled here.
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
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("hvdlite")

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-fPIC", "-shared", "-w")  # -w: what is wrong in the headers of others is not ours
_LIMIT_SECONDS = 600  # for the compiler, and for waiting for another process that runs it
_SAY_AFTER_SECONDS = 20
_LOOK_SECONDS = 0.1


class BuildError(Exception):
    """Something cannot be compiled, or loaded; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """What is compiled, and how."""

    source: Path
    folder: str  # of the cache
    name: str
    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()  # flags that come after the source
    depends_on: tuple[str, ...] = ()  # what else makes another file of it
    remark: str = ""  # said when it is compiled
    module: str = ""  # `python -m module` compiles it again after a failure

    def compiled(self) -> Path | None:
        """The library, if it is there. Raises `BuildError`."""
        directory = self._cache()
        with _usable(directory):
            if not directory.exists():
                return None
            path = _private(directory) / self._file_name()
            return path if path.exists() else None

    def compile_once(self, try_again: bool = False) -> Path:
        """The library; compiled now if it is not there.

        What has failed before fails again at once, unless you `try_again` or the compiler is
        another. Raises `BuildError`.
        """
        found = self.compiled()
        if found is not None:
            return found
        compiler = _compiler()
        directory = self._cache()
        with _usable(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = _private(directory) / self._file_name()
            with _locked(path.with_name(path.name + ".lock"), self.source.name):
                if not path.exists():  # another process may have made it meanwhile
                    self._compile(compiler, path, try_again)
        return path

    def _cache(self) -> Path:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = given if given.is_absolute() else Path(os.path.expanduser("~/.cache"))
        return base / "hvdlite" / self.folder

    def _file_name(self) -> str:
        """Another one for everything that the compiled file depends on."""
        parts = [
            self.source.read_text(),
            *_FLAGS,
            *self.flags,
            *self.libraries,
            *self.depends_on,
            *platform.libc_ver(),
            platform.machine(),
        ]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return f"{self.name}-{digest}.so"

    def _compile(self, compiler: list[str], path: Path, try_again: bool) -> None:
        failed = path.with_name(path.name + ".failed")
        by = _identity(compiler)
        if not try_again and failed.exists() and failed.read_text().startswith(by):
            advice = f"'python -m {self.module}' tries again" if self.module else "remove it to try"
            raise BuildError(
                f"{by} could not compile {self.source} earlier, see {failed}; {advice}"
            )
        if self.remark:
            log.warning("compiling %s %s", self.source.name, self.remark)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        os.close(descriptor)
        made = Path(name)
        try:
            output = self._run(compiler, made)
            if output is None:
                made.chmod(0o700)
                made.replace(path)
                failed.unlink(missing_ok=True)
                return
        finally:
            made.unlink(missing_ok=True)
        failed.write_text(f"{by}\n\n{output}\n")
        raise BuildError(f"{by} cannot compile {self.source}, see {failed}")

    def _run(self, compiler: list[str], target: Path) -> str | None:
        """Run the compiler; what it says where it fails."""
        before = [*compiler, *_FLAGS, *self.flags, str(self.source)]
        command = [*before, *self.libraries, "-o", str(target)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        text = f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return text if done.returncode else None


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """A directory that cannot be read or written, or is full, is a `BuildError` too."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"{directory} cannot be used: {error}; set XDG_CACHE_HOME to a directory of your own"
        ) from None


def _private(directory: Path) -> Path:
    """The directory. Raises `BuildError` where others could put files into it."""
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"others can write to {directory}; set XDG_CACHE_HOME to a safe directory")
    return directory


def _compiler() -> list[str]:
    """The command, from $CXX or the first that is there. Raises `BuildError`."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    missing = f"$CXX ({given[0]})" if given else f"C++ compiler ({', '.join(_COMPILERS)})"
    raise BuildError(f"there is no {missing} here")


@contextmanager
def _locked(path: Path, source: str) -> Iterator[None]:
    """One process at a time, also where hosts share the directory. Says so when it has to wait."""
    start = time.monotonic()
    said = False
    with path.open("w") as file:
        while not _lock(file.fileno()):
            waited = time.monotonic() - start
            if waited > _LIMIT_SECONDS:
                raise BuildError(f"another process has held {path} for {waited:.0f} seconds")
            if waited > _SAY_AFTER_SECONDS and not said:
                log.warning("waiting for another process that compiles %s", source)
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


def _identity(compiler: list[str]) -> str:
    """What tells one compiler from another: the first line of what it says of itself."""
    try:
        said = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    return f"{shlex.join(compiler)} ({said.partition(chr(10))[0].strip()})"
