"""In which order a server sends answers to requests that were here at the same time.

Values come last, those of the table that was declared first before those of others: it has the
layers with which the next step of a worker begins. All other answers are sent at once.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hvdlite.ps.connections.messages import Answer


def by_priority(answers: Iterable[Answer], key_of: Callable[[str], int]) -> Iterator[Answer]:
    """Yield answers in the order in which they are sent; `key_of` returns a table's first key."""
    values = []
    for answer in answers:
        if answer.message.kind == "values":
            values.append(answer)
        else:
            yield answer
    yield from sorted(values, key=lambda answer: key_of(answer.message.table))
