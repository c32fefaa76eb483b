"""The saved form of a table, which snapshots, checkpoints and servers that hand tables over share.

A server has blocks of a table (see `Block`) with their values, and what its updater keeps for them:
slots, which have a number for each element of a block, such as momenta, and the rest, such as a
count of steps. Names of the state are ``BLOCK.NAME`` or ``BLOCK``. Of a table of rows, the values
are the ids and the rows, and a slot has something for each row.

`SavedTable.pack` is the one writer of this form, `SavedTable.unpack` the one reader. `join` makes
of what servers of one layout have saved what a server of another layout is to keep.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hvdlite.ps.layouts.blocks import Array, Block, dtype_of
from hvdlite.ps.layouts.layout import Part
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowShare
from hvdlite.ps.tables.table import Saved

VALUES, SLOT, REST = "values", "slot", "rest"


@dataclass(frozen=True)
class SavedTable:
    """A table of one server between two updates, in memory or on disk. Arrays are never changed."""

    described: TableDescription
    saved: Saved
    layout: int = 1  # The version of the layout.
    kinds: Mapping[str, str] | None = None  # SLOT or REST of each name; None: by the shapes.

    @property
    def blocks(self) -> Sequence[Block]:
        return self.described.blocks

    @cached_property
    def state(self) -> Mapping[str, str]:
        """SLOT or REST of each name."""
        if self.kinds is not None:
            return self.kinds
        found = {}
        for name, array in self.saved.state.items():
            if self.described.rows is not None:
                is_slot = array.shape[:1] == self.saved.values[0].shape
            else:
                number = int(name.partition(".")[0])
                is_slot = number < len(self.blocks) and array.shape == (self.blocks[number].size,)
            found[name] = SLOT if is_slot else REST
        return found

    def in_memory(self) -> SavedTable:
        """Return the same with arrays that may be changed."""
        values = [array.copy() for array in self.saved.values]
        state = {name: array.copy() for name, array in self.saved.state.items()}
        return replace(self, saved=self.saved._replace(values=values, state=state))

    def pack(self) -> tuple[dict[str, Any], list[Array]]:
        """Return what is to be said of the table, as JSON and msgpack can hold it, and arrays."""
        named = [(VALUES, str(number), array) for number, array in enumerate(self.saved.values)]
        named += [(self.state[name], name, array) for name, array in self.saved.state.items()]
        about = {
            "table": self.described.name,
            "description": self.described.body,
            "layout": self.layout,
            "version": self.saved.version,
            "finished": sorted(self.saved.finished.items()),
            "numbers": list(self.saved.numbers),
            "arrays": [[*words, array.dtype.name, list(array.shape)] for *words, array in named],
        }
        return about, [np.ascontiguousarray(array) for *_, array in named]

    @classmethod
    def unpack(cls, about: Mapping[str, Any], raws: Iterable[Any]) -> SavedTable:
        """Return what `pack` has said, with the bytes of the arrays; ValueError: it cannot be."""
        values: list[Array] = []
        state: dict[str, Array] = {}
        kinds: dict[str, str] = {}
        for (word, name, dtype, shape), raw in zip(about["arrays"], raws, strict=True):
            array = np.frombuffer(raw, dtype_of(dtype)).reshape(shape)
            if word == VALUES:
                values.append(array)
            else:
                state[name], kinds[name] = array, word
        described = TableDescription(about["table"], about["description"])
        finished = {int(worker): int(clock) for worker, clock in about["finished"]}
        saved = Saved(values, state, about["version"], finished, about["numbers"])
        return cls(described, saved, about["layout"], kinds)

    def cut_for(self, target: TableDescription) -> SavedTable:
        """Return what the server of `target` is to have of this one."""
        if target.rows is not None:
            ids, rows, state = _rows_for(self, target.rows)
            return replace(
                self, saved=self.saved._replace(values=[ids, rows], state=state), kinds=self.state
            )
        parts: list[list[Part]] = [[] for _ in self.blocks]
        places: list[list[slice]] = [[] for _ in self.blocks]
        for own, here, _, _, part in _overlaps(self.blocks, target.blocks):
            parts[own].append(part)
            places[own].append(here)
        state = dict(self.saved.state)
        for number, names in enumerate(_names_by_block(self)):
            for name in names:
                if self.state[name] == SLOT:
                    state[name] = _picked(state[name], places[number])
        blocks = [
            replace(block, parts=tuple(own)) for block, own in zip(self.blocks, parts, strict=True)
        ]
        saved = self.saved._replace(values=[*map(_picked, self.saved.values, places)], state=state)
        described = self.described.with_blocks(blocks)
        return replace(self, described=described, saved=saved, kinds=self.state)


def _overlaps(
    blocks: Sequence[Block], others: Sequence[Block], shift: int = 0
) -> Iterator[tuple[int, slice, int, slice, Part]]:
    """Yield what blocks have in common with others: which, where in both, and which elements.

    The keys of the others are higher by `shift`.
    """
    wanted: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, block in enumerate(others):
        for key, start, stop, at, _ in block.places:
            wanted.setdefault(key - shift, []).append((start, stop, number, at))
    for own, block in enumerate(blocks):
        for key, start, stop, at, _ in block.places:
            for low, high, number, to in wanted.get(key, ()):
                first, last = max(start, low), min(stop, high)
                if first < last:
                    here = slice(at + first - start, at + last - start)
                    there = slice(to + first - low, to + last - low)
                    yield own, here, number, there, Part(key, first, last, 0)


def _picked(array: Array, places: Sequence[slice]) -> Array:
    return np.concatenate([array[place] for place in places]) if places else array[:0]


def _names_by_block(source: SavedTable) -> list[dict[str, str]]:
    """Return for each block the names in its state, and what they are without the block."""
    found: dict[str, dict[str, str]] = {}
    for name in source.state:
        block, _, own = name.partition(".")
        found.setdefault(block, {})[name] = own
    return [found.get(str(number), {}) for number in range(len(source.blocks))]


def join(
    described: TableDescription, sources: Sequence[SavedTable], *, is_whole: bool = False
) -> tuple[list[Array], dict[str, Array]]:
    """Return the values and the state that a server is to keep. The first sources count most.

    `is_whole`: tensors are kept whole, and the state has names ``NUMBER OF THE TENSOR.KEY``. Raises
    ValueError where something is missing.
    """
    if described.rows is not None:
        return _join_rows(sources, described.rows)
    shift = described.first_key - sources[0].described.first_key
    if is_whole:
        return _join_whole(described, sources, shift)
    blocks, state = described.blocks, dict[str, Array]()
    values, filled = [block.new() for block in blocks], [0] * len(blocks)
    for source in sources:
        names = _names_by_block(source)
        for own, here, number, there, _ in _overlaps(source.blocks, blocks, shift):
            values[number][there] = source.saved.values[own][here]
            filled[number] += here.stop - here.start
            for name, word in names[own].items():
                if source.state[name] == SLOT:
                    array = source.saved.state[name][here]
                    if (known := _name(number, word)) not in state:
                        state[known] = np.zeros(blocks[number].size, array.dtype)
                    state[known][there] = array
    rests = _rests(sources)
    for number, block in enumerate(blocks):
        if filled[number] != block.size:
            raise ValueError(f"{filled[number]} of {block.size} elements of a block have come")
        for word, array in rests.get((block.dtype, block.group), {}).items():
            state.setdefault(_name(number, word), array.copy())  # Each changes its own.
    return values, state


def _rests(sources: Sequence[SavedTable]) -> dict[tuple[str, int], dict[str, Array]]:
    """Return what the first block of each kind has for all of its elements, by dtype and group."""
    found: dict[tuple[str, int], dict[str, Array]] = {}
    for source in sources:
        for block, words in zip(source.blocks, _names_by_block(source), strict=True):
            for name, word in words.items():
                if source.state[name] == REST:
                    of_kind = found.setdefault((block.dtype, block.group), {})
                    of_kind.setdefault(word, source.saved.state[name])
    return found


def _name(block: int, own: str) -> str:
    return f"{block}.{own}".rstrip(".")


def _rows_for(source: SavedTable, share: RowShare) -> tuple[Array, Array, dict[str, Array]]:
    """Return ids, rows and state of what a server keeps of a source."""
    ids, rows = source.saved.values
    chosen = ids % share.servers == share.server
    state = {
        name: array[chosen] if source.state[name] == SLOT else array
        for name, array in source.saved.state.items()
    }
    return ids[chosen], rows[chosen], state


def _join_rows(
    sources: Sequence[SavedTable], share: RowShare
) -> tuple[list[Array], dict[str, Array]]:
    shares = [_rows_for(source, share) for source in sources]
    kinds = {name: kind for source in reversed(sources) for name, kind in source.state.items()}
    state: dict[str, Array] = {}
    for name, kind in kinds.items():
        known = next(own[name] for *_, own in shares if name in own)
        if kind == REST:
            state[name] = known.copy()
            continue
        missing = np.zeros((1, *known.shape[1:]), known.dtype)
        state[name] = np.concatenate(
            [
                own[name] if name in own else np.repeat(missing, len(ids), 0)
                for ids, _, own in shares
            ]
        )
    ids, rows = (np.concatenate([each[at] for each in shares]) for at in (0, 1))
    return [ids, rows], state


def _join_whole(
    described: TableDescription, sources: Sequence[SavedTable], shift: int
) -> tuple[list[Array], dict[str, Array]]:
    places: dict[int, tuple[SavedTable, Array, str]] = {}
    for source in sources:
        count = 0
        for block, array in zip(source.blocks, source.saved.values, strict=True):
            for key, _, _, start, stop in block.places:
                places[key + shift] = source, array[start:stop], f"{count}."
                count += 1
    values: list[Array] = []
    state: dict[str, Array] = {}
    count = 0
    for block in described.blocks:
        tensors = [places[part.key] for part in block.parts]
        values.append(np.concatenate([array for _, array, _ in tensors]))
        for source, _, prefix in tensors:
            for name, array in source.saved.state.items():
                if name.startswith(prefix):
                    state[f"{count}.{name.removeprefix(prefix)}"] = array.copy()
            count += 1
    return values, state
