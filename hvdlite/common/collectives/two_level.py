"""Rings in two levels: around a row of near members, and from row to row.

The members stand in a table, row by row. With 6 members in 2 rows of 3, and 6 blocks, of which each
member of a row has a chunk of 2:

    0 1 2     rows: 0 -> 1 -> 2 -> 0 and 3 -> 4 -> 5 -> 3
    3 4 5     columns: 0 -> 3 -> 0, 1 -> 4 -> 1 and 2 -> 5 -> 2

    round                         member 0 sends   to    and gets     from
    0  around the row             blocks 0 1       1     4 5 added    2
    1                             blocks 4 5       1     2 3 added    2     2 3 are its chunk
    2  around the column          block 2          3     3   added    3     3 is finished
    3                             block 3          3     2   copied   3
    4  around the row             blocks 2 3       1     0 1 copied   2
    5                             blocks 0 1       1     4 5 copied   2

Price, of S bytes in a table of R rows and C columns: 2 (C-1) + 2 (R-1) messages, and 2 (N-1)/N S
bytes, the least there is; only 2 (R-1)/R S/C of them go from row to row. Four peers. A table of one
row is the ring of `ring`, which is also what remains if N is a prime number.
"""

from __future__ import annotations

from hvdlite.common.collectives.between_hosts.schedules import Move, Round, Schedule


def columns_of(size: int) -> int:
    """Return the length of a row: the least divisor of `size` whose square is not below it."""
    return next(each for each in range(1, size + 1) if size % each == 0 and each**2 >= size)


def two_level(size: int, index: int) -> Schedule:
    """Return the schedule of member `index` of `size`: a block for each member."""
    return rings(size, index, columns_of(size))


def rings(size: int, index: int, columns: int) -> Schedule:
    """Return the schedule in rows of `columns` members, which divides `size`."""
    rows = size // columns
    row, column = divmod(index, columns)
    first = row * columns

    def around_row(chunk: int, partial: bool) -> Round:
        """Send a chunk to the next member of the row, and get the one before it."""
        chunk %= columns
        before = (chunk - 1) % columns
        return Round(
            (Move(first + (column + 1) % columns, chunk * rows, (chunk + 1) * rows, partial),),
            (Move(first + (column - 1) % columns, before * rows, (before + 1) * rows, partial),),
        )

    start = (column + 1) % columns * rows  # the chunk of this column

    def around_column(block: int, partial: bool) -> Round:
        at, before = start + block % rows, start + (block - 1) % rows
        return Round(
            (Move((index + columns) % size, at, at + 1, partial),),
            (Move((index - columns) % size, before, before + 1, partial),),
        )

    reduce = [around_row(column - step, True) for step in range(columns - 1)]
    reduce += [around_column(row - step, True) for step in range(rows - 1)]
    gather = [around_column(row + 1 - step, False) for step in range(rows - 1)]
    gather += [around_row(column + 1 - step, False) for step in range(columns - 1)]
    if reduce:
        own = start + (row + 1) % rows
        reduce[-1] = reduce[-1]._replace(finished=((own, own + 1),))
    return Schedule(tuple(range(size)), (*reduce, *gather), rows if columns > 1 else 1)
