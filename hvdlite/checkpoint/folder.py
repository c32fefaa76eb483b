"""The folder of a checkpoint, which is replaced as a whole.

A save writes a new folder beside the old one. It then renames the old one away, the new one to its
place, and removes the old one. A process that is killed on the way leaves one of the two complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MANIFEST = "layout.json"
DCP_METADATA = ".metadata"


class Folder:
    """A checkpoint's path, and the names that it has while it is replaced."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(
                f"the directory of a checkpoint is a path, not {type(directory).__name__}"
            )
        # A link stays a link: what it leads to is replaced.
        self.path = Path(os.path.realpath(directory))
        self.new = self.path.with_name(f".{self.path.name}.new")
        self.old = self.path.with_name(f".{self.path.name}.old")

    def prepare(self) -> None:
        """Make the new folder, empty; for one rank. Raises `ValueError` for a foreign folder."""
        if not self.path.exists() and self.old.exists():
            self.old.rename(self.path)  # A save was killed between its two renames.
        if self.path.exists() and not _may_be_replaced(self.path):
            raise ValueError(
                f"{self.path} exists and is no checkpoint: a save would remove what is in it; "
                "name another folder"
            )
        for leftover in (self.new, self.old):
            shutil.rmtree(leftover, ignore_errors=True)
        self.new.mkdir(parents=True)

    def commit(self) -> None:
        """Put the new folder in the place of the old one; for one rank."""
        _sync(self.new)
        if self.path.exists():
            self.path.rename(self.old)
        self.new.rename(self.path)
        _sync(self.path.parent)
        shutil.rmtree(self.old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the new folder; for one rank, after a failure."""
        shutil.rmtree(self.new, ignore_errors=True)

    def existing(self) -> Path:
        """Return the folder to read. Raises `FileNotFoundError` where there is no checkpoint."""
        for path in (self.path, self.old):
            if is_checkpoint(path):
                return path
        reason = f"has no {MANIFEST}" if self.path.exists() else "does not exist"
        raise FileNotFoundError(f"there is no checkpoint: {self.path} {reason}")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder holds a complete checkpoint, of hvdlite or of PyTorch's DCP."""
    return (path / MANIFEST).is_file() or (path / DCP_METADATA).is_file()


def _may_be_replaced(path: Path) -> bool:
    return path.is_dir() and (is_checkpoint(path) or not any(path.iterdir()))


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk before what follows."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
