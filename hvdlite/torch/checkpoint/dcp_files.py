"""The files of DCP: what it says of one that cannot be written or read, in words that help.

DCP pickles an error for the other ranks, without its causes, so it is said where it happens.
"""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class Writer(FileSystemWriter):
    """Raises `OSError` where a file cannot be written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's file."""
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:  # torch's writer raises the second one.
            cause = _os_error(error)
            if cause is error and cause.errno not in _FULL:
                raise
            text = (
                f"{self.path} could not be written (is the disk full, or a limit on the size of "
                f"files reached?): {error if cause is None else cause.strerror}"
            )
            raise (OSError(text) if cause is None else OSError(cause.errno, text)) from error


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the first `OSError` among an error and its causes."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


class Reader(FileSystemReader):
    """Raises `ValueError` that names a file which is damaged."""

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
            place = self.storage_data[item.storage_index]
            path: Path = Path(self.path) / place.relative_path
            try:
                with path.open("rb") as file:
                    file.seek(place.offset)
                    part = io.BytesIO(file.read(place.length))
                is_tensor = item.type != LoadItemType.BYTE_IO
                torch.load(part, map_location="cpu", weights_only=is_tensor)
            except Exception:
                return path
        return None
