"""Snapshots of tables on disk: files (see `saved_files`) from which a server that returns goes on.

Each is written beside the older ones, which a server that dies meanwhile leaves as they are.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.settings.logs import log
from hvdlite.ps.connections import system
from hvdlite.ps.connections.system import UNFINISHED
from hvdlite.ps.server import saved_files
from hvdlite.ps.server.saved_files import SUFFIX
from hvdlite.ps.tables.saved import SavedTable

KEPT = 2
MOST_SECONDS = 60.0  # For which a server waits until a snapshot can be written.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0  # Before it is tried again.
JOB_FILE = "job"  # In the folder of a server: the identity of the job.


class SnapshotFolder:
    """The snapshots of one server, below `directory`: the newest `KEPT` of each table.

    After a load, that of the load alone, until there is a newer one.
    """

    def __init__(self, directory: str | os.PathLike[str], server: int) -> None:
        self._server = server
        self._path = Path(directory) / f"server-{server}"
        self._path.mkdir(parents=True, exist_ok=True)
        # A predecessor may have been killed meanwhile.
        for unfinished in self._path.glob(f"*/*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)
        self._queue: queue.SimpleQueue[SavedTable | None] = system.Queue()
        self._thread: threading.Thread | None = None
        self._idle = system.Event()  # Nothing is being written.
        self._idle.set()
        # Tables whose last snapshot has failed -> when another one is made.
        self._missing: dict[str, float] = {}

    def belong_to(self, job: str) -> None:
        """Take note of the job whose snapshots these are.

        Raises HorovodInternalError where there are those of another job: its weights must not
        become the first ones of this job unseen.
        """
        mark = self._path / JOB_FILE
        known = mark.read_text() if mark.exists() else ""
        if known != job and any(self._path.glob(f"*/*{SUFFIX}")):
            raise HorovodInternalError(
                f"{self._path} has snapshots of another job, and server {self._server} would begin "
                "with its weights: remove the folder, or give each job one of its own "
                "(--ps-snapshot, HVDLITE_PS_SNAPSHOT). To go on from a job that has ended, save "
                "with ps.save, and load with ps.load"
            )
        mark.write_text(job)

    def write(self, snapshot: SavedTable, *, alone: bool = False) -> None:
        """Write a snapshot; it is on disk when this returns, and no other one where it is `alone`.

        What fails is tried again, since descriptors and space may come back, and said. Raises
        HorovodInternalError where it still fails after `MOST_SECONDS`.
        """
        self._idle.wait()  # The thread may write an older one of the same version.
        end, pause = system.now() + MOST_SECONDS, FIRST_PAUSE_SECONDS
        while True:
            try:
                self._write_once(snapshot, kept=1 if alone else KEPT)
                return
            except OSError as error:
                why = self._why(snapshot, error)
                if system.now() >= end:
                    raise HorovodInternalError(why) from error
                log.warning("%s; it is tried again", why)
            system.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _why(self, snapshot: SavedTable, error: OSError) -> str:
        return f"server {self._server} cannot write the snapshot {self._target(snapshot)}: {error}"

    def _target(self, snapshot: SavedTable) -> Path:
        folder = self._path / quote(snapshot.described.name, safe="")
        return folder / _name_of(snapshot.layout, snapshot.saved.version)

    def _write_once(self, snapshot: SavedTable, kept: int = KEPT) -> None:
        target = self._target(snapshot)
        folder = target.parent
        folder.mkdir(exist_ok=True)
        saved_files.write(target, snapshot)
        for old in sorted(folder.glob(f"{snapshot.layout:06}-*{SUFFIX}"))[:-kept]:
            old.unlink(missing_ok=True)  # The other thread that writes may have done so.

    def write_soon(self, snapshot: SavedTable) -> None:
        """Write a snapshot in a thread; one that fails is said, and is `missing`.

        One that is still being written is awaited: then the newest is never older than two.
        """
        if self._thread is None:
            self._thread = system.Thread(target=self._run, name="hvdlite ps snapshots")
            self._thread.start()
        self._idle.wait()
        self._idle.clear()
        self._missing.pop(snapshot.described.name, None)
        self._queue.put(snapshot)

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            try:
                self._write_once(snapshot)
            except OSError as error:
                log.warning("%s; it is tried again", self._why(snapshot, error))
                again = system.now() + LONGEST_PAUSE_SECONDS
                self._missing[snapshot.described.name] = again
            self._idle.set()

    def missing(self) -> list[str]:
        """Return the tables whose last snapshots have failed, and are to be tried again now."""
        return [name for name, again in [*self._missing.items()] if system.now() >= again]

    def keep_only(self, layout: int) -> None:
        """Remove the snapshots of layouts that do not count: not yet, or not any more."""
        self._idle.wait()
        for file in self._path.glob(f"*/*{SUFFIX}"):
            if not file.name.startswith(f"{layout:06}-"):
                file.unlink()

    def newest(self, layout: int = 1) -> list[SavedTable]:
        """Return the newest snapshot of each table in a layout.

        Raises HorovodInternalError for one that is damaged.
        """
        found = []
        for folder in sorted(path for path in self._path.iterdir() if path.is_dir()):
            files = sorted(folder.glob(f"{layout:06}-*{SUFFIX}"))
            if files:
                found.append(self._read(files[-1]))
        return found

    def before(self, snapshot: SavedTable) -> SavedTable | None:
        """Return the snapshot of the version before that of another one, if it can be read."""
        version = snapshot.saved.version - 1
        path = self._target(snapshot).with_name(_name_of(snapshot.layout, version))
        with suppress(HorovodInternalError):
            return self._read(path)
        return None

    def go_back(self, table: str, version: int, layout: int) -> SavedTable | None:
        """Return the snapshot of a version, if there is one, and remove all that are newer."""
        self._idle.wait()
        folder = self._path / quote(table, safe="")
        files = sorted(folder.glob(f"{layout:06}-*{SUFFIX}"))
        wanted = folder / _name_of(layout, version)
        if wanted not in files:
            return None
        snapshot = self._read(wanted)
        for newer in files[files.index(wanted) + 1 :]:
            newer.unlink()
        return snapshot

    def _read(self, path: Path) -> SavedTable:
        try:
            return saved_files.read(path).in_memory()
        except (OSError, ValueError) as error:
            raise HorovodInternalError(
                f"the snapshot {path} of server {self._server} cannot be read: {error}. Remove it, "
                "and the one before it is used"
            ) from error

    def close(self) -> None:
        """Wait until everything is on disk."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def _name_of(layout: int, version: int) -> str:
    return f"{layout:06}-{version:012}{SUFFIX}"
