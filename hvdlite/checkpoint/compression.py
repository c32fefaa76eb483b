"""What an optimizer remembers of compressed gradients, in a checkpoint; see `FeedbackState`.

What a rank has not sent is its own: the checkpoint has that of all ranks as one tensor, with a row
for each. A load by as many ranks gives each rank its row. By others it leaves them what they have,
as the row of another rank may count once only, and gives them what all ranks share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.checkpoint.job import place
from hvdlite.checkpoint.manifest import Manifest
from hvdlite.common.layouts.layout import WHOLE, Layout
from hvdlite.common.tensors.adapter import numpy_dtype

KEY = "compression"  # in the tree of an optimizer
Layouts = dict[str, Layout]


def described(
    saved: Mapping[str, Any], manifest: Manifest | None, prefix: str
) -> tuple[dict[str, Any], Layouts]:
    """Return entries of an optimizer's tree, and the layouts of tensors in them by their names.

    `saved` is what `FeedbackState.save` returns now, or nothing; `manifest` and `prefix` are those
    of the optimizer's `Context`. There are none before the first step, nor where the checkpoint
    has none.
    """
    ranks = place()[1]
    tree: dict[str, Any] = {}
    if saved and manifest is not None:
        tree = _to_load(manifest, f"{prefix}{KEY}.", ranks)
    elif saved and saved["steps"]:
        rows = {name: each[None] for name, each in saved["residuals"].items()}
        steps = [[name, count] for name, count in saved["steps"].items()]
        tree = {"by": saved["compression"], "steps": steps, "factors": dict(saved["factors"])}
        tree["residuals"] = rows
    tree = {name: each for name, each in tree.items() if each != {}}
    layouts = {
        f"{KEY}.residuals.{name}": Layout((ranks,), (0, *(WHOLE for _ in row.shape[1:])))
        for name, row in tree.get("residuals", {}).items()
    }
    return {KEY: tree} if tree else {}, layouts


def _to_load(manifest: Manifest, prefix: str, ranks: int) -> dict[str, Any]:
    if f"{prefix}by" not in manifest.values:
        return {}
    tree: dict[str, Any] = {"by": "", "steps": [], "factors": {}, "residuals": {}}
    for name, record in manifest.tensors.items():
        if not name.startswith(prefix):
            continue
        kind, _, key = name.removeprefix(prefix).partition(".")
        shape = record.shape
        if kind == "residuals":
            if shape[0] != ranks:
                continue
            shape = (1, *shape[1:])
        tree[kind][key] = np.zeros(shape, numpy_dtype(record.dtype))
    return tree


def uncommon(facts: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the names of what is to be left out of a save, given the facts of all ranks.

    That is what some ranks have not sent of a tensor while others have nothing of it: those that
    have come to a job later, or have loaded another state, until they have made a step.
    """
    names = {name for each in facts for name in each if f"{KEY}.residuals." in name}
    return {name for name in names if len({each.get(name) for each in facts}) > 1}


def restored(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `FeedbackState.load` takes, of entries that have been loaded."""
    rows = loaded.get("residuals", {})
    return {
        "compression": loaded["by"],
        "steps": dict(loaded["steps"]),
        "factors": loaded.get("factors", {}),
        "residuals": {name: each[0] for name, each in rows.items()},
        "owner": "",
        "place": [*place()] if rows else [],
    }
