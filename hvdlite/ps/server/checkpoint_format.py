"""Tables of servers in the format of checkpoints: what each server writes, and what it reads again.

Of each dtype of a table, a server lays all its arrays one behind another: that is its row of a
tensor of shape (servers, longest row), which is cut along its first dimension. Where the arrays lie
in the rows, and which parts of which tensors they are, stands among the values of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from hvdlite.checkpoint.files import Reader
from hvdlite.checkpoint.manifest import Manifest
from hvdlite.common.plain.adapter import numpy_dtype
from hvdlite.ps.layouts.blocks import Array, Block
from hvdlite.ps.layouts.layout import Part
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.saved import REST, VALUES, SavedTable, join

VALUE = "parameter_server"  # The value of a checkpoint that says where all lies.


class Flat(NamedTuple):
    """The arrays of a table on one server, one behind another, and what each of them is."""

    about: list[
        list[Any]
    ]  # As `SavedTable.pack` says it: VALUES, SLOT or REST; name, dtype, shape.
    rows: dict[str, Array]  # By dtype.


def flatten(saved: SavedTable) -> Flat:
    """Return the arrays of a table as rows."""
    about, arrays = saved.pack()
    rows: dict[str, list[Array]] = {}
    for array in arrays:
        rows.setdefault(array.dtype.name, []).append(array.reshape(-1))
    rows_joined = {dtype: np.concatenate(own) for dtype, own in rows.items()}
    return Flat(about["arrays"], rows_joined)


def padded(row: Array | None, dtype: str, length: int) -> Array:
    """Return a row of shape (1, length) with zeros behind it."""
    made: Array = np.zeros((1, length), numpy_dtype(dtype))
    if row is not None:
        made[0, : row.size] = row
    return made


def about_table(described: TableDescription, *, is_whole: bool, steps: int) -> dict[str, Any]:
    """Return what a checkpoint says of a table, whatever the servers.

    `is_whole`: tensors are kept whole, and the state has names ``NUMBER OF THE TENSOR.KEY``.
    """
    return {
        "specs": described.body["specs"],
        "rows": None if described.rows is None else described.rows.spec.fields,
        "first_key": described.first_key,
        "whole": is_whole,
        "steps": steps,
    }


def read_table(
    manifest: Manifest, described: TableDescription, server: int, servers: int
) -> tuple[list[Array], dict[str, Array], int]:
    """Return what a server has to have of a table now: values and state; and the finished steps.

    Of what other numbers of servers have saved, it reads the parts that it needs. Raises KeyError
    for a table that was not saved, ValueError for one that was another one, or is damaged, and
    OSError.
    """
    tables = manifest.values[VALUE]["tables"]
    name = described.name
    if name not in tables:
        raise KeyError(f"the checkpoint has no table {name!r}, but {', '.join(sorted(tables))}")
    about = tables[name]
    _check(about, described)
    with ExitStack() as files:
        reader = files.enter_context(Reader(manifest))
        sources = [
            _Source(reader, name, number, each, whole_rows=(number, len(about["servers"])) == (
                server, servers
            ))
            for number, each in enumerate(about["servers"])
        ]  # fmt: skip
        shift = described.first_key - about["first_key"]
        if described.rows is None and about["whole"]:
            values, state = _read_whole(sources, shift, described)
        else:
            step = gcd(len(sources), servers)  # Of others a server needs no row.
            needed = [each for each in sources if not (each.server - server) % step]
            values, state = join(described, sources if described.rows is None else needed, shift)
    return values, state, about["steps"]


def _check(about: Mapping[str, Any], described: TableDescription) -> None:
    """Raise ValueError where the table that was saved is another one."""
    name, saved, own = described.name, about["specs"], described.body["specs"]
    if len(saved) != len(own):
        raise ValueError(f"table {name!r} has {len(own)} tensors, and {len(saved)} were saved")
    for there, here in zip(saved, own, strict=True):
        words = zip(("name", "dtype", "shape", "parameter group"), there, here, strict=True)
        for word, old, new in words:
            if (list(old) if word == "shape" else old) != (list(new) if word == "shape" else new):
                raise ValueError(
                    f"table {name!r}, tensor {here[0]!r}: its {word} is {new!r} here, and "
                    f"{old!r} in the checkpoint: build the model and optimizer that were saved"
                )
    rows = None if described.rows is None else described.rows.spec.fields
    if about["rows"] != rows:
        raise ValueError(
            f"table {name!r} has rows {rows} (count, length, dtype, seed, initializer, scale, row "
            f"of zeros) here, and {about['rows']} in the checkpoint"
        )


class _Source:
    """What one server has saved of a table (see `Source`). With `whole_rows`, it is read at once,
    and compared with its digest."""

    def __init__(
        self, reader: Reader, table: str, server: int, about: Mapping[str, Any], *,
        whole_rows: bool,
    ) -> None:  # fmt: skip
        self.server = server
        self.blocks = [
            Block(dtype, group, tuple(Part(*part) for part in parts))
            for dtype, group, parts in about["blocks"]
        ]
        self.state = {name: word for word, name, *_ in about["index"] if word != VALUES}
        self._reader, self._table, self._whole_rows = reader, table, whole_rows
        self._rows: dict[str, Array] = {}
        self._places: dict[tuple[bool, str], tuple[str, int, list[int]]] = {}
        ends: dict[str, int] = {}
        for word, name, dtype, shape in about["index"]:
            at = ends.get(dtype, 0)
            self._places[word == VALUES, name] = dtype, at, shape
            ends[dtype] = at + prod(shape)

    def array(self, word: str, name: str) -> Array:
        """Return an array, in memory of its own."""
        shape = self._places[word == VALUES, name][2]
        return self.cut(word, name, 0, prod(shape)).reshape(shape)

    def cut(self, word: str, name: str, start: int, stop: int) -> Array:
        """Return some elements of an array, flat."""
        dtype, at, _ = self._places[word == VALUES, name]
        if start >= stop:
            return np.empty(0, numpy_dtype(dtype))
        if self._whole_rows:
            if dtype not in self._rows:
                self._rows[dtype] = self._read(dtype, None)
            found: Array = self._rows[dtype][at + start : at + stop]
        else:
            found = self._read(dtype, (at + start, at + stop))
        copied: Array = found.copy()
        return copied

    def _read(self, dtype: str, within: tuple[int, int] | None) -> Array:
        name = tensor_name(self._table, dtype)
        columns = within or (0, self._reader.shape(name)[1])
        row: Array = self._reader.read(name, ((self.server, self.server + 1), columns))
        return row.reshape(-1)


def tensor_name(table: str, dtype: str) -> str:
    """Return the name of the tensor of a checkpoint that has all of a dtype of a table."""
    return f"{table}.{dtype}"


def _read_whole(
    sources: Sequence[_Source], shift: int, described: TableDescription
) -> tuple[list[Array], dict[str, Array]]:
    """Return tensors that are whole, each with the state that its server has kept for it."""
    places: dict[int, tuple[_Source, str, str, int]] = {}
    for source in sources:
        count = 0
        for number, block in enumerate(source.blocks):
            at = 0
            for part in block.parts:
                places[part.key + shift] = source, str(number), f"{count}.", at
                at += part.stop - part.start
                count += 1
    values: list[Array] = []
    state: dict[str, Array] = {}
    count = 0
    for block in described.blocks:
        tensors = []
        for part in block.parts:
            source, own, prefix, at = places[part.key]
            tensors.append(source.cut(VALUES, own, at, at + part.stop))
            for name in source.state:
                if name.startswith(prefix):
                    key = name.removeprefix(prefix)
                    state[f"{count}.{key}"] = source.array(REST, name)
            count += 1
        values.append(np.concatenate(tensors))
    return values, state
