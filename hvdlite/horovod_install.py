"""Horovod as a distribution that hvdlite provides: what pip, importlib.metadata and editors read.

The drop-in shows it to one process; ``python -m hvdlite.as_horovod --install`` writes it into an
environment, where every process answers to the name horovod:

    horovod-0.28.1.dist-info/   pip lists it, and uninstalls what its RECORD names
    hvdlite_horovod.pth         imports _hvdlite_horovod at every start of Python
    _hvdlite_horovod.py         finds horovod; a copy of drop_in/_hvdlite_horovod.py
    horovod-stubs/              for editors and type checkers, which run no finder
    bin/horovodrun              hvdlite-run --as-horovod
"""

from __future__ import annotations

import os
import py_compile
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from importlib.util import cache_from_source
from pathlib import Path

from hvdlite.missing_names import HOROVOD_VERSION

NAME = "horovod"
INSTALLER = "hvdlite"
DIST_INFO = f"{NAME}-{HOROVOD_VERSION}.dist-info"
STARTER = "_hvdlite_horovod.py"
METADATA = f"""Metadata-Version: 2.1
Name: {NAME}
Version: {HOROVOD_VERSION}
Summary: The name horovod, answered by hvdlite
Requires-Dist: hvdlite
Provides-Extra: keras
Provides-Extra: pytorch
Requires-Dist: hvdlite[torch]; extra == "pytorch"
Provides-Extra: tensorflow
Requires-Dist: hvdlite[tensorflow]; extra == "tensorflow"
Provides-Extra: tensorflow-cpu
Requires-Dist: hvdlite[tensorflow-cpu]; extra == "tensorflow-cpu"
"""
COMMAND = """\
import sys

from hvdlite.launcher.cli import main

if sys.argv[1:] in (["-v"], ["--version"]):
    sys.exit(print("{version}"))
sys.exit(main(["--as-horovod", *sys.argv[1:]]))
"""


class CannotInstallError(Exception):
    """The environment cannot answer to the name horovod; the text says why."""


