"""Digests of tensors, compared over ranks: which rank has which tensor otherwise than most.

Each block of 8 KiB becomes a sum of its words, each times an odd number of its place, modulo 2**64:
a multilinear hash (Carter and Wegman, 1979). Products carry changes upwards alone, so the upper
half of a word is mixed into the lower one before. Every change of one word is found, and others
but for a chance of some 2**-32. numpy computes 6 GB/s on a core, devices compute it by themselves.
Of small tensors, such as counts of steps, the bytes themselves are taken.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.tensors.numpy_adapter import Array

BLOCK_WORDS = 1024
BLOCK_BYTES = 8 * BLOCK_WORDS
_SMALL_BYTES = 2048  # Of a tensor whose bytes cost less than the calls that make a sum of them.
_BLOCKS_AT_ONCE = 32  # So many stay in the cache of a core while they are mixed and summed.
# Keras numbers layers of the same kind, over all models of a process: dense, dense_1, dense_2.
_AUTOMATIC_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


@cache
def factors() -> Array:
    """Return the factors of the words of a block: odd numbers of 64 bits."""
    numbers = np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers ^= numbers >> np.uint64(30)  # As splitmix64 (Steele, Lea and Flood, 2014) begins.
    odd: Array = numbers * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    return odd


class Facts(NamedTuple):
    """What ranks tell each other of a tensor."""

    dtype: str  # As `TensorSpec` has it.
    shape: tuple[int, ...]
    digest: str = ""  # 64 bits as hexadecimal digits.

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}, digest {self.digest}"


class Compared(NamedTuple):
    """A tensor that ranks compare. Its bytes are read when they are asked for."""

    name: str  # All ranks that have the tensor give it this name.
    dtype: str
    shape: tuple[int, ...]
    size: int  # In bytes.
    sums: Callable[[], Array]  # uint64: of each block of the bytes.
    block: Callable[[int], bytes]
    shown: str = ""  # What an error calls it instead of its name; ranks may differ in that.

    def content(self) -> bytes:
        """Return few bytes that tell the tensor from others of its size; reads all of its own."""
        return self.block(0) if self.size <= _SMALL_BYTES else self.sums().tobytes()

    def facts(self) -> Facts:
        """Return what ranks tell each other where they disagree."""
        digest = hashlib.blake2b(self.content(), digest_size=8).hexdigest()
        return Facts(self.dtype, self.shape, digest)


@lru_cache(maxsize=10_000)  # An eager tape asks in each step, as for the next.
def name_on_all_ranks(path: str) -> str:
    """Return the part of the path of a variable of Keras that does not differ between ranks.

    It may begin with the name of the model or not, where that was built or was loaded. State of an
    optimizer has the path of its variable in its own name: adam/sequential_dense_kernel_momentum.
    """
    *above, name = without_numbers(path).split("/")[-2:]
    return "/".join([*above, "_".join(name.split("_")[-2:])])


def without_numbers(path: str) -> str:
    """Return the path of a variable of Keras as if nothing in it was counted."""
    return _AUTOMATIC_NUMBER.sub("", path)


def of_array(name: str, array: Array, dtype: str = "") -> Compared:
    """Return a numpy array to compare; `dtype` is that of its bytes where it is another one."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Compared(
        name,
        dtype or array.dtype.name,
        array.shape,
        flat.size,
        lambda: sums_of(flat),
        lambda number: flat[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES].tobytes(),
    )


