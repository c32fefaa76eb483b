"""Strategies: into how many parts the inputs of a batch are cut, and which part a rank takes.

A strategy is ``"data_parallel"`` (each input is cut along its first dimension into as many parts as
there are ranks), ``"full_batch"`` (nothing is cut), or a tuple with a tuple for each input: the
number of parts of each of its dimensions. An input is cut along one dimension at most. `patches`
cuts images along two.

Rank r takes part ``r % parts``. Where there are more ranks than parts, the parts are repeated.

This module decides and does nothing else: it imports no framework, and reads no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

DATA_PARALLEL = "data_parallel"
FULL_BATCH = "full_batch"
_WORDS = (DATA_PARALLEL, FULL_BATCH)

Cuts = tuple[tuple[int, ...], ...]
Strategy = str | Cuts
# The sizes of an input's dimensions; None: known when there is a value only, as in a graph.
Shape = Sequence[int | None]


@dataclass(frozen=True)
class Patches:
    """Images are cut into ``rows x columns`` patches, along two dimensions."""

    rows: int
    columns: int
    dims: tuple[int, int]

    @property
    def parts(self) -> int:
        """The number of patches."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Part:
    """A part of one dimension: number `index` of `parts`, from 0."""

    dim: int
    parts: int
    index: int

    def bounds(self, size: int) -> tuple[int, int]:
        """Return where the part begins and ends in a dimension of this size."""
        length = size // self.parts
        return self.index * length, (self.index + 1) * length


def parse(strategy: object) -> Strategy:
    """Return the strategy. Raises `TypeError` for another type, `ValueError` for another value."""
    if isinstance(strategy, str):
        if strategy in _WORDS:
            return strategy
        close = get_close_matches(strategy, _WORDS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"strategy {strategy!r} is unknown: {hint}Give 'data_parallel', 'full_batch' or a "
            "tuple with a tuple of cuts for each input"
        )
    if not isinstance(strategy, tuple):
        raise TypeError(
            f"a strategy is 'data_parallel', 'full_batch' or a tuple of tuples of ints, not "
            f"{type(strategy).__name__} {strategy!r}"
        )
    for number, cuts in enumerate(strategy):
        _check_cuts(strategy, number, cuts)
    _check_parts(strategy)
    return strategy


def _check_cuts(strategy: object, number: int, cuts: object) -> None:
    """Raise an error unless `cuts` are those of one input, along one dimension at most."""
    if not isinstance(cuts, tuple):
        raise TypeError(
            f"strategy {strategy!r}: input {number} has {type(cuts).__name__} {cuts!r}: give a "
            "tuple with the number of parts of each dimension"
        )
    for parts in cuts:
        if not isinstance(parts, int) or isinstance(parts, bool):
            raise TypeError(
                f"strategy {strategy!r}: input {number} has {type(parts).__name__} {parts!r} as a "
                "number of parts: give an int"
            )
        if parts < 1:
            raise ValueError(
                f"strategy {strategy!r}: input {number} is cut into {parts} parts: give 1 for a "
                "dimension that stays whole"
            )
    dims = [dim for dim, parts in enumerate(cuts) if parts > 1]
    if len(dims) > 1:
        raise ValueError(
            f"strategy {strategy!r}: input {number} is cut in {len(dims)} dimensions, {dims}: an "
            "input can be cut in one. Use patches=(rows, columns) for images"
        )


def _check_parts(strategy: Cuts) -> None:
    """Raise `ValueError` unless all inputs that are cut are so into the same number of parts."""
    if not strategy:
        raise ValueError("strategy () has no inputs: give a tuple of cuts for each input")
    parts = [math.prod(cuts) for cuts in strategy]
    numbers = sorted(set(parts) - {1}, reverse=True)
    if len(numbers) > 1:
        raise ValueError(
            f"strategy {strategy!r}: inputs are cut into {numbers[0]} and {numbers[1]} parts: all "
            "inputs are cut into one number of parts, or into 1"
        )
    most = max(map(len, strategy))
    of_largest = max(
        number for cuts, number in zip(strategy, parts, strict=True) if len(cuts) == most
    )
    if numbers and of_largest != numbers[0]:
        raise ValueError(
            f"strategy {strategy!r}: the input with most dimensions, {most}, must be cut into the "
            f"most parts: it is cut into {of_largest}, another one into {numbers[0]}"
        )


