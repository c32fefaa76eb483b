"""layout.json: what a checkpoint holds, and how each tensor was cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.checkpoint.folder import MANIFEST
from hvdlite.common.layouts.layout import Layout

FORMAT, VERSION = "hvdlite", 1


@dataclass(frozen=True)
class Record:
    """One tensor of a checkpoint. `sha256` has one digest for each rank that wrote a part."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: str
    sha256: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}, {self.layout}"


@dataclass(frozen=True)
class Manifest:
    """All tensors and values of a checkpoint, and its files in the order of the ranks."""

    files: tuple[Path, ...]
    tensors: Mapping[str, Record]
    values: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """The names of all tensors and values."""
        return [*self.tensors, *self.values]


def write(manifest: Manifest, folder: Path) -> None:
    """Write layout.json into a folder."""
    tensors = {
        name: {
            "device_matrix": record.layout.device_matrix,
            "tensor_map": record.layout.tensor_map,
            **({"uneven": True} if record.layout.uneven else {}),
            "shape": record.shape,
            "dtype": record.dtype,
            "slices": {
                str(rank): {"file": manifest.files[rank].name, "sha256": digest}
                for rank, digest in sorted(record.sha256.items())
            },
        }
        for name, record in manifest.tensors.items()
    }
    content = {
        "format": FORMAT,
        "version": VERSION,
        "files": [path.name for path in manifest.files],
        "tensors": tensors,
        "values": manifest.values,
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Manifest:
    """Read a layout.json.

    Raises `FileNotFoundError` where there is none, and `ValueError` for one that is damaged or of
    a later version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint: {path} does not exist")
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"version {content['version']} of {content['format']!r} is unknown")
        return Manifest(
            tuple(path.parent / name for name in content["files"]),
            {name: _record(entry) for name, entry in content["tensors"].items()},
            dict(content["values"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _record(entry: Mapping[str, Any]) -> Record:
    layout = Layout(entry["device_matrix"], entry["tensor_map"], entry.get("uneven", False))
    layout.check_shape(entry["shape"])
    digests = {int(rank): part["sha256"] for rank, part in entry["slices"].items()}
    return Record(layout, tuple(entry["shape"]), entry["dtype"], digests)
