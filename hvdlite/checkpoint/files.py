"""Files of safetensors: the parts of tensors that one rank has written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.checkpoint.manifest import Manifest
from hvdlite.common.layouts.layout import Box
from hvdlite.common.layouts.transfer import pieces, writers
from hvdlite.common.tensors.adapter import numpy_dtype

Array = NDArray[Any]


def safetensors() -> ModuleType:
    """Return the library. Raises `ImportError` that says how to install it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "checkpoints need the package safetensors: pip install 'hvdlite[checkpoint]'"
        ) from error
    return safetensors


def write(path: Path, arrays: Mapping[str, Array]) -> tuple[int, dict[str, str]]:
    """Write arrays to a new file and to the disk; return its size and a digest of each array.

    Raises `ValueError` for a dtype or a name that the format lacks, and `OSError`.
    """
    library = safetensors()
    if "__metadata__" in arrays:  # Which is written, and nothing in the file is read again.
        raise ValueError(
            "'__metadata__' is no name for a tensor in files of safetensors: rename it"
        )
    stored = {}
    for name, array in arrays.items():
        # In this machine's byte order; ascontiguousarray() would give a scalar a dimension.
        native = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        if native.dtype == np.complex128:  # Which the format does not have: two floats.
            native = np.ravel(native).view(np.float64).reshape(*native.shape, 2)
        stored[name] = native
    try:
        library.numpy.save_file(stored, path)
    except library.SafetensorError as error:
        if path.parent.is_dir():
            raise ValueError(f"{path}: {error}") from error
        raise FileNotFoundError(f"{path.parent} is not there: {error}") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, {name: _digest(array) for name, array in stored.items()}


def _digest(array: Array) -> str:
    return hashlib.sha256(np.ravel(array).view(np.uint8).data).hexdigest()


class Reader:
    """Reads parts of tensors from the files of a checkpoint, which stay open until `close`."""

    def __init__(self, manifest: Manifest, verify: bool = False) -> None:
        self._manifest = manifest
        # Whether parts of which a piece is needed are read whole, to compare their digests.
        self._verify = verify
        self._open: dict[int, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def open(self, name: str, wanted: Box) -> None:
        """Open the files of which `read` needs a part. Raises as that."""
        record = self._manifest.tensors[name]
        for source, _ in pieces(record.layout, record.shape, wanted):
            self._file(source, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._manifest.tensors[name].shape

    def read(self, name: str, wanted: Box) -> Array:
        """Return a part of a tensor as an array of its dtype.

        Raises `FileNotFoundError`, and `ValueError` for a damaged file.
        """
        record = self._manifest.tensors[name]
        shape = tuple(stop - start for start, stop in wanted)
        parts = pieces(record.layout, record.shape, wanted)
        held = writers(record.layout, record.shape)
        if len(parts) == 1 and parts[0][1] == wanted:
            (source, box) = parts[0]
            return self._piece(name, source, held[source], box).reshape(shape)
        result: Array = np.empty(shape, numpy_dtype(record.dtype))
        for source, box in parts:
            place = _within(box, wanted)
            result[place] = self._piece(name, source, held[source], box)
        return result

    def _piece(self, name: str, source: int, held: Box, box: Box) -> Array:
        """Return the piece `box` of the part `held` that a rank has written."""
        record = self._manifest.tensors[name]
        is_all = box == held
        if is_all or self._verify:
            array = self._from_file(name, source, held, None)
            if record.sha256.get(source) != _digest(array):
                raise self._damaged(source, name, "its bytes are not those that were saved")
            array = array if is_all else array[_within(box, held)]
        else:
            array = self._from_file(name, source, held, _within(box, held))
        if record.dtype == "complex128":
            array = np.ascontiguousarray(array).view(np.complex128)[..., 0]
        return array

    def _from_file(
        self, name: str, source: int, held: Box, place: tuple[slice, ...] | None
    ) -> Array:
        record = self._manifest.tensors[name]
        stored_shape = [stop - start for start, stop in held]
        stored_dtype = record.dtype
        if record.dtype == "complex128":
            stored_shape, stored_dtype = [*stored_shape, 2], "float64"
        # Before the read: this makes bfloat16 known to numpy, by whose names safetensors asks it.
        expected = numpy_dtype(stored_dtype)
        file = self._file(source, name)
        try:
            # A slice of a scalar does not exist; one of a tensor is read without the rest.
            part = file.get_slice(name)
            shape = list(part.get_shape())
            array: Array = file.get_tensor(name) if place is None else part[place]
        except safetensors().SafetensorError as error:
            raise self._damaged(source, name, str(error)) from error
        if shape != stored_shape or array.dtype != expected:
            raise self._damaged(
                source,
                name,
                f"it has {array.dtype.name} of shape {tuple(shape)} where {stored_dtype} of "
                f"shape {tuple(stored_shape)} was saved",
            )
        return array

    def _file(self, source: int, name: str) -> Any:
        if source not in self._open:
            path = self._manifest.files[source]
            if not path.is_file():
                raise FileNotFoundError(f"{path} is not there, which has a part of {name!r}")
            library = safetensors()
            try:
                self._open[source] = library.safe_open(path, "np").__enter__()
            except library.SafetensorError as error:
                raise self._damaged(source, name, str(error)) from error
        return self._open[source]

    def _damaged(self, source: int, name: str, reason: str) -> ValueError:
        return ValueError(
            f"{self._manifest.files[source]} is damaged, which has a part of {name!r}: {reason}"
        )


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a part lies within a larger one."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, outer, strict=True)
    )
