"""Builds the wheel and the sdist of this checkout: `python -m tests.wheel FOLDER`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Packages that lie elsewhere than in the wheel: `package-dir` of pyproject.toml.
MOVED = {"launcher/": "hvdlite/launcher/"}


def source_files() -> list[str]:
    """Return the files of the checkout that git does not ignore, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(output.split("\0")) if (ROOT / name).is_file())


def package_files() -> set[str]:
    """Return the files of the checkout that belong to the package, as they are named in a wheel."""
    places = {renamed(name, MOVED) for name in source_files()}
    return {place for place in places if place.startswith("hvdlite/")}


def renamed(name: str, folders: Mapping[str, str]) -> str:
    """Return the name of a file after its folder, where it is one of `folders`, was renamed."""
    for old, new in folders.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def copy_of_the_checkout(folder: Path) -> Path:
    """Copy the source files to `folder`: a build writes beside them, and takes what lies there."""
    for name in source_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a "wheel" or an "sdist" of `source`, with the setuptools of this environment."""
    program = f"import setuptools.build_meta as backend, sys; backend.build_{kind}(sys.argv[1])"
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder.resolve())],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = set(folder.iterdir()) - before
    return built


def main() -> None:
    """Build both into the folder that the command line names, and print their paths."""
    with tempfile.TemporaryDirectory() as folder:
        source = copy_of_the_checkout(Path(folder))
        for kind in ("sdist", "wheel"):
            print(build(kind, source, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
