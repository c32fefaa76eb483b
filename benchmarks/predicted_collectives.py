"""What collectives but allreduce take between hosts, by the model that chooses their way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from measuring import duration, table

from hvdlite.common.collectives.between_hosts.costs import (
    OTHERS,
    Model,
    collective_seconds,
    collective_way,
)

SIZES = (64 << 10, 1 << 20, 64 << 20)  # bytes, of all blocks; in an exchange, of each rank


def predict(model: Model, ranks: Iterable[int], ranks_per_host: int) -> list[dict[str, Any]]:
    """Return a record for each size, number of ranks on several hosts, and collective."""
    layered = [each for each in ranks if each > ranks_per_host]
    records = []
    for nbytes, size, name in product(SIZES, layered, OTHERS):
        hosts = (ranks_per_host,) * (size // ranks_per_host)
        records.append(
            {
                "ranks": size, "bytes": nbytes, "collective": name,
                "way": collective_way(name, model, hosts, nbytes),
                "predicted_seconds": collective_seconds(name, model, hosts, nbytes),
            }
        )  # fmt: skip
    return records


def predictions_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each size and number of ranks: the time, and the way."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in records:
        key = f"{each['bytes'] / 1024:,.0f} KiB", f"{each['ranks']:,}"
        cell = f"{duration(each['predicted_seconds'])} ({each['way']})"
        lines.setdefault(key, []).append(cell)
    return table(["size", "ranks", *OTHERS], [[*key, *row] for key, row in lines.items()])
