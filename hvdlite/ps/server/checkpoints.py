"""The part of a server in `ps.save` and `ps.load`: it writes and reads its share of the tables.

A worker leads, in phases, each of which all servers have done before the next one begins. Its
attempts have rising numbers. A request of an older attempt was sent again too late, and is dropped;
one of a phase that is done already is answered, and not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvdlite.checkpoint import files, manifest, saving
from hvdlite.checkpoint.folder import MANIFEST, Folder
from hvdlite.checkpoint.manifest import Record
from hvdlite.common.layouts.layout import Layout
from hvdlite.ps.connections.messages import Answer, Message
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.server.checkpoint_format import (
    VALUE,
    Flat,
    about_table,
    flatten,
    padded,
    read_table,
    tensor_name,
)
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.description import TableDescription

# What a worker raises again by its name; see `remote_error`.
ERRORS: tuple[type[Exception], ...] = (
    FileNotFoundError, PermissionError, OSError, ImportError, KeyError, ValueError,
)  # fmt: skip

_ANSWERS = {"save": "saved", "load": "loaded"}

Body = Mapping[str, Any]


class _Kept(NamedTuple):
    """A table as it is to be written."""

    about: dict[str, Any]
    described: TableDescription
    flat: Flat


class _Read(NamedTuple):
    """A table as it was read, and is to be."""

    name: str
    values: list[Array]
    state: dict[str, Array]


class ServerCheckpoints:
    """Answers `save` and `load` in the thread of a server, which answers nothing else meanwhile.

    `is_sent` says whether a table was sent to the servers of the next layout already: what is read
    then would be lost.
    """

    def __init__(self, server: Server, number: int, is_sent: Callable[[str], bool]) -> None:
        self._server, self._number, self._is_sent = server, number, is_sent
        self._attempt: tuple[int, ...] = ()
        self._done: dict[str, dict[str, Any]] = {}  # The phases of the attempt.
        self._to_write: dict[str, _Kept] = {}
        self._was_read: list[_Read] = []
        self._phases: dict[str, Callable[[Body], dict[str, Any] | None]] = {
            "begin": self._begin, "write": self._write, "commit": self._commit,
            "discard": self._discard, "read": self._read, "apply": self._apply,
        }  # fmt: skip
        server.set_handler("save", self._answer)
        server.set_handler("load", self._answer)

    def _answer(self, peer: bytes, message: Message) -> list[Answer]:
        body = message.body
        attempt, phase = tuple(body["attempt"]), body["phase"]
        if attempt < self._attempt:
            return []
        if attempt > self._attempt:
            self._attempt, self._done = attempt, {}
            self._to_write, self._was_read = {}, []
        if phase not in self._done:
            if phase in ("write", "commit", "apply") and not self._done:
                return [_say(peer, message, "restarted")]  # What came before is lost.
            try:
                found = self._phases[phase](body)
            except ERRORS as error:
                kind = next(each for each in ERRORS if isinstance(error, each)).__name__
                why = str(error.args[0] if isinstance(error, KeyError) else error)
                return [_say(peer, message, "failed", why=why, error=kind)]
            if found is None:
                return []  # It is asked again.
            self._done[phase] = found
        return [_say(peer, message, _ANSWERS[message.kind], **self._done[phase])]

    # -- save

    def _begin(self, body: Body) -> dict[str, Any] | None:
        """Copy the tables, and say how long their rows are."""
        files.safetensors()
        if any(self._is_behind(*words) for words in body["tables"]):
            return None
        if self._number == 0:
            Folder(body["directory"]).prepare()
        lengths = {}
        for name, clock, is_whole, steps_before in body["tables"]:
            described = self._server.descriptions[name]
            about = about_table(described, is_whole=is_whole, steps=clock + steps_before)
            flat = flatten(self._server.saved(name))
            self._to_write[name] = _Kept(about, described, flat)
            for dtype, row in flat.rows.items():
                lengths[tensor_name(name, dtype)] = row.size
        return {"lengths": lengths}

    def _is_behind(self, name: str, clock: int, *_: object) -> bool:
        """Whether the table lacks steps that the worker has finished."""
        table = self._server.tables.get(name)
        if table is None or not table.begun:
            return True
        return table.clocks.mode.name == SYNC and table.version < clock

    def _write(self, body: Body) -> dict[str, Any]:
        """Write the rows, all as long as the longest of all servers."""
        arrays = {}
        for name, length in body["lengths"].items():
            table, _, dtype = name.rpartition(".")
            arrays[name] = padded(self._to_write[table].flat.rows.get(dtype), dtype, length)
        name = saving.file_name(self._number, body["servers"])
        size, digests = files.write(Folder(body["directory"]).new / name, arrays)
        tables = {
            name: {"blocks": kept.described.body["blocks"], "index": kept.flat.about}
            for name, kept in self._to_write.items()
        }
        return {"size": size, "digests": digests, "tables": tables}

    def _commit(self, body: Body) -> dict[str, Any]:
        """Write down where all lies, and put the folder in its place, as server 0."""
        written, count = body["written"], len(body["written"])
        records = {
            name: Record(Layout([count], [0, -1]), (count, length), name.rpartition(".")[2])
            for name, length in body["lengths"].items()
        }
        tables = {
            name: {**kept.about, "servers": [each["tables"][name] for each in written]}
            for name, kept in self._to_write.items()
        }
        plan = saving.Plan(records, {}, {VALUE: {"tables": tables}})
        names = [saving.file_name(number, count) for number in range(count)]
        facts = [(each["size"], each["digests"]) for each in written]
        saving.finish(Folder(body["directory"]), plan, names, facts)
        self._to_write = {}
        return {}

    def _discard(self, body: Body) -> dict[str, Any]:
        Folder(body["directory"]).discard()
        return {}

    # -- load

    def _read(self, body: Body) -> dict[str, Any] | None:
        """Read the tables, and change none yet: a server that cannot must not leave others new."""
        files.safetensors()
        if any(self._is_behind(*words) or self._is_sent(words[0]) for words in body["tables"]):
            return None
        path = Folder(body["directory"]).existing() / MANIFEST
        found = manifest.read(path)
        if VALUE not in found.values:
            raise ValueError(f"{path.parent} was not saved by ps.save: load it by hvd.checkpoint")
        steps = {}
        self._was_read = []
        for name, *_ in body["tables"]:
            described = self._server.descriptions[name]
            values, state, steps[name] = read_table(found, described, self._number, body["servers"])
            self._was_read.append(_Read(name, values, state))
        return {"steps": steps}

    def _apply(self, body: Body) -> dict[str, Any] | None:
        """Let the tables be what was read."""
        if any(self._is_sent(each.name) for each in self._was_read):
            return None
        for each in self._was_read:
            self._server.replace(each.name, each.values, each.state)
        self._was_read = []
        return {}


def remote_error(server: int, body: Body) -> Exception:
    """Return the error that a server has told of."""
    kinds = {kind.__name__: kind for kind in ERRORS}
    return kinds.get(body.get("error", ""), ValueError)(f"server {server}: {body['why']}")


def _say(peer: bytes, message: Message, kind: str, **body: Any) -> Answer:
    return Answer(peer, Message(kind, message.request, message.table, body=body))
