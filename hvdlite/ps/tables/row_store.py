"""The rows of an embedding that one server keeps, each made when it is first asked for.

Row r lies on server r mod S. Its first value depends on the seed, the name of the table and r
alone, so that it is the same on any number of servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from hashlib import blake2b
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.ps.layouts.blocks import Array, dtype_of

NORMAL, UNIFORM, ZEROS = "normal", "uniform", "zeros"
_FIRST_CAPACITY = 64
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class RowsSpec:
    """How many rows there are, how long they are, and what they begin with."""

    count: int
    length: int
    dtype: str = "float32"
    seed: int = 0
    initializer: str = NORMAL
    scale: float = 1.0  # The standard deviation of "normal"; "uniform" is within -scale .. scale.
    zero_row: int | None = None  # A row that begins with zeros, as that of `padding_idx`.

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be."""
        for word in ("count", "length"):
            number = getattr(self, word)
            if type(number) is not int or number < 1:
                raise ValueError(f"the {word} of rows is {number!r}: give a number, 1 or more")
        if dtype_of(self.dtype).kind in "iu":
            raise ValueError(f"rows of {self.dtype}: the dtype of rows is a float")
        if self.initializer not in (NORMAL, UNIFORM, ZEROS):
            raise ValueError(
                f"initializer is {self.initializer!r}, which is none of {NORMAL}, {UNIFORM} and "
                f"{ZEROS}"
            )
        if type(self.seed) is not int:
            raise ValueError(f"the seed of rows is {self.seed!r}: give an integer")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"the seed of rows is {self.seed}: give one of at most 63 bits")
        if not 0 <= self.scale < float("inf"):
            raise ValueError(f"the scale of rows is {self.scale!r}: give a number, 0 or more")

    @property
    def fields(self) -> list[Any]:
        """What a message says of it: RowsSpec(*fields) is the same again."""
        return list(astuple(self))


@dataclass(frozen=True)
class RowShare:
    """Which rows of a table a server keeps."""

    spec: RowsSpec
    server: int
    servers: int

    def check(self, ids: NDArray[np.int64]) -> None:
        """Raise ValueError for rows that this server does not keep, and for unsorted ones."""
        if not len(ids):
            return
        if ids[0] < 0 or ids[-1] >= self.spec.count or (np.diff(ids) <= 0).any():
            most = self.spec.count - 1
            raise ValueError(f"ids of rows are from 0 to {most}, each once, and sorted")
        if (ids % self.servers != self.server).any():
            raise ValueError(f"server {self.server} of {self.servers} does not keep such a row")


def first_rows(spec: RowsSpec, name: str, ids: NDArray[np.int64]) -> Array:
    """Return the first values of rows: an array of shape (len(ids), length)."""
    shape = len(ids), spec.length
    dtype = dtype_of(spec.dtype)
    if spec.initializer == ZEROS:
        return np.zeros(shape, dtype)
    digest = blake2b(f"{spec.seed}/{name}".encode(), digest_size=8).digest()
    columns = np.arange(spec.length, dtype=np.uint64)
    counters = ids.astype(np.uint64)[:, None] * np.uint64(spec.length) + columns
    uniform = _uniform(int.from_bytes(digest, "little"), counters)
    if spec.initializer == UNIFORM:
        made = (2 * uniform - 1) * spec.scale
    else:
        digest = blake2b(digest, digest_size=8).digest()
        angles = 2 * np.pi * _uniform(int.from_bytes(digest, "little"), counters)
        made = np.sqrt(-2 * np.log(uniform)) * np.cos(angles) * spec.scale  # Box and Muller.
    if spec.zero_row is not None:
        made[ids == spec.zero_row] = 0
    return made.astype(dtype)


def _uniform(key: int, counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in (0, 1), by SplitMix64 (Steele et al., 2014) at each counter."""
    bits = (counters + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
    bits ^= bits >> np.uint64(31)
    made: NDArray[np.float64] = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return made


class RowStore:
    """Rows of one server, in the order in which they were first asked for.

    `slots` are arrays beside the values that belong to each row, such as momenta: of shape
    (capacity, length), like `values`. `ids` and `values` beyond `len` are not initialized.
    """

    def __init__(self, name: str, spec: RowsSpec) -> None:
        self.spec = spec
        self._name = name
        self._length = 0
        self._places: dict[int, int] = {}  # Of rows: where they are. There may be 2^40 others.
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._values = np.empty((_FIRST_CAPACITY, spec.length), dtype_of(spec.dtype))
        self._slots: dict[str, Array] = {}
        self._fills: dict[str, float] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._length]

    @property
    def values(self) -> Array:
        return self._values[: self._length]

    @property
    def slots(self) -> dict[str, Array]:
        return {key: slot[: self._length] for key, slot in self._slots.items()}

    def add_slot(self, key: str, fill: float, dtype: np.dtype[Any]) -> None:
        """Let each row have another array, which begins with `fill`."""
        self._fills[key] = fill
        self._slots[key] = np.full(self._values.shape, fill, dtype)

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where rows are in `values`; those that were never asked for are made."""
        places = self._look_up(ids)
        new = ids[places < 0]
        if len(new):
            new = np.unique(new)
            self._append(new, first_rows(self.spec, self._name, new))
            places = self._look_up(ids)
        return places

    def _look_up(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where rows are; -1 for those that were never asked for."""
        return np.fromiter(map(self._places.get, ids.tolist(), repeat(-1)), np.int64, len(ids))

    def load(self, ids: NDArray[np.int64], values: Array, slots: Mapping[str, Array]) -> None:
        self._places.clear()
        self._length = 0
        self._slots.clear()
        for key, slot in slots.items():
            self.add_slot(key, self._fills.get(key, 0.0), slot.dtype)
        self._append(ids, values)
        for key, slot in slots.items():
            self._slots[key][: len(ids)] = slot

    def _append(self, ids: NDArray[np.int64], values: Array) -> None:
        first, last = self._length, self._length + len(ids)
        if last > len(self._ids):
            capacity = max(last, 2 * len(self._ids))
            # Memory may be missing for one of them: then all are as they were.
            grown = _grown(self._ids, capacity), _grown(self._values, capacity)
            self._slots = {key: _grown(slot, capacity) for key, slot in self._slots.items()}
            self._ids, self._values = grown
        self._ids[first:last], self._values[first:last] = ids, values
        for key, slot in self._slots.items():
            slot[first:last] = self._fills[key]
        self._places.update(zip(ids.tolist(), range(first, last), strict=True))
        self._length = last


def _grown(array: Array, capacity: int) -> Array:
    grown = np.empty((capacity, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
