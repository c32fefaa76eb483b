"""The files of PyTorch's distributed checkpoints (DCP), and words that help where one fails.

DCP pickles an error for the other ranks, without its causes, so it is said where it happens.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def load_planner() -> DefaultLoadPlanner:
    """Return what plans loads of dicts with final names."""
    # Sharded tensors that are flattened would copy the dict.
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class Writer(FileSystemWriter):
    """Raises `OSError` where a file cannot be written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's file."""
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:  # torch's writer raises the second one.
            cause: BaseException | None = error  # The first `OSError` among it and its causes.
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is error and cause.errno not in _FULL:
                raise
            text = (
                f"{self.path} could not be written (is the disk full, or a limit on the size of "
                f"files reached?): {error if cause is None else cause.strerror}"
            )
            raise (OSError(text) if cause is None else OSError(cause.errno, text)) from error


class _OpenFiles(FileSystem):
    """Has files that were opened before, and stay open; see `hvdlite.checkpoint.opened`."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, IO[bytes]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a file that is open, or open it."""
        name = os.fspath(path)
        if name not in self.files:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        self.files[name].seek(0)
        yield self.files[name]


class Reader(FileSystemReader):
    """Reads files that it has opened. Raises `ValueError` that names a file which is damaged."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = self._opened = _OpenFiles()
        self._described: Metadata | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._opened.files.values():
            file.close()

    def described(self) -> Metadata:
        """Return what the checkpoint holds."""
        try:
            return self.read_metadata()
        except OSError:  # It cannot be read, which is no damage.
            raise
        except Exception as error:  # Damage makes a pickle do anything.
            raise ValueError(f"{self.path}/.metadata is damaged: {error}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return it as it was when it was read first."""
        if self._described is None:
            self._described = super().read_metadata(*args, **kwargs)
        return self._described

    def open_files(self, flat: dict[str, Any]) -> None:
        """Open the files that a load of `flat` needs on this rank. Raises `OSError`."""
        metadata = self.described()
        planner = load_planner()
        planner.set_up_planner(flat, metadata, False)
        for item in planner.create_local_plan().items:
            path = Path(self.path) / metadata.storage_data[item.storage_index].relative_path
            if str(path) not in self._opened.files:
                self._opened.files[str(path)] = path.open("rb")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read what this rank needs."""
        try:
            return super().read_data(plan, planner)
        except (OSError, MemoryError):  # It cannot be read, which is no damage.
            raise
        except Exception as error:  # Damage makes a pickle do anything.
            path = self._damaged(plan)
            if path is None:
                raise
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise ValueError(f"{path} is damaged: {reason}") from error

    def _damaged(self, plan: LoadPlan) -> Path | None:
        """Return the first file of which a part that is needed cannot be read."""
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            path: Path = Path(self.path) / stored.relative_path
            try:
                with self.fs.create_stream(path, "rb") as file:
                    file.seek(stored.offset)
                    part = io.BytesIO(file.read(stored.length))
                is_tensor = item.type != LoadItemType.BYTE_IO
                torch.load(part, map_location="cpu", weights_only=is_tensor)
            except Exception:
                return path
        return None
