"""Snapshots of tables on disk: safetensors files, from which a server that returns goes on.

A file has the blocks of values, the state of the updater, and as metadata the description of the
table, its version and clocks. It is written beside the older ones, synchronized and then renamed,
so that a server that dies in between leaves the older ones. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.blocks import Array, dtype_of

KEPT = 2
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Snapshot:
    """A table as it was between two updates. The arrays are copies."""

    table: str
    description: Mapping[str, Any]
    version: int
    finished: Mapping[int, int]
    values: Sequence[Array]
    state: Mapping[str, Array]


class SnapshotFolder:
    """The snapshots of one server, below `directory`; the newest `KEPT` of each table are kept."""

    def __init__(self, directory: str | os.PathLike[str], server: int) -> None:
        self._server = server
        self._path = Path(directory) / f"server-{server}"
        self._path.mkdir(parents=True, exist_ok=True)
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot; it is on disk when this returns."""
        folder = self._path / quote(snapshot.table, safe="")
        folder.mkdir(exist_ok=True)
        target = folder / f"{snapshot.version:012}{SUFFIX}"
        temporary = target.with_suffix(".unfinished")
        with open(temporary, "wb") as file:
            file.write(_bytes_of(snapshot))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _synchronize(folder)
        for old in sorted(folder.glob(f"*{SUFFIX}"))[:-KEPT]:
            old.unlink()

    def write_soon(self, snapshot: Snapshot) -> None:
        """Write a snapshot in a thread. Raises what an earlier one has raised there."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdlite ps snapshots")
            self._thread.start()
        self._queue.put(snapshot)

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            try:
                self.write(snapshot)
            except OSError as error:
                why = f"server {self._server} cannot write a snapshot to {self._path}: {error}"
                self._error = HorovodInternalError(why)

    def newest(self) -> list[Snapshot]:
        """Return the newest snapshot of each table. Raises HorovodInternalError: it is damaged."""
        found = []
        for folder in sorted(self._path.iterdir()):
            files = sorted(folder.glob(f"*{SUFFIX}"))
            if files:
                found.append(self._read(unquote(folder.name), files[-1]))
        return found

    def _read(self, table: str, path: Path) -> Snapshot:
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads(file.metadata()["about"])
                arrays = [self._array(file, *words) for words in about["arrays"]]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise HorovodInternalError(
                f"the snapshot {path} of server {self._server} cannot be read: {error}. Remove it, "
                "and the one before it is used"
            ) from error
        count = about["blocks"]
        return Snapshot(
            table,
            about["description"],
            about["version"],
            {int(worker): clock for worker, clock in about["finished"].items()},
            arrays[:count],
            dict(zip(about["state"], arrays[count:], strict=True)),
        )

    @staticmethod
    def _array(file: Any, key: str, dtype: str, shape: list[int], checksum: int) -> Array:
        raw = file.get_tensor(key)
        if zlib.crc32(raw) != checksum:
            raise ValueError(f"{key} does not have its checksum")
        return np.frombuffer(bytearray(raw), dtype_of(dtype)).reshape(shape)

    def close(self) -> None:
        """Wait until everything is on disk."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def _bytes_of(snapshot: Snapshot) -> bytes:
    arrays = [*snapshot.values, *snapshot.state.values()]
    raws = {str(n): np.frombuffer(array.tobytes(), np.uint8) for n, array in enumerate(arrays)}
    about = {
        "description": snapshot.description,
        "version": snapshot.version,
        "finished": snapshot.finished,
        "blocks": len(snapshot.values),
        "state": list(snapshot.state),
        "arrays": [
            [key, array.dtype.name, array.shape, zlib.crc32(raw.data)]
            for (key, raw), array in zip(raws.items(), arrays, strict=True)
        ],
    }
    return bytes(save(raws, {"about": json.dumps(about)}))


def _synchronize(folder: Path) -> None:
    """Let a rename reach the disk, where folders can be synchronized."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
