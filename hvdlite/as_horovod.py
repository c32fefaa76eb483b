"""hvdlite answers to the name horovod, so that a script for Horovod runs as it is.

``hvdlite-run --as-horovod -np 4 python train.py``, or ``python -m hvdlite.as_horovod train.py``
(also ``-m module`` and ``-c code``). ``horovod.torch`` then *is* ``hvdlite.torch``. It works
through a ``sitecustomize`` in PYTHONPATH, hence in child processes, too; one that was there before
still runs. This module is imported at the start of every such process and must stay cheap.
``python -m hvdlite.as_horovod --install`` lets all processes of an environment answer for good.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from hvdlite.missing_names import HOROVOD_VERSION, attribute_error, refuse_import
from hvdlite.module_aliases import SameModule, exists, own_name

TYPE_CHECKING = False  # that of typing, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.abc import Loader
    from importlib.metadata import Distribution, DistributionFinder
else:  # which are slow to import, and give nothing
    Loader = object

HOROVOD = "horovod"
NOTHING = "hvdlite, which answers to the name horovod here, has nothing like it"
USAGE = """usage: python -m hvdlite.as_horovod train.py [arguments]  (or -m module, -c code)
       python -m hvdlite.as_horovod --install    (all processes of this environment; also pip, IDEs)
       python -m hvdlite.as_horovod --uninstall"""
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
# The modules with the driver of elastic jobs for tools that start the workers by themselves.
RUNNER_PARTS = {
    "constants": "horovod_types",
    "discovery": "horovod_types",
    "driver": "horovod_driver",
    "registration": "horovod_types",
    "rendezvous": "horovod_driver",
    "settings": "horovod_types",
}
# Which modules of hvdlite answer for one of Horovod: the first that is there. All modules that are
# not named here have the same name in hvdlite.
NAMES = {
    "horovod.runner": ["hvdlite.launcher"],
    "horovod.runner.elastic": ["hvdlite.launcher.elastic"],
    **{
        f"horovod.runner.elastic.{part}": [f"hvdlite.launcher.elastic.{module}"]
        for part, module in RUNNER_PARTS.items()
    },
    # Workers use it, so it is no part of the launcher.
    "horovod.runner.elastic.worker": ["hvdlite.common.elastic.notification"],
    **{
        f"horovod.{package}.{part}": [f"hvdlite.{package}.{part}", f"hvdlite.{package}"]
        for package, parts in PARTS.items()
        for part in parts
    },
}
# What a real Horovod has, for editors: packages end with a dot.
STUBS = [
    "horovod.",
    "horovod.common.",
    *(f"horovod.common.{part}" for part in ("basics", "exceptions", "process_sets", "util")),
    "horovod.common.elastic.",
    "horovod.data.",
    "horovod.keras.",
    "horovod.keras.callbacks",
    "horovod.keras.elastic",
    "horovod.ray.",
    *(f"horovod.ray.{part}" for part in ("ray_logger", "runner", "worker")),
    "horovod.runner.",
    "horovod.spark.",
    "horovod.tensorflow.keras.",
    "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.elastic",
    "horovod.tensorflow.keras.elastic",
    "horovod.torch.elastic.",
    *(f"horovod.torch.elastic.{part}" for part in ("sampler", "state")),
    *(f"horovod.{package}." for package in PARTS),
    *(f"horovod.{package}.{part}" for package, parts in PARTS.items() for part in parts),
]


class HorovodFinder:
    """Finds ``horovod`` and everything below it, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Horovod, or None where hvdlite has none.

        An import of what is not there raises ModuleNotFoundError with a sentence of hvdlite.
        """
        if fullname.partition(".")[0] != HOROVOD:
            return None
        if fullname == HOROVOD:
            return ModuleSpec(fullname, Package(), is_package=True)
        own = _own_name(fullname)
        if own is None:
            refuse_import(fullname, NOTHING)
            return None
        return ModuleSpec(fullname, SameModule(own))

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        """Yield the metadata of Horovod, for ``importlib.metadata.version("horovod")``."""
        from hvdlite.horovod_install import distributions

        return distributions(context)


class Package(Loader):
    """Loads ``horovod`` itself: what ``hvdlite`` has, with the version of Horovod."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make a module object: that of hvdlite has another version."""

    def exec_module(self, module: ModuleType) -> None:
        """Lend the new module the names and the folders of hvdlite."""
        import hvdlite

        vars(module).update(
            __all__=["run"],
            __file__=hvdlite.__file__,
            __getattr__=_attribute,
            __path__=hvdlite.__path__,
            __version__=HOROVOD_VERSION,
        )


