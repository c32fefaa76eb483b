"""The names of what a state holds: nested dicts and lists of tensors, values and owners."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hvdlite.checkpoint.job import check_same, together
from hvdlite.checkpoint.manifest import Manifest
from hvdlite.checkpoint.tensors import Context, Owner, Tensors
from hvdlite.common.layouts.layout import Layout
from hvdlite.common.settings.config import closest

T = TypeVar("T")
MISSING = object()


def expand(state: Any, tensors: Tensors, manifest: Manifest | None) -> Any:
    """Return the state with each object that owns tensors replaced by an `Owner`.

    Raises `TypeError` if the state itself is neither a dict nor such an object.
    """
    expanded = _expand(state, "", tensors, state, manifest)
    if not isinstance(expanded, (dict, Owner)):
        raise TypeError(
            f"a state is a dict, or an object with tensors such as a model, not "
            f"{type(state).__name__}"
        )
    return expanded


def _expand(tree: Any, name: str, tensors: Tensors, state: Any, manifest: Manifest | None) -> Any:
    if tensors.is_tensor(tree):
        return tree
    # Before it is looked at as a dict or a list: it may be one that cannot be changed.
    owner = tensors.owner(tree, Context(state, f"{name}." if name else "", manifest))
    if owner is not None:
        owner.expanded = _expand(owner.tree, name, tensors, state, manifest)
        return owner
    if isinstance(tree, Mapping):
        return {
            key: _expand(value, join(name, key), tensors, state, manifest)
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return [
            _expand(value, join(name, index), tensors, state, manifest)
            for index, value in enumerate(tree)
        ]
    return tree


def leaves(tree: Any, tensors: Tensors, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and the other values of an expanded state, with their names.

    A list without a tensor in it is one value. Raises `ValueError` for two of one name.
    """
    seen: set[str] = set()
    for path, leaf in _leaves(tree, tensors, name):
        if path in seen:
            raise ValueError(f"two entries of the state have the name {path!r}: rename one")
        seen.add(path)
        yield path, leaf


def _leaves(tree: Any, tensors: Tensors, name: str) -> Iterator[tuple[str, Any]]:
    tree = tree.expanded if isinstance(tree, Owner) else tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, tensors, join(name, key))
    elif isinstance(tree, list) and has_tensor(tree, tensors):
        for index, value in enumerate(tree):
            yield from _leaves(value, tensors, join(name, index))
    else:
        yield name, tree


def has_tensor(tree: Any, tensors: Tensors) -> bool:
    """Return whether there is a tensor, or an object that may have some, in an expanded state."""
    if isinstance(tree, Owner):
        return True
    if isinstance(tree, dict):
        return any(has_tensor(value, tensors) for value in tree.values())
    if isinstance(tree, list):
        return any(has_tensor(value, tensors) for value in tree)
    return tensors.is_tensor(tree)


def fill(
    original: Any, tree: Any, found: Mapping[str, Any], tensors: Tensors, name: str = ""
) -> Any:
    """Return the `original` state with the values that were `found`, by their names.

    Dicts and lists are changed in place. `tree` is the expanded state.
    """
    if isinstance(tree, Owner):
        installed = tree.install(fill(tree.tree, tree.expanded, found, tensors, name))
        return installed if tree.is_replaced else original
    if isinstance(tree, dict):
        for key, value in tree.items():
            original[key] = fill(original[key], value, found, tensors, join(name, key))
        return original
    if isinstance(tree, list) and has_tensor(tree, tensors):
        filled = [
            fill(original[index], value, found, tensors, join(name, index))
            for index, value in enumerate(tree)
        ]
        if isinstance(original, tuple):
            return tuple(filled)
        original[:] = filled
        return original
    value = found.get(name, MISSING)
    if value is MISSING:
        return original
    return value if tensors.is_tensor(original) else _like(original, value)


