"""Nested dicts, lists and tuples: how state is made of its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with each leaf replaced by ``change(leaf)``; containers are new ones.

    Containers keep their classes and attributes. Leaves come in the order of the containers.
    """
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(value, change)
        return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[map_leaves(value, change) for value in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_leaves(value, change) for value in tree])
    return change(tree)


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return all leaves with names that say where they are: ``name.key.0``."""
    if isinstance(tree, dict):
        children = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        children = list(enumerate(tree))
    else:
        return [(name, tree)]
    return [leaf for key, child in children for leaf in named_leaves(child, f"{name}.{key}")]
