"""Parts of tables on their way between servers: cut out of one table, put together into another.

A piece is a range of one tensor, with what its updater keeps for each of its elements. What an
updater keeps besides, such as a count of steps, is taken over where it is not there yet. Of a table
of rows, rows move with all that belongs to them.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlite.ps.layouts.blocks import Array, Block, dtype_of


@dataclass(frozen=True)
class Piece:
    """The elements `start` to `stop` of the tensor `key`. The arrays are flat."""

    key: int
    start: int
    stop: int
    values: Array
    slots: Mapping[str, Array]

    def cut(self, start: int, stop: int) -> Piece:
        """Return the part of it that is within a range."""
        start, stop = max(start, self.start), min(stop, self.stop)
        inside = slice(start - self.start, stop - self.start)
        slots = {name: slot[inside] for name, slot in self.slots.items()}
        return Piece(self.key, start, stop, self.values[inside], slots)


@dataclass
class Share:
    """What one server gives of a table."""

    pieces: list[Piece] = field(default_factory=list)
    # What belongs to whole blocks: (dtype, group) -> name -> array.
    rest: dict[tuple[str, int], dict[str, Array]] = field(default_factory=dict)
    # Of a table of rows: their ids, the rows, and what belongs to each row or to all, by names.
    rows: tuple[Array, Array, dict[str, Array]] | None = None

    @classmethod
    def of(
        cls, blocks: Sequence[Block], values: Sequence[Array], state: Mapping[str, Array], *,
        is_rows: bool,
    ) -> Share:  # fmt: skip
        """Return all of a table. Names in `state` are ``BLOCK.NAME`` or ``BLOCK``, but of rows."""
        if is_rows:
            return cls(rows=(values[0], values[1], dict(state)))
        found = cls()
        for number, (block, array) in enumerate(zip(blocks, values, strict=True)):
            own = {
                name.partition(".")[2]: each
                for name, each in state.items()
                if name.partition(".")[0] == str(number)
            }
            slots = {name: each for name, each in own.items() if each.shape == (block.size,)}
            rest = {name: each for name, each in own.items() if name not in slots}
            found.rest[block.dtype, block.group] = rest
            found.pieces += _pieces_of(block, array, slots)
        return found

    def part_for(self, ranges: Iterable[tuple[int, int, int]], server: int, servers: int) -> Share:
        """Return what is within ranges (key, start, stop); of rows, what `server` keeps."""
        if self.rows is not None:
            ids, rows, state = self.rows
            chosen = ids % servers == server
            kept = {
                name: each[chosen] if each.shape[:1] == ids.shape else each
                for name, each in state.items()
            }
            return Share(rows=(ids[chosen], rows[chosen], kept))
        by_key: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            by_key.setdefault(piece.key, []).append(piece)
        found = [
            piece.cut(start, stop)
            for key, start, stop in ranges
            for piece in by_key.get(key, ())
            if piece.start < stop and start < piece.stop
        ]
        return Share(found, self.rest)

    @staticmethod
    def joined(
        blocks: Sequence[Block], shares: Sequence[Share]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Return values and state of a table. What the first ones have of whole blocks counts.

        Raises ValueError where something is missing.
        """
        if shares[0].rows is not None:
            return _joined_rows([share.rows for share in shares if share.rows is not None])
        by_key: dict[int, list[Piece]] = {}
        rest: dict[tuple[str, int], dict[str, Array]] = {}
        for share in shares:
            for piece in share.pieces:
                by_key.setdefault(piece.key, []).append(piece)
            for place, arrays in share.rest.items():
                rest[place] = {**arrays, **rest.get(place, {})}
        values, state = [], {}
        for number, block in enumerate(blocks):
            array, slots = _filled(block, by_key)
            values.append(array)
            of_block = rest.get((block.dtype, block.group), {})  # Each block changes its own.
            every = {**{name: each.copy() for name, each in of_block.items()}, **slots}
            state.update({f"{number}.{name}".rstrip("."): each for name, each in every.items()})
        return values, state

    def pack(self) -> tuple[dict[str, Any], list[Array]]:
        """Return what a message says of it, and the payloads of the message."""
        payloads: list[Array] = []

        def note(array: Array) -> list[Any]:
            payloads.append(np.ascontiguousarray(array))
            return [array.dtype.name, list(array.shape)]

        def note_all(arrays: Mapping[str, Array]) -> list[Any]:
            return [[name, note(array)] for name, array in arrays.items()]

        pieces = [
            [piece.key, piece.start, piece.stop, note(piece.values), note_all(piece.slots)]
            for piece in self.pieces
        ]
        rest = [[dtype, group, note_all(own)] for (dtype, group), own in self.rest.items()]
        rows = None
        if self.rows is not None:
            rows = [note(self.rows[0]), note(self.rows[1]), note_all(self.rows[2])]
        return {"pieces": pieces, "rest": rest, "rows": rows}, payloads

    @classmethod
    def unpack(cls, body: Mapping[str, Any], payloads: Sequence[Any]) -> Share:
        """Return what a message has. Raises ValueError for what cannot be."""
        left = iter(payloads)

        def array(about: Sequence[Any]) -> Array:
            dtype, shape = about
            made: Array = np.frombuffer(next(left), dtype_of(dtype)).reshape(shape)
            return made

        def arrays(about: Sequence[Any]) -> dict[str, Array]:
            return {name: array(each) for name, each in about}

        pieces = [
            Piece(key, start, stop, array(values), arrays(slots))
            for key, start, stop, values, slots in body["pieces"]
        ]
        rest = {(dtype, group): arrays(about) for dtype, group, about in body["rest"]}
        rows = body["rows"]
        if rows is not None:
            rows = (array(rows[0]), array(rows[1]), arrays(rows[2]))
        return cls(pieces, rest, rows)


