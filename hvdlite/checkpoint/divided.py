"""Objects whose state is divided among the ranks: it is gathered before a save or a load.

A checkpoint then has the same tensors as that of an object whose state is whole, and fits any
number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdlite.checkpoint.job import check_same, together
from hvdlite.checkpoint.tensors import Tensors


def gathered(what: str, state: Any, tensors: Tensors) -> Tensors:
    """Return `tensors` with the whole state of each object that is divided; all ranks take part.

    `what` is the call and its folder. Raises `ValueError` for a part that stands alone, and
    `HorovodInternalError` where ranks have divided objects under other names.
    """
    found: dict[str, Callable[[], Any]] = {}
    things: dict[str, Any] = {}

    def look() -> bytes:
        for name, thing in _things(state, ""):
            gather = tensors.gather_of(thing, name)
            if gather is not None:
                found[name], things[name] = gather, thing
        return repr(sorted(found)).encode()

    digests = together(what, look)
    check_same(what, dict.fromkeys(found, "a state that is divided among ranks"), digests)
    if not found:
        return tensors
    result = copy.copy(tensors)
    result.whole = {id(things[name]): found[name]() for name in sorted(found)}
    return result


def _things(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all that a state holds, on every level, with the names."""
    yield name or "the state", tree
    prefix = f"{name}." if name else ""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _things(value, f"{prefix}{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _things(value, f"{prefix}{index}")
