"""The layouts that a user gives for the tensors of a state, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.common.layouts.layout import Layout
from hvdlite.common.plain.config import closest


def flat_layouts(layouts: Mapping[str, Any], prefix: str = "") -> dict[str, Layout]:
    """Return layouts by the full names of their tensors; they may be nested as the state is.

    Raises `TypeError` for what is no layout, and `ValueError` for a layout that cannot be.
    """
    if not isinstance(layouts, Mapping):
        raise TypeError(f"layouts are a dict of names and layouts, not {type(layouts).__name__}")
    flat: dict[str, Layout] = {}
    for key, value in layouts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flat_layouts(value, f"{name}."))
        elif isinstance(value, Layout):
            flat[name] = value
        elif isinstance(value, (list, tuple)) and len(value) >= 2:
            flat[name] = Layout(value[0], value[1])
        else:
            raise TypeError(
                f"the layout of {name!r} is a Layout or a list [D, M, ...], not "
                f"{type(value).__name__}"
            )
    return flat


def given_layouts(
    layouts: Mapping[str, Any] | None,
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    followed: Mapping[str, str],
    ranks: int,
) -> dict[str, Layout]:
    """Return the layouts of the tensors of a state for which one is given, or follows.

    `kinds` has dtypes and local shapes by name. A tensor of an optimizer with the local shape of
    its parameter has the layout of that. Raises as `flat_layouts`, and `ValueError` for a name that
    is not in the state, or a layout for another number of ranks.
    """
    given = flat_layouts(layouts or {})
    for name, layout in given.items():
        if name not in kinds:
            raise ValueError(
                f"a layout is given for {name!r}, which is no tensor of the state"
                f"{hint(name, kinds)}"
            )
        if layout.ranks != ranks:
            raise ValueError(
                f"the layout of {name!r} is for {layout.ranks} ranks, and the job has {ranks}: "
                f"{layout}"
            )
    follows = {
        name: given[other]
        for name, other in followed.items()
        if other in given and name in kinds and kinds[name][1] == kinds[other][1]
    }
    return {**follows, **given}


def hint(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return a question about which of the `known` names was meant, or how they begin."""
    found = closest(name, list(known))
    if found or not known:
        return found
    names = [repr(each) for each in list(known)[:5]]
    return f"; there are {', '.join(names)}{', ...' if len(known) > len(names) else ''}"
