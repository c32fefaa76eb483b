"""hvdlite answers to the name horovod, so that a script for Horovod runs as it is.

``hvdlite-run --as-horovod -np 4 python train.py``, or ``python -m hvdlite.as_horovod train.py``
(also ``-m module`` and ``-c code``). ``horovod.torch`` then *is* ``hvdlite.torch``. It works
through a ``sitecustomize`` in PYTHONPATH, hence in child processes, too; one that was there before
still runs. This module is imported at the start of every such process and must stay cheap.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from hvdlite.module_aliases import SameModule, exists

HOROVOD = "horovod"
SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "drop_in")
# Modules of Horovod that are only a part of a module here, or have the name that they have there.
PARTS = {
    "tensorflow": [
        "compression",
        "functions",
        "gradient_aggregation",
        "gradient_aggregation_eager",
        "mpi_ops",
        "sync_batch_norm",
        "util",
    ],
    "torch": ["compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"],
}
# Which modules of hvdlite answer for one of Horovod: the first that is there. All modules that are
# not named here have the same name in hvdlite.
NAMES = {
    "horovod": ["hvdlite"],
    "horovod.runner": ["hvdlite.launcher"],
    **{
        f"horovod.{package}.{part}": [f"hvdlite.{package}.{part}", f"hvdlite.{package}"]
        for package, parts in PARTS.items()
        for part in parts
    },
}


class Finder:
    """Finds ``horovod`` and everything below it, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Horovod; `ModuleNotFoundError` if we lack it."""
        if fullname.partition(".")[0] != HOROVOD:
            return None
        own = _own_name(fullname)
        if own is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: hvdlite, which answers to the name horovod here, "
                "has nothing like it",
                name=fullname,
            )
        return ModuleSpec(fullname, SameModule(own))


def _own_name(fullname: str) -> str | None:
    same = "hvdlite" + fullname.removeprefix(HOROVOD)
    for name in NAMES.get(fullname, [same]):
        if exists(name):
            return name
    return None


def install() -> None:
    """Answer to the name horovod in this process, also where Horovod itself is installed."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def active() -> bool:
    """Return whether this process has imported hvdlite under the name horovod."""
    return sys.modules.get(HOROVOD) is sys.modules.get("hvdlite", sys)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to `environ` so that Python processes answer to the name horovod."""
    before = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {"PYTHONPATH": os.pathsep.join([SITE, *(part for part in before if part != SITE)])}


def main() -> None:
    """Become ``python <arguments>`` with the name answered to."""
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit(
            "usage: python -m hvdlite.as_horovod train.py [arguments]  (or -m module, -c code)"
        )
    if sys.flags.ignore_environment:
        sys.exit("hvdlite.as_horovod: python -E and -I ignore PYTHONPATH, which this needs")
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments) - 2]  # those before -m
    environ = {**os.environ, **environment(os.environ)}
    os.execve(sys.executable, [sys.executable, *flags, *arguments], environ)


if __name__ == "__main__":
    main()