def _pieces_of(block: Block, array: Array, slots: Mapping[str, Array]) -> Iterator[Piece]:
    at = 0
    for part in block.parts:
        inside = slice(at, at + part.stop - part.start)
        own = {name: slot[inside] for name, slot in slots.items()}
        yield Piece(part.key, part.start, part.stop, array[inside], own)
        at = inside.stop


def _filled(block: Block, by_key: Mapping[int, Sequence[Piece]]) -> tuple[Array, dict[str, Array]]:
    array, slots, filled, at = block.new(), dict[str, Array](), 0, 0
    for part in block.parts:
        for piece in by_key.get(part.key, ()):
            if piece.start >= part.stop or part.start >= piece.stop:
                continue
            own = piece.cut(part.start, part.stop)
            inside = slice(at + own.start - part.start, at + own.stop - part.start)
            array[inside] = own.values
            filled += own.stop - own.start
            for name, slot in own.slots.items():
                if name not in slots:
                    slots[name] = np.zeros(block.size, slot.dtype)
                slots[name][inside] = slot
        at += part.stop - part.start
    if filled != block.size:
        raise ValueError(f"{filled} of {block.size} elements of a block have come")
    return array, slots


def _joined_rows(
    shares: Sequence[tuple[Array, Array, dict[str, Array]]],
) -> tuple[list[Array], dict[str, Array]]:
    ids = np.concatenate([share[0] for share in shares])
    rows = np.concatenate([share[1] for share in shares])
    state: dict[str, Array] = {}
    for own, _, arrays in reversed(shares):
        for name, each in arrays.items():
            if each.shape[:1] != own.shape:
                state[name] = each
    for name in {name for share in shares for name in share[2]} - state.keys():
        shape, dtype = next(
            (share[2][name].shape[1:], share[2][name].dtype) for share in shares if name in share[2]
        )
        state[name] = np.concatenate(
            [share[2].get(name, np.zeros((len(share[0]), *shape), dtype)) for share in shares]
        )
    return [ids, rows], state
