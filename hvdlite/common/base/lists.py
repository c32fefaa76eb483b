"""Lists, and numbers of rows, cut into parts that are as even as can be, or within a size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def split_rows(rows: int, parts: int) -> list[int]:
    """Return the sizes of `parts` nearly even parts; the first ``rows % parts`` have one more."""
    base, extra = divmod(rows, parts)
    return [base + (part < extra) for part in range(parts)]


def split_list(values: Sequence[T], parts: int) -> list[list[T]]:
    """Cut `values` into `parts` lists whose lengths differ by one at most; some may be empty.

    Raises `ValueError` unless `parts` is positive.
    """
    if parts <= 0:
        raise ValueError(f"a list cannot be split into {parts} parts: give a positive number")
    remaining = iter(values)
    return [list(islice(remaining, length)) for length in split_rows(len(values), parts)]


def split_by_bytes(
    values: Iterable[T], nbytes: Callable[[T], int], most_bytes: int
) -> Iterator[list[T]]:
    """Yield runs of neighbours that have at most so many bytes together, or are a single one."""
    run: list[T] = []
    size_bytes = 0
    for value in values:
        if run and size_bytes + nbytes(value) > most_bytes:
            yield run
            run, size_bytes = [], 0
        run.append(value)
        size_bytes += nbytes(value)
    if run:
        yield run