def _like(original: Any, value: Any) -> Any:
    """Return a value of JSON with tuples and enums where the original has them."""
    if isinstance(original, enum.Enum) and type(value) is type(original.value):
        return type(original)(value)
    if isinstance(original, (list, tuple)) and isinstance(value, list):
        is_alike = len(original) == len(value)
        if is_alike:
            value = [_like(a, b) for a, b in zip(original, value, strict=True)]
        if is_alike and hasattr(original, "_fields"):
            return type(original)(*value)
        return tuple(value) if isinstance(original, tuple) else value
    if isinstance(original, dict) and isinstance(value, dict):
        return {key: _like(original.get(key), each) for key, each in value.items()}
    return value


def empty_dicts(
    tree: Any, name: str = "", beside: Container[Any] = ()
) -> Iterator[tuple[str, bool]]:
    """Yield the names of the dicts of an expanded state in which there is nothing.

    And whether each may be the state of an optimizer, by what is `beside` it.
    """
    tree = tree.expanded if isinstance(tree, Owner) else tree
    if isinstance(tree, dict):
        if not tree and name:
            yield name, name.rpartition(".")[2] == "state" and "param_groups" in beside
        for key, value in tree.items():
            yield from empty_dicts(value, join(name, key), tree)


def of_owners(
    tree: Any, what: Callable[[Owner], Mapping[str, T]], name: str = ""
) -> Iterator[tuple[str, T]]:
    """Yield what owners say of their tensors, with the names of these in the state."""
    if isinstance(tree, Owner):
        for key, other in what(tree).items():
            yield join(name, key), other
        tree = tree.expanded
    if isinstance(tree, (dict, list)):
        children = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for child, value in children:
            yield from of_owners(value, what, join(name, child))


def join(name: str, key: Any) -> str:
    """Return the name of what is under a key."""
    return f"{name}.{key}" if name else str(key)


def check_value(value: Any, name: str) -> None:
    """Raise `TypeError` for a value that JSON cannot hold."""
    if isinstance(value, (list, tuple)):
        for each in value:
            check_value(each, name)
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name!r} has a dict with the key {key!r}: JSON has only strings")
            check_value(each, name)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}, which is neither a tensor nor a value of JSON "
            "(None, bool, int, float, str, and lists and dicts of them): save it otherwise"
        )


def gathered(what: str, state: Any, tensors: Tensors) -> Tensors:
    """Return `tensors` with the whole state of each object that is divided; all ranks take part.

    `what` is the call and its folder. Raises `ValueError` for a part that stands alone, and
    `HorovodInternalError` where ranks have divided objects under other names.
    """
    found: dict[str, Callable[[], Any]] = {}
    things: dict[str, Any] = {}

    def look() -> bytes:
        for name, thing in _things(state, "", tensors):
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


def _things(
    tree: Any, name: str, tensors: Tensors, around: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield all that a state holds, on every level, with the names.

    Raises `ValueError` for a dict or list that is also `around` itself.
    """
    if any(tree is each for each in around):
        raise ValueError(f"{name!r} is a dict or list that contains itself: take it out of there")
    yield name or "the state", tree
    if isinstance(tree, Mapping):
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    else:
        children = tensors.parts(tree).items()
    for key, value in children:
        yield from _things(value, join(name, key), tensors, (*around, tree))


# The layouts that a user gives for the tensors of a state, and what follows from them.


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
    tree: Any,
    ranks: int,
) -> dict[str, Layout]:
    """Return the layouts of the tensors of a state that have one, or for which one is given.

    `tree` is the expanded state, and `kinds` has dtypes and local shapes by name. A tensor of an
    optimizer with the local shape of its parameter has the layout of that. Raises as
    `flat_layouts`, and `ValueError` for a name that is not in the state, or a layout for another
    number of ranks.
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
        for name, other in of_owners(tree, lambda owner: owner.follows)
        if other in given and name in kinds and kinds[name][1] == kinds[other][1]
    }
    return {**dict(of_owners(tree, lambda owner: owner.layouts)), **follows, **given}


def hint(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return a question about which of the `known` names was meant, or how they begin."""
    found = closest(name, list(known))
    if found or not known:
        return found
    names = [repr(each) for each in list(known)[:5]]
    return f"; there are {', '.join(names)}{', ...' if len(known) > len(names) else ''}"
