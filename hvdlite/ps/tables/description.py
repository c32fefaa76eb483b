"""What a worker says of a table to each server when it starts: alike in all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.ps.layouts.blocks import Block, TensorSpec, blocks_of, specs_of_words
from hvdlite.ps.layouts.layout import Layout, Part
from hvdlite.ps.tables.clocks import Mode
from hvdlite.ps.tables.row_store import RowShare, RowsSpec


class TableDescription:
    """The description of a table and of the share of one server, as a worker has sent it."""

    def __init__(self, name: str, body: Mapping[str, Any]) -> None:
        self.body = body
        try:
            self.name = name
            self.specs: Sequence[TensorSpec] = specs_of_words(body["specs"])
            self.mode = Mode(body["mode"], body["staleness"], body.get("scale"))
            self.average = bool(body["average"])
            self.first_key = int(body["first_key"])  # Of the parts of its first tensor.
            self.blocks = [
                Block(dtype, group, tuple(Part(*part) for part in parts))
                for dtype, group, parts in body["blocks"]
            ]
            self.rows: RowShare | None = None  # Of a table of rows, which has no blocks.
            if body.get("rows"):
                fields, server, servers = body["rows"]
                self.rows = RowShare(RowsSpec(*fields), server, servers)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the table {name!r} is described wrongly: {error}") from error

    def with_blocks(self, blocks: Sequence[Block]) -> TableDescription:
        """Return the description of the same table with other blocks."""
        return TableDescription(self.name, {**self.body, "blocks": _words_of(blocks)})

    def for_server(self, layout: Layout, server: int) -> TableDescription:
        """Return the description of the share of a server in a layout."""
        if self.rows is not None:
            words = [self.rows.spec.fields, server, layout.num_servers]
            return TableDescription(self.name, {**self.body, "rows": words})
        return self.with_blocks(blocks_of(self.specs, self.first_key, layout, server))

    def shapes(self, *, whole: bool) -> list[list[tuple[int, ...]]]:
        """Return the shapes of what each block consists of: `whole` tensors, or one flat piece."""
        if not whole:
            return [[(-1,)] for _ in self.blocks]
        shapes = [spec.shape for spec in self.specs]
        return [[shapes[part.key - self.first_key] for part in each.parts] for each in self.blocks]


def describe_table(
    specs: Sequence[TensorSpec], blocks: Sequence[Block], mode: Mode, *, average: bool,
    rows: RowShare | None = None, first_key: int = 0,
) -> dict[str, Any]:  # fmt: skip
    return {
        "rows": rows and [rows.spec.fields, rows.server, rows.servers],
        "specs": [*specs],
        "first_key": first_key,
        "mode": mode.name,
        "staleness": mode.staleness,
        "scale": mode.scale,
        "average": average,
        "blocks": _words_of(blocks),
    }


def _words_of(blocks: Sequence[Block]) -> list[list[Any]]:
    return [[block.dtype, block.group, block.parts] for block in blocks]
