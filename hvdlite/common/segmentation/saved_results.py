"""The file that keeps tuned segmentations for the next run, one for each model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvdlite.common.segmentation.strategies import Gradient, check_last_indices, split_call

log = logging.getLogger("hvdlite")

FORMAT = "hvdlite segmentation"
VERSION = 1
MOST_MODELS = 16  # in one file; the one saved least recently is dropped


def save(path: str, last_indices: Sequence[int], gradients: Sequence[Gradient]) -> None:
    """Save the tuned segmentation of these gradients.

    The file is replaced atomically: a concurrent reader sees the old content or the new one. A file
    that cannot be written is only a warning, and training goes on.
    """
    model = {
        "gradients": len(gradients),
        "bytes": _bytes(gradients),
        "ends": list(last_indices),
        "paste": split_call(last_indices, gradients),
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
    """Return the saved last indices for these gradients; None, and tuning begins anew, without.

    A missing file counts as an empty one. Any other file without usable last indices is a warning:
    it cannot be read, has another format, or belongs to another model.
    """
    try:
        return _last_indices(_models(_read(path)), gradients)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used, and tuning begins anew: %s", path, error)
        return None


def digest(gradients: Sequence[Gradient]) -> str:
    """Return the digest that identifies a model: names, bytes and dtypes in their order."""
    listed = json.dumps([list(gradient) for gradient in gradients])
    return hashlib.sha256(listed.encode()).hexdigest()


def _read(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _models(content: Any) -> dict[str, Any]:
    """Return the models by digest, the latest last; raise `ValueError` for other content."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it holds no segmentation that hvdlite has learned")
    if content.get("version") != VERSION:
        raise ValueError(f"it has version {content.get('version')!r}, not {VERSION}")
    models = content.get("models")
    if not isinstance(models, dict) or not all(
        isinstance(model, dict) for model in models.values()
    ):
        raise ValueError(f"models: {models!r} are none")
    return models


def _last_indices(models: dict[str, Any], gradients: Sequence[Gradient]) -> list[int]:
    model = models.get(digest(gradients))
    if model is None:
        others = ", ".join(
            f"of {other.get('gradients')} gradients and {other.get('bytes')} bytes"
            for other in models.values()
        )
        raise ValueError(
            f"it was learned for another model ({others}); this one has {len(gradients)} gradients "
            f"and {_bytes(gradients)} bytes, other names, or another order"
        )
    last_indices = model.get("ends")
    if not isinstance(last_indices, list) or not all(type(index) is int for index in last_indices):
        raise ValueError(f"ends: {last_indices!r} is no list of whole numbers")
    check_last_indices(last_indices, gradients)
    return last_indices


def _bytes(gradients: Sequence[Gradient]) -> int:
    return sum(gradient.bytes for gradient in gradients)


def _replace(path: str, text: str) -> None:
    path = os.path.realpath(path)  # What a symbolic link names is replaced, not the link.
    temporary = f"{path}.{os.getpid()}.new"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