class DropInDistribution(Distribution):
    """Horovod's metadata in a process that answers to its name, without files on disk."""

    def read_text(self, filename: str) -> str | None:
        """Return METADATA and INSTALLER; there is nothing else."""
        return {"METADATA": METADATA, "INSTALLER": INSTALLER}.get(str(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return where a file of the distribution would be: among hvdlite's."""
        return Path(__file__).parent.parent / path


def distributions(context: DistributionFinder.Context) -> Iterator[Distribution]:
    """Yield Horovod's metadata, where `context` asks for it or for those of all packages."""
    if context.name is None or context.name.lower() == NAME:
        yield DropInDistribution()


def install(modules: Mapping[str, str]) -> list[Path]:
    """Let every process of this environment answer to the name horovod; return where it is written.

    `modules` has, by the names of Horovod's modules, which modules of hvdlite answer; a package
    ends with a dot. Raises `CannotInstallError` if there is a real Horovod, or no permission.
    """
    _refuse_beside_horovod()
    uninstall()
    folder, scripts = _places()
    texts = dict(_texts(folder, scripts, modules))
    record = folder / DIST_INFO / "RECORD"
    lines = [f"{os.path.relpath(path, folder)},,\n" for path in [*texts, record]]
    try:
        for path, text in {record: "".join(lines), **texts}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (scripts / "horovodrun").chmod(0o755)
        py_compile.compile(str(folder / STARTER))  # every Python of this environment runs it
    except OSError as error:
        _remove(folder)
        raise CannotInstallError(
            f"{error}; use an environment that you may write to (python -m venv DIR)"
        ) from error
    return [folder, scripts]


def uninstall() -> list[Path]:
    """Take back what `install` wrote; return the folders that had it."""
    folders = [Path(path) for path in sys.path]
    found = [folder for folder in folders if _is_ours(folder / DIST_INFO)]
    for folder in found:
        _remove(folder)
    return found


def _places() -> tuple[Path, Path]:
    """Return the site-packages with hvdlite, or the interpreter's, and its folder of commands."""
    user = site.getusersitepackages()
    try:
        home = str(distribution("hvdlite").locate_file(""))
    except PackageNotFoundError:  # a checkout in PYTHONPATH
        home = ""
    if site.ENABLE_USER_SITE and home and os.path.realpath(home) == os.path.realpath(user):
        scheme = sysconfig.get_preferred_scheme("user")
        return Path(user), Path(sysconfig.get_path("scripts", scheme))
    return Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("scripts"))


# Modules whose `__all__` has that of others, which mypy reads of a literal list alone.
SHARED = "hvdlite.common.runtime.public_names"
STARS = {
    "hvdlite.keras": (SHARED,),
    "hvdlite.tf": ("hvdlite.tf.mpi_ops", SHARED),
    "hvdlite.tf.mpi_ops": (SHARED,),
    "hvdlite.torch": ("hvdlite.torch.mpi_ops", SHARED),
    "hvdlite.torch.mpi_ops": (SHARED,),
}


def _texts(folder: Path, scripts: Path, modules: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Yield the files to write, and their contents."""
    starter = Path(__file__).parent / "drop_in" / STARTER
    yield folder / STARTER, starter.read_text()
    yield folder / "hvdlite_horovod.pth", f"import {STARTER.removesuffix('.py')}\n"
    yield scripts / "horovodrun", _first_line() + COMMAND.format(version=HOROVOD_VERSION)
    for name, own in modules.items():
        file = name.replace(".", "/") + ("__init__.pyi" if name.endswith(".") else ".pyi")
        stars = (own, *STARS.get(own, ()))
        stub = "".join(f"from {module} import *\n" for module in stars)
        yield folder / file.replace(NAME, f"{NAME}-stubs", 1), stub
    yield folder / DIST_INFO / "METADATA", METADATA
    yield folder / DIST_INFO / "INSTALLER", f"{INSTALLER}\n"
    yield folder / DIST_INFO / "top_level.txt", f"{NAME}\n"


def _first_line() -> str:
    """Return the line that names the interpreter; a shell finds one that the kernel would not."""
    if " " not in sys.executable and len(sys.executable) < 125:
        return f"#!{sys.executable}\n"
    return f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"


def _refuse_beside_horovod() -> None:
    paths = [path for path in sys.path if path not in ("", os.getcwd())]
    folders = [Path(path) / entry for path in paths for entry in _entries(path)]
    real = [str(folder) for folder in folders if not _is_ours(folder)]
    spec = PathFinder.find_spec(NAME, paths)
    if spec is not None and spec.origin is not None:
        real.append(spec.origin)
    if real:
        raise CannotInstallError(
            f"Horovod is installed ({real[0]}); uninstall it (pip uninstall horovod), take another "
            "environment, or use hvdlite-run --as-horovod, which goes before it"
        )


def _entries(path: str) -> Iterable[str]:
    """Return the metadata of versions of Horovod in a folder of sys.path."""
    suffixes = (".dist-info", ".egg-info")
    names = os.listdir(path) if os.path.isdir(path) else []
    return [name for name in names if name.startswith(f"{NAME}-") and name.endswith(suffixes)]


def _is_ours(folder: Path) -> bool:
    file = folder / "INSTALLER"
    return file.is_file() and file.read_text().strip() == INSTALLER


def _remove(folder: Path) -> None:
    """Remove what the RECORD in a site-packages names, and the folders that are then empty."""
    record = folder / DIST_INFO / "RECORD"
    for line in record.read_text().splitlines() if record.is_file() else []:
        path = folder / line.split(",")[0]
        if path.suffix == ".py":
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    for name in (DIST_INFO, f"{NAME}-stubs"):
        if not any(path.is_file() for path in (folder / name).rglob("*")):
            shutil.rmtree(folder / name, ignore_errors=True)
