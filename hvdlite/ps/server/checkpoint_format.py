"""Tables of servers in the format of checkpoints: what each server writes, and what it reads again.

Of each dtype of a table, a server lays all its arrays one behind another: that is its row of a
tensor of shape (servers, longest row), which is cut along its first dimension. Where the arrays lie
in the rows, and which parts of which tensors they are, stands among the values of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from hvdlite.checkpoint.files import Reader
from hvdlite.checkpoint.manifest import Manifest
from hvdlite.common.plain.adapter import numpy_dtype
from hvdlite.ps.layouts.blocks import Array, Block
from hvdlite.ps.layouts.layout import Part
from hvdlite.ps.layouts.shares import Piece, Share
from hvdlite.ps.tables.description import TableDescription

VALUE = "parameter_server"  # The value of a checkpoint that says where all lies.
VALUES, STATE = "values", "state"


class Flat(NamedTuple):
    """The arrays of a table on one server, one behind another, and what each of them is."""

    about: list[list[Any]]  # [VALUES, number of the block] or [STATE, name]; then dtype, shape.
    rows: dict[str, Array]  # By dtype.


def flatten(values: Sequence[Array], state: Mapping[str, Array]) -> Flat:
    """Return the arrays of a table as rows."""
    index: list[list[Any]] = []
    rows: dict[str, list[Array]] = {}
    named = [(VALUES, str(number), array) for number, array in enumerate(values)]
    for word, name, array in [*named, *((STATE, name, array) for name, array in state.items())]:
        index.append([word, name, array.dtype.name, list(array.shape)])
        rows.setdefault(array.dtype.name, []).append(array.reshape(-1))
    return Flat(index, {dtype: np.concatenate(arrays) for dtype, arrays in rows.items()})


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
        if described.rows is not None:
            values, state = _read_rows(sources, server, servers)
        elif about["whole"]:
            values, state = _read_whole(sources, about["first_key"], described)
        else:
            values, state = _read_blocks(sources, about["first_key"], described)
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
    """What one server has saved of a table. With `whole_rows`, it is read at once, and compared
    with its digest."""

    def __init__(
        self, reader: Reader, table: str, server: int, about: Mapping[str, Any], *,
        whole_rows: bool,
    ) -> None:  # fmt: skip
        self.server = server
        self.blocks = [
            Block(dtype, group, tuple(Part(*part) for part in parts))
            for dtype, group, parts in about["blocks"]
        ]
        self._reader, self._table, self._whole_rows = reader, table, whole_rows
        self._rows: dict[str, Array] = {}
        self._places: dict[tuple[str, str], tuple[str, int, list[int]]] = {}
        ends: dict[str, int] = {}
        for word, name, dtype, shape in about["index"]:
            at = ends.get(dtype, 0)
            self._places[word, name] = dtype, at, shape
            ends[dtype] = at + prod(shape)

    @property
    def state(self) -> dict[str, list[int]]:
        """The shapes of the arrays of the state, by their names."""
        return {name: shape for (word, name), (*_, shape) in self._places.items() if word == STATE}

    def array(self, word: str, name: str) -> Array:
        """Return an array, in memory of its own."""
        shape = self._places[word, name][2]
        return self.cut(word, name, 0, prod(shape)).reshape(shape)

    def cut(self, word: str, name: str, start: int, stop: int) -> Array:
        """Return some elements of an array, flat."""
        dtype, at, _ = self._places[word, name]
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


def _read_blocks(
    sources: Sequence[_Source], first_key: int, described: TableDescription
) -> tuple[list[Array], dict[str, Array]]:
    shift = described.first_key - first_key
    share = Share()
    wanted: dict[int, list[Part]] = {}
    for block in described.blocks:
        for part in block.parts:
            wanted.setdefault(part.key - shift, []).append(part)
    for source in sources:
        for number, block in enumerate(source.blocks):
            own = {
                name: shape
                for name, shape in source.state.items()
                if name.partition(".")[0] == str(number)
            }
            slots = [name for name, shape in own.items() if shape == [block.size]]
            rest = share.rest.setdefault((block.dtype, block.group), {})
            for name in own.keys() - slots:
                rest.setdefault(name.partition(".")[2], source.array(STATE, name))
            for found in _overlaps(block, wanted):
                inside = found.at, found.at + found.stop - found.start
                share.pieces.append(
                    Piece(
                        found.key + shift, found.start, found.stop,
                        source.cut(VALUES, str(number), *inside),
                        {each.partition(".")[2]: source.cut(STATE, each, *inside)
                         for each in slots},
                    )
                )  # fmt: skip
    return Share.joined(described.blocks, [share])


@dataclass(frozen=True)
class _Overlap:
    """What a block has of a wanted part: elements of a tensor, from the place `at` of the block."""

    key: int
    start: int
    stop: int
    at: int


def _overlaps(block: Block, wanted: Mapping[int, Sequence[Part]]) -> Iterator[_Overlap]:
    at = 0
    for part in block.parts:
        for other in wanted.get(part.key, ()):
            start, stop = max(part.start, other.start), min(part.stop, other.stop)
            if start < stop:
                yield _Overlap(part.key, start, stop, at + start - part.start)
        at += part.stop - part.start


def _read_whole(
    sources: Sequence[_Source], first_key: int, described: TableDescription
) -> tuple[list[Array], dict[str, Array]]:
    """Return tensors that are whole, each with the state that its server has kept for it."""
    shift = described.first_key - first_key
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
                    state[f"{count}.{key}"] = source.array(STATE, name)
            count += 1
        values.append(np.concatenate(tensors))
    return values, state


def _read_rows(
    sources: Sequence[_Source], server: int, servers: int
) -> tuple[list[Array], dict[str, Array]]:
    """Return the rows that a server keeps, of each of whose old servers all is read in turn."""
    step = gcd(len(sources), servers)
    shares = []
    for source in sources:
        if (source.server - server) % step:
            continue  # It has none of the rows r with r mod `servers` == `server`.
        ids, rows = source.array(VALUES, "0"), source.array(VALUES, "1")
        state = {name: source.array(STATE, name) for name in source.state}
        every = Share(rows=(ids, rows, state))
        shares.append(every.part_for((), server, servers))
    return Share.joined([], shares)