def parse_patches(strategy: Strategy, patches: object, dims: object) -> Patches:
    """Return the patches. Raises `TypeError` and `ValueError` as `parse` does."""
    if strategy != DATA_PARALLEL:
        raise ValueError(
            f"patches={patches!r} and strategy {strategy!r} both say how inputs are cut: give one"
        )
    rows, columns = _two_ints("patches", patches)
    first, second = _two_ints("patch_dims", dims)
    if rows < 1 or columns < 1:
        raise ValueError(f"patches={patches!r}: an image has 1 or more rows and columns of them")
    if first == second:
        raise ValueError(f"patch_dims={dims!r}: height and width are two dimensions")
    return Patches(rows, columns, (first, second))


def _two_ints(what: str, value: object) -> tuple[int, int]:
    if (
        not isinstance(value, tuple)
        or len(value) != 2
        or any(not isinstance(each, int) or isinstance(each, bool) for each in value)
    ):
        raise TypeError(f"{what} are two ints, of the height and of the width, not {value!r}")
    return value


def _check_ranks(what: str, parts: int, ranks: int) -> None:
    if ranks % parts:
        raise ValueError(
            f"{what}: {parts} parts do not divide {ranks} ranks, so that some parts would count "
            "more often than others"
        )


def plan(
    strategy: Strategy, shapes: Sequence[Shape], ranks: int, rank: int
) -> list[tuple[Part, ...]]:
    """Return, for each input, the parts of its dimensions that `rank` takes; () is all of it.

    Raises `ValueError` where the inputs do not fit the strategy: their number, their dimensions, or
    a size that cannot be divided; and where the number of parts does not divide the ranks.
    """
    if strategy == FULL_BATCH:
        return [()] * len(shapes)
    if isinstance(strategy, str):
        if not all(shapes):
            raise ValueError(
                "strategy 'data_parallel': an input of shape () has no batch dimension. Give a "
                "tuple of cuts, with () for this input"
            )
        cuts: Sequence[Sequence[int]] = [(ranks, *(1 for _ in shape[1:])) for shape in shapes]
    else:
        cuts = strategy
        _check_ranks(f"strategy {strategy!r}", max(map(math.prod, cuts)), ranks)
        if len(strategy) != len(shapes):
            raise ValueError(
                f"strategy {strategy!r} has {len(strategy)} inputs, the batch has {len(shapes)}, "
                f"of shapes {[_text(shape) for shape in shapes]}"
            )
    planned = []
    for number, (counts, shape) in enumerate(zip(cuts, shapes, strict=True)):
        if len(counts) != len(shape):
            raise ValueError(
                f"strategy {strategy!r}: input {number} has {len(counts)} dimensions there, and "
                f"{len(shape)} in the batch, where its shape is {_text(shape)}"
            )
        cut = [Part(dim, count, rank % count) for dim, count in enumerate(counts) if count > 1]
        for part in cut:
            check_size(f"strategy {strategy!r}", number, shape, part)
        planned.append(tuple(cut))
    return planned


def plan_patches(
    patches: Patches, shapes: Sequence[Shape], ranks: int, rank: int
) -> list[tuple[Part, ...]]:
    """Return, for each input, the parts that `rank` takes of an image; () is all of it.

    Inputs of 3 and more dimensions are images; all others are whole. Patches are numbered row by
    row. Raises `ValueError` as `plan` does.
    """
    what = f"patches=({patches.rows}, {patches.columns})"
    _check_ranks(what, patches.parts, ranks)
    row, column = divmod(rank % patches.parts, patches.columns)
    planned: list[tuple[Part, ...]] = []
    for number, shape in enumerate(shapes):
        if len(shape) < 3:
            planned.append(())
            continue
        cut = []
        for dim, count, index in zip(
            patches.dims, (patches.rows, patches.columns), (row, column), strict=True
        ):
            if not -len(shape) <= dim < len(shape):
                raise ValueError(
                    f"{what}: input {number} of shape {_text(shape)} has no dimension {dim}"
                )
            part = Part(dim % len(shape), count, index)
            check_size(what, number, shape, part)
            if count > 1:
                cut.append(part)
        planned.append(tuple(cut))
    if not any(len(shape) >= 3 for shape in shapes):
        raise ValueError(
            f"{what}: no input is an image, which has 3 or more dimensions; the shapes are "
            f"{[_text(shape) for shape in shapes]}"
        )
    return planned


def check_size(what: str, number: int, shape: Shape, part: Part) -> None:
    """Raise `ValueError` unless the dimension can be divided; one of unknown size may be."""
    size = shape[part.dim]
    if size is not None and size % part.parts:
        raise ValueError(
            f"{what}: input {number} of shape {_text(shape)} cannot be cut into {part.parts} equal "
            f"parts along dimension {part.dim}, whose size is {size}. Drop the last batch where it "
            "is smaller, or pad"
        )


def _text(shape: Shape) -> str:
    return str(tuple(shape)).replace("None", "?")
