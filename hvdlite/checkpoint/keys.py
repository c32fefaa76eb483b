"""The keys of dicts and lists that lead to an entry of an object's state.

Names join keys with dots: they do not tell the key 3 from "3" and from a place in a list, nor
"fc.weight" from "weight" in "fc". An object gets its whole state from the checkpoint, also what it
has not held so far, so a save writes the keys of such entries down beside their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hvdlite.checkpoint import trees
from hvdlite.checkpoint.manifest import Keys, Place
from hvdlite.checkpoint.tensors import Owner, Tensors

# Identifiers that are also how Python writes other keys.
_NAMES_OF_OTHERS = frozenset({"None", "True", "False", "nan", "inf"})


def to_save(tree: Any, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Keys]]:
    """Return what a save writes of an expanded state, and the keys of entries; both by name.

    Empty dicts in the states of objects are among the values. Raises `TypeError` for a value that
    JSON cannot hold, and `ValueError` for two entries of one name.
    """
    entries = dict(trees.leaves(tree, tensors))
    keys: dict[str, Keys] = {}
    for name, path, entry in _of_objects(tree, tensors, "", None):
        if isinstance(entry, dict) and entries.setdefault(name, entry) is not entry:
            raise ValueError(f"two entries of the state have the name {name!r}: rename one")
        keys_of_json = tuple(key.item() if isinstance(key, np.generic) else key for key in path)
        first = path[0] if len(path) == 1 else None
        is_plain = isinstance(first, str) and first.isidentifier()
        is_told_by_name = is_plain and first not in _NAMES_OF_OTHERS
        if not is_told_by_name and all(
            key is None or isinstance(key, (str, int, float, Place)) for key in keys_of_json
        ):
            keys[name] = keys_of_json
    for name, entry in entries.items():
        if not tensors.is_tensor(entry):
            trees.check_value(entry, name)
    return entries, keys


def _of_objects(
    tree: Any, tensors: Tensors, name: str, path: Keys | None
) -> Iterator[tuple[str, Keys, Any]]:
    """Yield names, keys and entries in the states of objects, with the dicts that are empty.

    `path` has the keys from the state of the outermost object on; None: not in one yet.
    """
    if isinstance(tree, Owner):
        if not tree.takes_all:
            return
        tree, path = tree.expanded, path or ()
    if isinstance(tree, dict) and (tree or not path):
        for key, value in tree.items():
            deeper = None if path is None else (*path, key)
            yield from _of_objects(value, tensors, trees.join(name, key), deeper)
    elif isinstance(tree, list) and trees.has_tensor(tree, tensors):
        for index, value in enumerate(tree):
            deeper = None if path is None else (*path, Place(index))
            yield from _of_objects(value, tensors, trees.join(name, index), deeper)
    elif path:
        yield name, path, tree


def nested(
    names: Iterable[str], prefix: str, own: Any, written: Mapping[str, Keys]
) -> dict[Any, Any]:
    """Return names that begin with a prefix, in nested dicts by the keys that follow it.

    Where the checkpoint has not `written` the keys, they are those of `own` that make such a name.
    """
    found: dict[Any, Any] = {}
    spelled: dict[int, dict[str, Any]] = {}
    # A name that continues another one comes after it.
    for name in sorted(names, key=lambda each: each.count(".")):
        rest = name.removeprefix(prefix)
        path = written.get(name, ())
        while path and ".".join(map(str, path)) != rest:  # The first may be of an outer object.
            path = path[1:]
        *keys, last = path or _by_name(rest, own, spelled)
        at = found
        for count, key in enumerate(keys):
            if not isinstance(at.setdefault(key, {}), dict):
                last = ".".join(map(str, (*keys[count:], last)))
                break
            at = at[key]
        at[last] = name
    return found


def _by_name(rest: str, own: Any, spelled: dict[int, dict[str, Any]]) -> Keys:
    """Return keys that make a name: those of `own` where it has them.

    `spelled` has the keys of dicts by how they are in names, by the ids of the dicts, and grows.
    """
    keys: list[Any] = []
    parts = rest.split(".")
    while parts:
        if isinstance(own, Mapping) and id(own) not in spelled:
            spelled[id(own)] = {str(key): key for key in own}
        held = spelled[id(own)] if isinstance(own, Mapping) else {}
        # The longest key first, as a key may have dots.
        ends = range(len(parts), 0, -1)
        end = next((each for each in ends if ".".join(parts[:each]) in held), None)
        if end is not None:
            key = held[".".join(parts[:end])]
            own = own[key]
        else:
            key = _guessed(parts[0], own)
            is_held = isinstance(own, (list, tuple)) and isinstance(key, Place)
            own = own[key.index] if is_held and key.index < len(own) else None
        keys.append(key)
        parts = parts[end or 1 :]
    return tuple(keys)


def _guessed(part: str, own: Any) -> Any:
    """Return a key of which there is only the name: a number beside numbers, and in a list."""
    if not part.isdecimal() or str(int(part)) != part:
        return part
    if not isinstance(own, Mapping):
        return Place(int(part))
    return int(part) if own and all(type(key) is int for key in own) else part
