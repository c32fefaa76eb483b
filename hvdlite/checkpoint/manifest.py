"""The folder of a checkpoint, and its layout.json: what it holds, and how each tensor was cut."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.common.layouts.layout import Layout
from hvdlite.common.tensors.adapter import DTYPES

# -- the folder, which is replaced as a whole

# A save writes a new folder beside the old one. It then renames the old one away, the new one to
# its place, and removes the old one. A process that is killed on the way leaves one of the two
# complete.

MANIFEST = "layout.json"
DCP_METADATA = ".metadata"
# The files that saves and consolidations write, those of DCP, and those of parameter servers.
_OWN_FILES = re.compile(
    r"layout\.json|(slices-\d+-of-\d+|model|.+\.\d+-of-\d+)\.safetensors|\.metadata|.*\.distcp"
)


class Folder:
    """A checkpoint's path, and the names that it has while it is replaced."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(
                f"the directory of a checkpoint is a path, not {type(directory).__name__}"
            )
        # A link stays a link: what it leads to is replaced.
        self.path = Path(os.path.realpath(directory))
        self.new = self.path.with_name(f".{self.path.name}.new")
        self.old = self.path.with_name(f".{self.path.name}.old")

    def prepare(self) -> None:
        """Make the new folder, empty; for one rank. Raises `ValueError` for a foreign folder."""
        if not self.path.exists() and self.old.exists():
            self.old.rename(self.path)  # A save was killed between its two renames.
        if self.path.exists():
            _check_replaceable(self.path)
        for leftover in (self.new, self.old):
            shutil.rmtree(leftover, ignore_errors=True)
        self.new.mkdir(parents=True)

    def commit(self) -> None:
        """Put the new folder in the place of the old one; for one rank."""
        _sync(self.new)
        if self.path.exists():
            self.path.rename(self.old)
        self.new.rename(self.path)
        _sync(self.path.parent)
        shutil.rmtree(self.old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the new folder; for one rank, after a failure."""
        shutil.rmtree(self.new, ignore_errors=True)

    def existing(self) -> Path:
        """Return the folder to read. Raises `FileNotFoundError` where there is no checkpoint."""
        # Often, as a save may put a checkpoint to the one name after the look at the other one.
        for path in (self.path, self.old) * 10:
            if is_checkpoint(path):
                return path
        reason = f"has no {MANIFEST}" if self.path.exists() else "does not exist"
        raise FileNotFoundError(f"there is no checkpoint: {self.path} {reason}")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder holds a complete checkpoint, of hvdlite or of PyTorch's DCP."""
    return (path / MANIFEST).is_file() or (path / DCP_METADATA).is_file()


def _check_replaceable(path: Path) -> None:
    """Raise `ValueError` where there is more than a checkpoint, or something else."""
    if not path.is_dir() or (not is_checkpoint(path) and any(path.iterdir())):
        raise ValueError(
            f"{path} exists and is no checkpoint: a save would remove what is in it; "
            "name another folder"
        )
    for each in sorted(path.iterdir()):
        if not _OWN_FILES.fullmatch(each.name) or not each.is_file():
            raise ValueError(
                f"{path} has {each.name!r} in it, which is not of the checkpoint: a save would "
                "remove it; move it, or name another folder"
            )


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk before what follows."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
class Place:
    """A place in a list, as one of the keys that lead to an entry."""

    index: int

    def __str__(self) -> str:
        return str(self.index)


Keys = tuple[Any, ...]  # None, str, int, float, bool and Place


@dataclass(frozen=True)
class Manifest:
    """All tensors and values of a checkpoint, and its files in the order of the ranks.

    `keys` has the keys of entries in the states of objects, where their names do not tell them.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, Record]
    values: Mapping[str, Any]
    keys: Mapping[str, Keys] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self.values]


def write(manifest: Manifest, folder: Path) -> None:
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
        **({"keys": keys_to_json(manifest.keys)} if manifest.keys else {}),
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Manifest:
    """Read a layout.json.

    Raises `FileNotFoundError` where there is none, and `ValueError` for one that is damaged or of
    another version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint: {path} does not exist")
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        version = content["version"]
        if version == VERSION:
            if not isinstance(content["files"], list):
                raise ValueError(f"its files are {content['files']!r}")
            files = tuple(path.parent / name for name in content["files"])
            tensors = {
                name: _record(name, entry, len(files)) for name, entry in content["tensors"].items()
            }
            keys = keys_of_json(content.get("keys", {}))
            return Manifest(files, tensors, dict(content["values"]), keys)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    raise ValueError(
        f"{path} has version {version!r} of the format, and this release of hvdlite reads "
        f"version {VERSION}: load the checkpoint by the release that saved it"
    )


def keys_to_json(keys: Mapping[str, Keys]) -> dict[str, list[Any]]:
    """Return keys as JSON has them, a place in a list as a list."""
    return {
        name: [[key.index] if isinstance(key, Place) else key for key in path]
        for name, path in keys.items()
    }


def keys_of_json(written: Mapping[str, Any]) -> dict[str, Keys]:
    """Return the keys that a checkpoint has. Raises `ValueError` for what are none."""
    keys = {
        name: tuple(Place(*key) if isinstance(key, list) else key for key in path)
        for name, path in written.items()
    }
    for name, path in keys.items():
        if not all(
            type(key.index) is int if isinstance(key, Place) else not isinstance(key, dict)
            for key in path
        ):
            raise ValueError(f"the keys of {name!r} are {written[name]!r}")
    return keys


def _record(name: str, entry: Mapping[str, Any], ranks: int) -> Record:
    """Return a tensor whose parts can be found: by whatever stands here, files are read."""
    layout = Layout(entry["device_matrix"], entry["tensor_map"], entry.get("uneven", False))
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{name!r} has the shape {shape}")
    if dtype not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {dtype!r}")
    if layout.ranks != ranks:
        raise ValueError(f"{name!r} was cut for {layout.ranks} ranks, and there are {ranks} files")
    layout.check_shape(shape)
    digests = {int(rank): part["sha256"] for rank, part in entry["slices"].items()}
    return Record(layout, shape, dtype, digests)
