"""The file in which segmentations that were learned wait for the next run, one for each model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvdlite.common.segmentation.boundaries import check_ends, pasted
from hvdlite.common.segmentation.strategies import Gradient

log = logging.getLogger("hvdlite")

FORMAT = "hvdlite segmentation"
VERSION = 1
MOST_MODELS = 16  # in one file


def save(path: str, ends: Sequence[int], gradients: Sequence[Gradient]) -> None:
    """Write what was learned for these gradients; who reads at the same time sees all or nothing.

    A file that cannot be written is warned of: training goes on without.
    """
    model = {
        "gradients": len(gradients),
        "bytes": _bytes(gradients),
        "ends": list(ends),
        "paste": pasted(ends, gradients),
    }
    try:
        models = _models(_read(path))  # a script may have several optimizers
    except (OSError, ValueError):
        models = {}
    models.pop(digest(gradients), None)
    kept = dict([*models.items()][-MOST_MODELS + 1 :])
    content = {
        "format": FORMAT,
        "version": VERSION,
        "models": {**kept, digest(gradients): model},
    }
    try:
        _replace(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        log.warning("the segmentation that was learned cannot be kept in %s: %s", path, error)


def load(path: str, gradients: Sequence[Gradient]) -> list[int] | None:
    """The ends that were learned for these gradients; None, and tuning begins anew, without.

    A file that is not there is as good as empty. Any other that gives nothing is warned of: it
    cannot be read, is no such file, or belongs to another model.
    """
    try:
        return _ends(_models(_read(path)), gradients)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used, and tuning begins anew: %s", path, error)
        return None


def digest(gradients: Sequence[Gradient]) -> str:
    """What tells models apart: names, bytes and dtypes, in their order."""
    listed = json.dumps([list(each) for each in gradients])
    return hashlib.sha256(listed.encode()).hexdigest()


def _read(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _models(content: Any) -> dict[str, Any]:
    """By digest, that which was learned last at the end. Raises `ValueError` for other content."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it holds no segmentation that hvdlite has learned")
    if content.get("version") != VERSION:
        raise ValueError(f"it has version {content.get('version')!r}, not {VERSION}")
    models = content.get("models")
    if not isinstance(models, dict) or not all(isinstance(each, dict) for each in models.values()):
        raise ValueError(f"models: {models!r} are none")
    return models


def _ends(models: dict[str, Any], gradients: Sequence[Gradient]) -> list[int]:
    model = models.get(digest(gradients))
    if model is None:
        others = ", ".join(
            f"of {each.get('gradients')} gradients and {each.get('bytes')} bytes"
            for each in models.values()
        )
        raise ValueError(
            f"it was learned for another model ({others}); this one has {len(gradients)} gradients "
            f"and {_bytes(gradients)} bytes, other names, or another order"
        )
    ends = model.get("ends")
    if not isinstance(ends, list) or not all(type(end) is int for end in ends):
        raise ValueError(f"ends: {ends!r} is no list of whole numbers")
    check_ends(ends, gradients)
    return ends


def _bytes(gradients: Sequence[Gradient]) -> int:
    return sum(each.bytes for each in gradients)


def _replace(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}.new"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