def _attribute(name: str) -> object:
    """Return what hvdlite has under this name. Raises `AttributeError` in horovod's name."""
    import hvdlite

    try:
        return getattr(hvdlite, name)
    except AttributeError:
        raise attribute_error(HOROVOD, name) from None


def _own_name(fullname: str) -> str | None:
    same = "hvdlite" + fullname.removeprefix(HOROVOD)
    for name in NAMES.get(fullname, [same]):
        if exists(name):
            return name
    return None


def install() -> HorovodFinder:
    """Answer to the name horovod in this process, also where Horovod itself is installed."""
    for finder in sys.meta_path:
        if isinstance(finder, HorovodFinder):
            return finder
    finder = HorovodFinder()
    sys.meta_path.insert(0, finder)
    return finder


def active() -> bool:
    """Return whether this process has imported hvdlite under the name horovod.

    That a finder stands ready says nothing: in an environment with --install it always does.
    """
    path = getattr(sys.modules.get(HOROVOD), "__path__", None)
    return path is not None and path is getattr(sys.modules.get("hvdlite"), "__path__", None)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add to `environ` so that Python answers to the name horovod."""
    before = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {"PYTHONPATH": os.pathsep.join([SITE, *(part for part in before if part != SITE)])}


def main() -> None:
    """Become ``python <arguments>`` with the name answered to, or change the environment."""
    arguments = sys.argv[1:]
    if arguments in (["--install"], ["--uninstall"]):
        sys.exit(_change_environment(arguments[0]))
    if not arguments or arguments[0].startswith("--"):
        sys.exit(USAGE)
    if sys.flags.ignore_environment:
        sys.exit("hvdlite.as_horovod: python -E and -I ignore PYTHONPATH, which this needs")
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments) - 2]  # those before -m
    environ = {**os.environ, **environment(os.environ)}
    os.execve(sys.executable, [sys.executable, *flags, *arguments], environ)


def _change_environment(flag: str) -> str | None:
    """Install or uninstall the drop-in; return what went wrong."""
    from hvdlite.horovod_install import CannotInstallError, install, uninstall

    try:
        if flag == "--install":
            done, folders = "installed in", install({name: _stubbed(name) for name in STUBS})
        else:
            done, folders = "removed from", uninstall()
    except (CannotInstallError, OSError) as error:
        return f"hvdlite.as_horovod: {error}"
    where = " and ".join(map(str, folders)) or "nowhere: it was not installed"
    print(f"horovod {HOROVOD_VERSION}, answered by hvdlite: {done} {where}")
    return None


def _stubbed(name: str) -> str:
    """Return the module of hvdlite that answers for one of Horovod; import no framework."""
    name = name.removesuffix(".")
    same = "hvdlite" + name.removeprefix(HOROVOD)
    names = NAMES.get(name, [same])
    return own_name(names[0] if _has_file(names[0]) else names[-1])


def _has_file(name: str) -> bool:
    own = own_name(name)
    path = os.path.join(os.path.dirname(SITE), *own.split(".")[1:])
    return os.path.exists(path) or os.path.exists(f"{path}.py")


if __name__ == "__main__":
    main()
