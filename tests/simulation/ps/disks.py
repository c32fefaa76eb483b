"""The disks of the nodes of a parameter server: full or slow, and what a crash takes from them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from tests.simulation.ps.nodes import KilledThread, Node, here

SYNC_SECONDS = 1e-3


class _File:
    """A file on the disk of a node."""

    def __init__(self, node: Node, path: Path, mode: str) -> None:
        self._node, self.path = node, path
        self._file = open(path, mode)  # noqa: SIM115
        node.files.setdefault(path, self._file.tell())

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        _work(self._node, self._node.slow)
        if self._node.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._file.write(data)
        self._file.flush()

    def tell(self) -> int:
        return self._file.tell()


def _work(node: Node, seconds: float) -> None:
    """Take the time of a disk."""
    if seconds:
        here.task.sleep_until(lambda: False, seconds)
    elif not node.lives:
        raise KilledThread


def new_file(path: Path) -> _File:
    node = here.task.node
    _work(node, 0.0)
    node.files.pop(path, None)
    return _File(node, path, "wb")


def longer_file(path: Path) -> _File:
    node = here.task.node
    _work(node, 0.0)
    return _File(node, path, "ab")


def sync(file: BinaryIO | _File) -> None:
    assert isinstance(file, _File)
    node = here.task.node
    _work(node, SYNC_SECONDS + node.slow)
    node.files.pop(file.path, None)


def replace(source: Path, target: Path) -> None:
    node = here.task.node
    _work(node, node.slow)
    node.renames.append((source, target, target.read_bytes() if target.exists() else None))
    os.replace(source, target)
    node.files.pop(target, None)
    if source in node.files:
        node.files[target] = node.files.pop(source)


def sync_folder(path: Path) -> None:
    node = here.task.node
    _work(node, SYNC_SECONDS)
    node.renames = [each for each in node.renames if each[1].parent != path]
