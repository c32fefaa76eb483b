"""Marks every test by what it needs, from the folder or the module that it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MPI_FOLDERS = {"parallel", "launcher", "hosts"}
HOSTS_FOLDERS = {"hosts", "slurm"}
FRAMEWORKS = {
    "keras": os.environ.get("KERAS_BACKEND", "tf"),
    "ray": "ray",
    "spark": "spark",
    "tf": "tf",
    "torch": "torch",
}


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Add the markers `mpi`, `hosts`, `slurm`, `ray`, `spark`, `tf` and `torch`."""
    for item in items:
        for marker in markers(item.path.relative_to(TESTS)):
            item.add_marker(marker)


def markers(path: Path) -> Iterator[str]:
    """Yield the markers of the tests in a file, whose path is relative to this folder."""
    folders = set(path.parts[:-1])
    if folders & MPI_FOLDERS:
        yield "mpi"
    yield from sorted(folders & HOSTS_FOLDERS)
    words = folders | set(path.stem.split("_"))
    for framework in sorted({marker for word, marker in FRAMEWORKS.items() if word in words}):
        yield {"tensorflow": "tf"}.get(framework, framework)
