"""The compile cache: a folder that only its user can write to, and that is held open in use.

    ~/.cache/hvdlite/<folder>/<name>.so           the library, followed by its SHA-256
                              <name>.so.lock      held by the process that compiles
                              <name>.so.failed    why the compiler failed

Code from here runs as the user, so three things must not happen.

* Another user swaps the folder between its check and its use. Where others own one of the parents,
  a path is no protection: the folder is opened once, the open folder is checked, and every file is
  opened relative to it, the library too (`/proc/self/fd/N/name`).
* A power cut leaves half a file, which would end a process by SIGBUS when it is loaded. Files are
  synchronised before they get their name, and a library whose digest is wrong counts as absent.
* A folder named "~" appears in the working directory, because there is no home directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdlite.common.collectives.native.compiler import LIMIT_SECONDS

log = logging.getLogger("hvdlite")

_SAY_AFTER_SECONDS = 20
_LOOK_SECONDS = 0.1
_DIGEST_BYTES = hashlib.sha256().digest_size
_OPEN_FILES = "/proc/self/fd"


class BuildError(Exception):
    """Something cannot be compiled, or loaded; the text says why."""


class Cache:
    """One open folder of the cache. `opened` makes it; its files are named without a path."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        self.directory = directory  # for messages only: the path may lead elsewhere by now
        self._descriptor = descriptor

    def path(self, name: str) -> Path:
        """Return the path of a file, for messages."""
        return self.directory / name

    def loadable(self, name: str) -> str:
        """Return a path of a file that leads into this very folder as long as it is open."""
        return f"{_OPEN_FILES}/{self._descriptor}/{name}"

    def has_library(self, name: str) -> bool:
        """Return whether a library is there and whole; say so where it is damaged."""
        data = self.read(name)
        if data is None:
            return False
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if body and hashlib.sha256(body).digest() == digest:
            return True
        log.warning("%s is damaged (%d bytes) and is not used", self.path(name), len(data))
        return False

    def write_library(self, name: str, body: bytes) -> None:
        """Write a library so that no process ever sees a part of it, also after a power cut."""
        self.write(name, body + hashlib.sha256(body).digest())

    def read(self, name: str) -> bytes | None:
        """Return the content of a file of our own; None where there is none."""
        with suppress(FileNotFoundError), os.fdopen(self._open(name, os.O_RDONLY), "rb") as file:
            return file.read()
        return None

    def age_seconds(self, name: str) -> float:
        """Return how long ago a file was written; infinite where there is none."""
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            return abs(time.time() - status.st_mtime)
        return float("inf")

    def write(self, name: str, data: bytes) -> None:
        """Replace a file as a whole."""
        part = f"{name}.{secrets.token_hex(8)}"
        folder = {"src_dir_fd": self._descriptor, "dst_dir_fd": self._descriptor}
        try:
            with os.fdopen(self._open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, name, **folder)
        except BaseException:
            self.remove(part)
            raise
        with suppress(OSError):  # some file systems cannot synchronise a folder
            os.fsync(self._descriptor)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextmanager
    def locked(self, name: str, source: str) -> Iterator[None]:
        """Let one process at a time compile `source`, also where hosts share the folder.

        Raises `BuildError` where another process holds the lock for too long.
        """
        start = time.monotonic()
        said = False
        with os.fdopen(self._open(name, os.O_WRONLY | os.O_CREAT), "w") as file:
            while not _lock(file.fileno()):
                waited = time.monotonic() - start
                if waited > LIMIT_SECONDS:
                    path = self.path(name)
                    raise BuildError(f"another process has held {path} for {waited:.0f} seconds")
                if waited > _SAY_AFTER_SECONDS and not said:
                    log.warning("waiting for another process that compiles %s", source)
                    said = True
                time.sleep(_LOOK_SECONDS)
            yield

    def _open(self, name: str, flags: int) -> int:
        """Open a file of the folder; raise `BuildError` where it is not a plain file of ours."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
        raise BuildError(f"{self.path(name)} is not a plain file of your own: remove it")


@contextmanager
def opened(folder: str, create: bool = False) -> Iterator[Cache | None]:
    """Open a folder of the cache; None where it is not there and is not to be made.

    Raises `BuildError` where others can write to it, and where it cannot be used.
    """
    directory = _directory(folder)
    if not os.path.isdir(_OPEN_FILES):
        raise BuildError(f"the compile cache needs {_OPEN_FILES}, which this system does not have")
    try:
        if create:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise BuildError(
                    f"others can write to {directory}; set XDG_CACHE_HOME to a safe directory"
                )
            yield Cache(directory, descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # It cannot be read or written, or is full.
        raise BuildError(
            f"{directory} cannot be used: {error}; set XDG_CACHE_HOME to a directory of your own"
        ) from None


def _directory(folder: str) -> Path:
    """Return the path of a folder of the cache; raise `BuildError` where there is no home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path(os.path.expanduser("~/.cache"))
    if not base.is_absolute():
        raise BuildError(
            f"there is no place for the compile cache: the user with id {os.geteuid()} has no "
            "home directory; set HOME, or XDG_CACHE_HOME to a directory of your own"
        )
    return base / "hvdlite" / folder


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks: at worst several processes compile
        return True
    return True