def sums_of(flat: Array) -> Array:
    """Return the sums of the blocks of an array of bytes."""
    whole = flat.size // BLOCK_BYTES
    blocks = flat[: whole * BLOCK_BYTES].view(np.uint64).reshape(whole, BLOCK_WORDS)
    sums = np.empty(-(-flat.size // BLOCK_BYTES), np.uint64)
    room = np.empty((min(whole, _BLOCKS_AT_ONCE), BLOCK_WORDS), np.uint64)  # New pages cost much.
    for start in range(0, whole, _BLOCKS_AT_ONCE):
        end = min(start + _BLOCKS_AT_ONCE, whole)
        mixed = _mixed(blocks[start:end], room[: end - start])
        np.dot(mixed, factors(), out=sums[start:end])
    rest = flat[whole * BLOCK_BYTES :]
    if rest.size:
        words = np.zeros(-(-rest.size // 8), np.uint64)
        words.view(np.uint8)[: rest.size] = rest
        sums[-1] = _mixed(words) @ factors()[: words.size]
    return sums


def _mixed(words: Array, room: Array | None = None) -> Array:
    mixed: Array = np.right_shift(words, np.uint64(32), out=room)
    mixed ^= words
    return mixed


class Gather(Protocol):
    """Exchanges something between all ranks; names tell one exchange from another."""

    def __call__(self, name: str, obj: Any) -> dict[int, Any]:
        """Return the objects of all ranks, by their numbers."""

    def are_equal(self, name: str, body: bytes) -> bool:
        """Return whether all ranks give the same bytes; all give as many."""


def compare(tensors: Sequence[Compared], what: str, remedy: str, gather: Gather) -> None:
    """Raise `RuntimeError` on all ranks if two of them have a tensor otherwise.

    Bits are compared: a NaN is equal to itself. All ranks call this at the same point; while they
    agree, each sends a digest of 16 bytes. The error begins with `what`, and ends with the
    `remedy`.
    """
    total = hashlib.blake2b(digest_size=16)
    for tensor in sorted(tensors, key=lambda each: each.name):
        total.update(repr(tensor[:4]).encode())  # Says how many bytes follow.
        total.update(tensor.content())
    if gather.are_equal("digest", total.digest()):
        return
    mine = {tensor.name: tensor.facts() for tensor in tensors}
    told = gather("digests", (mine, {each.name: each.shown for each in tensors if each.shown}))
    of_ranks: dict[int, dict[str, Facts]] = {rank: told[rank][0] for rank in sorted(told)}
    names = dict.fromkeys(name for theirs in of_ranks.values() for name in theirs)
    different = [
        name for name in names if len({theirs.get(name) for theirs in of_ranks.values()}) > 1
    ]
    if not different:
        raise RuntimeError(f"{what}: another thread changed them meanwhile. {remedy}")
    groups = _groups({rank: theirs.get(different[0]) for rank, theirs in of_ranks.items()})
    mine_of_it = next((tensor for tensor in tensors if tensor.name == different[0]), None)
    element = _first_element(mine_of_it, groups, gather)
    shown = [theirs[different[0]] for _, theirs in told.values() if different[0] in theirs]
    raise RuntimeError(
        f"{what}: {_who(groups)} in {len(different)} of {len(names)} tensors, first in "
        f"'{[*shown, different[0]][0]}'{element} ({_values(groups)}). {remedy}"
    )


# -- the words of the error


Groups = dict[Facts | None, list[int]]  # What ranks have, and which ranks: most of them first.


def _groups(of_ranks: Mapping[int, Facts | None]) -> Groups:
    groups: Groups = {}
    for rank in sorted(of_ranks):
        groups.setdefault(of_ranks[rank], []).append(rank)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [*map(str, ranks[:8])]
    rest = str(len(ranks) - len(shown)) + " others" if len(ranks) > len(shown) else shown.pop()
    return f"ranks {', '.join(shown)} and {rest}"


def _who(groups: Groups) -> str:
    most, *others = groups.values()
    odd = sorted(rank for ranks in others for rank in ranks)
    if len(most) <= max(map(len, others)):
        return f"{_listed(sorted([*most, *odd]))} differ, without a majority that agrees,"
    return f"{_listed(odd)} differ{'s' if len(odd) == 1 else ''} from {_listed(most)}"


def _values(groups: Groups) -> str:
    shown = [f"{_listed(ranks)}: {facts or 'none'}" for facts, ranks in [*groups.items()][:4]]
    return "; ".join([*shown, "..."] if len(groups) > len(shown) else shown)


def _first_element(tensor: Compared | None, groups: Groups, gather: Gather) -> str:
    """Return words about the first element that the first ranks of two groups have otherwise."""
    (facts, (one, *_)), (theirs, (other, *_)), *_ = groups.items()
    if facts is None or theirs is None or facts[:2] != theirs[:2]:
        return ""
    sums = gather("sums", None if tensor is None else tensor.sums())
    number = int(np.argmax(sums[one] != sums[other]))
    blocks = gather("block", None if tensor is None else tensor.block(number))
    try:
        dtype = numpy_dtype(facts.dtype)
    except TypeError:  # One that numpy does not know, such as floats of 8 bits.
        return ""
    rows = {
        rank: np.frombuffer(blocks[rank], np.uint8).reshape(-1, dtype.itemsize)
        for rank in (one, other)
    }
    first, second = rows.values()
    place = int(np.argmax((first != second).any(axis=1)))
    index = np.unravel_index(number * BLOCK_BYTES // dtype.itemsize + place, facts.shape)
    bits = {rank: row[place].tobytes() for rank, row in rows.items()}
    values = {rank: str(np.frombuffer(each, dtype)[0]) for rank, each in bits.items()}
    if len({*values.values()}) == 1:  # Zeros and NaN of different bits.
        values = {rank: f"{values[rank]} (0x{each[::-1].hex()})" for rank, each in bits.items()}
    told = " and ".join(f"{value} on rank {rank}" for rank, value in values.items())
    return f": {'element [' + ', '.join(map(str, index)) + ']' if index else 'it'} is {told}"
