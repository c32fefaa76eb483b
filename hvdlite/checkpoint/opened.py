"""A checkpoint that is read while another save may replace its folder.

A save never changes a folder that is in place: it renames it away, and removes it. So whoever has
opened all files that are needed, and then finds the same folder in place, has files of one
checkpoint, and may read them when he likes. Else he starts anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hvdlite.checkpoint.job import together
from hvdlite.common.base.errors import HorovodInternalError

T = TypeVar("T")
ATTEMPTS = 100  # Each takes the time of opening files, of which a save writes all.
_GONE = (errno.ENOENT, errno.ESTALE)  # The second one is what NFS says of it.


class Opened:
    """The folder of a checkpoint, as it was found. `close` closes what is in `files`, too."""

    def __init__(self, path: Path, locate: Callable[[], Path]) -> None:
        self.path = path  # of layout.json, or what else describes the checkpoint
        self.files = contextlib.ExitStack()
        self._locate = locate
        # As long as it is open, no other folder gets its number.
        self._folder = os.open(path.parent, os.O_RDONLY)
        self.files.callback(os.close, self._folder)

    def close(self) -> None:
        """Close the folder and the files."""
        self.files.close()

    def is_replaced(self) -> bool:
        """Return whether a reader would find another folder now, or none, or this elsewhere."""
        try:
            path = self._locate()
            found = os.stat(path.parent)
            return path != self.path or not os.path.samestat(found, os.fstat(self._folder))
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return True


@contextlib.contextmanager
def on_all_ranks(
    what: str, locate: Callable[[], Path], prepare: Callable[[Opened], T]
) -> Iterator[list[T]]:
    """Open one and the same checkpoint on all ranks; yield what `prepare` returned on each.

    `locate` returns the path of what describes the checkpoint. `prepare` opens all files that this
    rank needs and changes nothing: where the folder was replaced meanwhile, all ranks call it
    again. Raises as `together`, `OSError` where it is replaced each time, and
    `HorovodInternalError` where ranks read different checkpoints.
    """
    for _ in range(ATTEMPTS):
        with contextlib.ExitStack() as stack:
            results = _look_together(stack, what, locate, prepare)
            if results is not None:
                yield results
                return
    raise _replaced(what)


def _look_together(
    stack: contextlib.ExitStack,
    what: str,
    locate: Callable[[], Path],
    prepare: Callable[[Opened], T],
) -> list[T] | None:
    """Return what `prepare` returned on all ranks, or None where they are to start anew."""
    opened: list[Opened] = []

    def read(each: Opened) -> tuple[str, str, T]:
        result = prepare(each)
        opened.append(each)
        # What is equal where folders have the same checkpoint, whatever hosts call them.
        digest = hashlib.sha256(each.path.read_bytes()).hexdigest()
        return str(each.path.parent), digest, result

    found = together(what, lambda: _look(stack, locate, read))
    results = [each for each in found if each is not None]
    if len(results) < len(found):
        return None
    digests = [digest for _, digest, _ in results]
    if len(set(digests)) > 1:
        # Where it was replaced between two ranks, one of them sees that now.
        if any(together(what, opened[0].is_replaced)):
            return None
        other = next(rank for rank, each in enumerate(digests) if each != digests[0])
        raise HorovodInternalError(
            f"{what}: ranks load different checkpoints: rank 0 has that of {results[0][0]}, rank "
            f"{other} that of {results[other][0]}. Let rank 0 choose the folder and broadcast its "
            "name, and have it on a file system that all hosts share",
            other,
            job_goes_on=True,
        )
    return [result for _, _, result in results]


def alone(what: str, locate: Callable[[], Path], read: Callable[[Opened], T]) -> T:
    """Return what `read` makes of one checkpoint; it is called anew where that was replaced.

    Raises as `on_all_ranks`.
    """
    for _ in range(ATTEMPTS):
        with contextlib.ExitStack() as stack:
            found = _look(stack, locate, lambda opened: (read(opened),))
            if found is not None:
                return found[0]
    raise _replaced(what)


def _look(
    stack: contextlib.ExitStack, locate: Callable[[], Path], read: Callable[[Opened], T]
) -> T | None:
    """Return what `read` makes of a folder, or None where it is no longer in place."""
    path = locate()
    try:
        opened = Opened(path, locate)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    stack.callback(opened.close)
    try:
        result = read(opened)
    except Exception:
        if opened.is_replaced():  # What was wrong may be that alone.
            return None
        raise
    return None if opened.is_replaced() else result


def _replaced(what: str) -> OSError:
    return OSError(
        f"{what}: the folder was replaced while it was loaded, {ATTEMPTS} times one after another: "
        "load it while no job saves to it, or let each save have a folder of its own"
    )
