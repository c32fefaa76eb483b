"""The part of a server in `ps.save` and `ps.load`: it writes and reads its share of the tables.

A worker leads, in phases, each of which all servers have done before the next one begins. What they
have read counts when the scheduler has taken note of it (see `CheckpointOrder`): then each server
makes the load by itself, should the worker be lost. A worker's attempts have rising numbers. A
request of an older attempt was sent again too late, or by a worker whose turn a scheduler has
forgotten that was lost: it is `overtaken`. One of a phase that is done already is answered, and not
done again.

A checkpoint is a folder with a file of each table from each server (see `saved_files`), and
layout.json, which has their number and checksums, and the finished steps: `tables` -> `steps`,
`whole`. It tells one checkpoint from another: servers that have read different ones, as a save of
another job came between, read again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hvdlite.checkpoint import manifest
from hvdlite.checkpoint.manifest import MANIFEST, Folder, Manifest
from hvdlite.checkpoint.opened import Opened, alone
from hvdlite.ps.connections.messages import Answer, Message, answer_to
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.server import saved_files
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.saved import SavedTable, join
from hvdlite.ps.tables.table import TableLostError

# What a worker raises again by its name.
ERRORS: tuple[type[Exception], ...] = (
    FileNotFoundError, PermissionError, OSError, KeyError, ValueError,
)  # fmt: skip
VALUE, FORM = "parameter_server", 2  # The value of layout.json that is ours, and its form.

Body = Mapping[str, Any]
Read = tuple[list[Array], dict[str, Array]]  # The values and the state of a table.


class ServerCheckpoints:
    """Answers `save` and `load` in the thread of a server, which answers nothing else meanwhile."""

    def __init__(self, server: Server, number: int, tell: Callable[[], object]) -> None:
        self._server, self._number = server, number
        self._tell = tell  # Lets the scheduler hear of `Server.load`.
        self._decided: Body | None = None  # The load that counts, and is not over.
        self._attempt: tuple[int, ...] = ()
        self._done: dict[str, dict[str, Any]] = {}  # The phases of the attempt.
        self._to_write: list[SavedTable] = []
        self._was_read: dict[str, Read] = {}  # By tables.
        self._phases: dict[str, Callable[[Body], dict[str, Any] | None]] = {
            "begin": self._begin, "write": self._write, "commit": self._commit,
            "discard": self._discard, "read": self._read, "apply": self._apply,
        }  # fmt: skip
        server.handlers["save"] = server.handlers["load"] = self._answer
        server.make_load = self._make_decided

    def _answer(self, peer: bytes, message: Message) -> list[Answer]:
        body = message.body
        attempt, phase = tuple(body["attempt"]), body["phase"]
        if attempt < self._attempt:
            return [answer_to(peer, message, "overtaken")]
        if attempt > self._attempt:
            self._attempt, self._done = attempt, {}
            self._to_write, self._was_read = [], {}
        if phase not in self._done:
            if phase in ("write", "commit") and not self._done:
                return [answer_to(peer, message, "restarted")]  # What came before is lost.
            try:
                found = self._phases[phase](body)
            except ERRORS as error:
                kind = next(each for each in ERRORS if isinstance(error, each)).__name__
                why = str(error.args[0] if isinstance(error, KeyError) else error)
                return [answer_to(peer, message, "failed", why=why, error=kind)]
            if found is None:
                return []  # It is asked again.
            self._done[phase] = found
        kind = "saved" if message.kind == "save" else "loaded"
        return [answer_to(peer, message, kind, **self._done[phase])]

    # -- save

    def _begin(self, body: Body) -> dict[str, Any] | None:
        """Copy the tables; as server 0, make the folder."""
        if any(self._is_behind(*words) for words in body["tables"]):
            return None
        if self._number == 0:
            Folder(body["directory"]).prepare()
        self._to_write = [self._server.saved(name) for name, *_ in body["tables"]]
        return {}

    def _is_behind(self, name: str, clock: int, *_: object) -> bool:
        """Whether the table lacks steps that the worker has finished.

        Raises ValueError where its optimizer has failed, and where it has more of sync than those:
        other servers may have fewer.
        """
        table = self._server.tables.get(name)
        if table is not None:
            table.check()
        if table is None or not table.begun:
            return True
        if table.clocks.mode.name == SYNC and table.version > clock:
            raise ValueError(
                f"the table {name!r} has {table.version} steps, and the worker that saves or loads "
                f"has finished {clock}: it has come back, and makes steps again that some servers "
                "have. Call it after the next step"
            )
        return table.clocks.mode.name == SYNC and table.version < clock

    def _write(self, body: Body) -> dict[str, Any]:
        """Write the tables; say how large the files are, and their checksums."""
        new, files = Folder(body["directory"]).new, {}
        for saved in self._to_write:
            name = _file_name(saved.described.name, self._number, body["servers"])
            files[name] = saved_files.write(new / name, saved)
        self._to_write = []
        return {"files": files}

    def _commit(self, body: Body) -> dict[str, Any]:
        """Write down what there is, and put the folder in its place, as server 0."""
        folder, sums = Folder(body["directory"]), {}
        for server, answer in enumerate(body["written"]):
            for name, (size, sums[name]) in answer["files"].items():
                path = folder.new / name
                if not path.is_file() or path.stat().st_size != size:
                    raise FileNotFoundError(
                        f"server 0 does not see {name}, which server {server} has written to "
                        f"{folder.new}: a checkpoint must be in a folder that all hosts share"
                    )
        tables = {
            name: {"steps": clock + steps_before, "whole": is_whole}
            for name, clock, is_whole, steps_before in body["tables"]
        }
        about = {"form": FORM, "servers": len(body["written"]), "tables": tables, "sums": sums}
        manifest.write(Manifest((), {}, {VALUE: about}), folder.new)
        folder.commit()
        return {}

    def _discard(self, body: Body) -> dict[str, Any]:
        Folder(body["directory"]).discard()
        return {}

    # -- load

    def _read(self, body: Body) -> dict[str, Any] | None:
        """Read the tables, and change none yet: a server that cannot must not leave others new."""
        if any(self._is_behind(*words) for words in body["tables"]):
            return None
        names = [name for name, *_ in body["tables"]]
        self._was_read, steps, digest = self._read_tables(body["directory"], names, body["servers"])
        clocks = {name: self._server.tables[name].clocks.finished for name in names}
        return {
            "steps": steps,
            "digest": digest,
            "clocks": {name: sorted(finished.items()) for name, finished in clocks.items()},
        }

    def _read_tables(
        self, directory: str, names: Sequence[str], servers: int
    ) -> tuple[dict[str, Read], dict[str, int], str]:
        """Return what this server has to have of tables, and the steps that they have finished.

        Last comes a digest of the layout.json. Arrays come from the disk when somebody looks at
        them, also where the folder is replaced then.
        """
        folder = Folder(directory)
        return alone(
            f"ps.load({directory!r})",
            lambda: folder.existing() / MANIFEST,
            lambda opened: self._read_opened(opened, names, servers),
        )

    def _read_opened(
        self, opened: Opened, names: Sequence[str], servers: int
    ) -> tuple[dict[str, Read], dict[str, int], str]:
        path = opened.path.parent
        about = manifest.read(opened.path).values.get(VALUE)
        if about is None:
            raise ValueError(f"{path} was not saved by ps.save: load it by hvd.checkpoint")
        if about.get("form") != FORM:
            raise ValueError(
                f"{path} was saved by a ps.save of another form: load it by the release of hvdlite "
                "that saved it, and save it with hvd.checkpoint"
            )
        found = {
            name: self._read_table(path, about, self._server.tables[name].described, servers)
            for name in names
        }
        steps = {name: about["tables"][name]["steps"] for name in names}
        return found, steps, hashlib.sha256(opened.path.read_bytes()).hexdigest()

    def _read_table(
        self, path: Path, about: Mapping[str, Any], described: TableDescription, servers: int
    ) -> Read:
        """Return what this server has to have of a table, whoever has saved it.

        All files are compared with their checksums, each by one of the servers.
        """
        name, saved = described.name, about["tables"]
        if name not in saved:
            raise KeyError(f"the checkpoint has no table {name!r}, but {', '.join(sorted(saved))}")
        sources = []
        for server in range(about["servers"]):
            file = path / _file_name(name, server, about["servers"])
            if not file.is_file():
                raise FileNotFoundError(f"{file} is not there, which has a part of {name!r}")
            verify = server % servers == self._number
            sources.append(saved_files.read(file, verify=verify))
            _check(sources[-1].described, described)
        return join(described, sources, is_whole=saved[name]["whole"])

    def look(self, news: Mapping[str, Any]) -> None:
        """Make the load that counts, as the scheduler's latest news say."""
        self._decided = news.get("decided")
        self._make_decided()

    def _make_decided(self) -> None:
        if self._decided is not None:
            self._make(self._decided)

    def _apply(self, body: Body) -> dict[str, Any] | None:
        return {} if self._make(body["load"]) else None

    def _make(self, load: Body) -> bool:
        """Make a load that counts; return whether all tables have it.

        One that begins after it, in a server that comes again, begins with what was loaded. Raises
        `TableLostError` where that cannot be read any more, as others have it already.
        """
        server, turn = self._server, int(load["turn"])
        if server.load >= turn:
            return True
        if load["layout"] != server.layout:
            return False
        missing = [name for name in load["clocks"] if server.loaded.get(name, 0) < turn]
        here = [name for name in missing if name in server.tables]
        found = self._was_read if self._attempt[:1] == (turn,) else {}
        if not found.keys() >= set(here):
            try:
                found, _, digest = self._read_tables(load["directory"], here, load["servers"])
                if digest != load["digest"]:
                    raise ValueError("there is another checkpoint now")
            except ERRORS as error:
                raise TableLostError(
                    f"server {self._number} has come again while {load['directory']} was loaded, "
                    f"and cannot read it, which other servers have loaded: {error}"
                ) from error
        for name in here:
            version, clocks = load["clocks"][name]
            server.take_loaded(name, turn, *found[name], version, dict(clocks))
        if not set(missing).difference(here).intersection(load.get("needed", missing)):
            server.loaded.update(dict.fromkeys(missing, turn))
            server.load, self._was_read = turn, {}
            self._tell()
        return server.load >= turn


def _file_name(table: str, server: int, servers: int) -> str:
    return f"{quote(table, safe='')}.{server:05d}-of-{servers:05d}{saved_files.SUFFIX}"


def _check(saved: TableDescription, own: TableDescription) -> None:
    """Raise ValueError where the table that was saved is another one."""
    name = own.name
    if len(saved.specs) != len(own.specs):
        counts = len(own.specs), len(saved.specs)
        raise ValueError(f"table {name!r} has {counts[0]} tensors, and {counts[1]} were saved")
    for there, here in zip(saved.specs, own.specs, strict=True):
        for field in ("name", "dtype", "shape", "group"):
            old, new = getattr(there, field), getattr(here, field)
            if old != new:
                raise ValueError(
                    f"table {name!r}, tensor {here.name!r}: its {field} is {new!r} here, and "
                    f"{old!r} in the checkpoint: build the model and optimizer that were saved"
                )
    there_rows, rows = (each.rows and each.rows.spec.fields for each in (saved, own))
    if there_rows != rows:
        raise ValueError(
            f"table {name!r} has rows {rows} (count, length, dtype, seed, initializer, scale, row "
            f"of zeros) here, and {there_rows} in the checkpoint"
        )
