"""The folder of this user in which running jobs have their sockets; nobody else may enter it.

It is `hvdlite` in XDG_RUNTIME_DIR where there is one, and otherwise `hvdlite-UID` in /tmp. Who
looks for jobs tries all of these places, since the environments of two terminals may differ.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Container

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address, connect, listen

SUFFIX = ".sock"
CONNECT_SECONDS = 2.0
# The name of a socket that nobody listens at yet. One that keeps it is that of a dead launcher.
HIDDEN, HIDDEN_SECONDS = re.compile(r"\.\d+-[0-9a-f]{8}"), 60.0
TRIES = 3  # Another launcher may remove the folder that it leaves empty.


def folders() -> list[str]:
    """Return where jobs of this user may have their sockets; new ones have theirs in the first."""
    own = os.geteuid()
    found = []
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{own}"):
        with contextlib.suppress(OSError):
            if base and os.stat(base).st_uid == own and os.access(base, os.W_OK):
                found.append(os.path.join(base, "hvdlite"))
    bases = ["/tmp"]
    with contextlib.suppress(OSError):  # There is none that can be written.
        bases.append(tempfile.gettempdir())
    found += [os.path.join(base, f"hvdlite-{own}") for base in bases if os.access(base, os.W_OK)]
    return list(dict.fromkeys(found))


def check_folder(path: str) -> None:
    """Raise `ConfigError` for a folder that others own or may enter, `OSError` without one."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is no folder: remove it, as jobs of hvdlite-run listen there")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, so no job of yours is looked for there: "
            "set XDG_RUNTIME_DIR to a folder of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"others may enter {path}: chmod 700 {path}")


def publish() -> tuple[socket.socket, str]:
    """Return a socket that listens in the folder, and its path. Raises `OSError`, `ConfigError`."""
    if not (found := folders()):
        raise ConfigError(
            "there is no folder for its socket, neither XDG_RUNTIME_DIR nor /tmp: set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )
    folder = found[0]
    for left in reversed(range(TRIES)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        try:
            check_folder(folder)
            remove_stale(folder)
            return _listen(folder)
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("one of the tries returns or raises")


def _listen(folder: str) -> tuple[socket.socket, str]:
    # Under this name nobody takes it for one of a dead launcher before it listens.
    hidden = os.path.join(folder, f".{os.getpid()}-{os.urandom(4).hex()}")
    listener = listen(Address(path=hidden))
    path = os.path.join(folder, f"{os.getpid()}{SUFFIX}")
    if os.path.exists(path):  # Of a process with the same number in another container.
        path = os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}")
    os.rename(hidden, path)
    return listener, path


def withdraw(path: str) -> None:
    """Remove the socket, and the folder where it was the last one."""
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


def remove_stale(folder: str, known: Container[str] = ()) -> list[str]:
    """Remove the sockets of dead launchers; return the paths of the others, without `known`."""
    living, now = [], time.time()
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if path in known:
            continue
        if name.endswith(SUFFIX) and _lives(path):
            living.append(path)
        elif HIDDEN.fullmatch(name):
            with contextlib.suppress(OSError):
                if now - os.lstat(path).st_mtime > HIDDEN_SECONDS:
                    _lives(path)
    return living


def tidy() -> None:
    """Remove what a launcher that was killed has left on this host."""
    for folder in folders():
        with contextlib.suppress(OSError, ConfigError):
            check_folder(folder)
            if not remove_stale(folder):
                os.rmdir(folder)


def _lives(path: str) -> bool:
    """Return whether somebody listens at a socket, which is removed otherwise."""
    try:
        connect(Address(path=path), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False
    except FileNotFoundError:
        return False
    except OSError:  # It is busy, or stopped.
        return True
    return True
